-- What nodes say: inventories, slots that are gone, segments lost, orders applied.

local ANNOUNCED = '<c32c32HI4c8c8d'
local ANNOUNCED_BYTES = 94

-- The place of a copy that is known already; false when there is another, or the block is being written.
local function rehome(b, shard, s)
  for _, p in ipairs(places_of(b)) do
    if p.shard == shard then
      local other = segment(p.segment)
      if p.segment == s.number or p.slot == NO_SLOT or other.id ~= s.id then return false end
      return p -- the same memory, in an earlier session of its node
    end
  end
  return nil
end

local function announce_one(s, c, hash, above, shard, slot, generation, checksum, age_us, spared_us)
  if has_freed(s.id, slot, generation) or shard >= ns.shards or slot == NO_SLOT then return false end
  if used_of(c) + ns.slot_bytes > c.capacity then return false end
  local b = present(hash)
  local known
  if not b then
    if above == hash or would_loop({ [hash] = true }, above) then return false end
    b = insert(hash, above)
    b.used_us = math.max(0, now - age_us)
  elseif b.state == IN_FLIGHT or parent_hash(b) ~= above then
    return false
  else
    known = rehome(b, shard, s)
    if known == false then return false end
  end
  local p = add_place(b, shard, s)
  p.slot, p.generation, p.checksum = slot, generation, checksum
  if known then
    remove_place(known)
    push_leaf(b)
  else
    s.spared_us = math.max(s.spared_us, spared_us) -- nobody here knows what leases there are on it
    complete_shard(b)
  end
  return true
end

local function announce(c, spared_us, announced)
  local s, wanted = use_segment(c.number, c.id), {}
  for at = 1, #announced, ANNOUNCED_BYTES do
    local hash, above, shard, slot, generation, checksum, age_us = struct.unpack(ANNOUNCED, announced, at)
    if above == string.rep('\0', HASH) then above = '' end
    local is_wanted = announce_one(s, c, hash, above, shard, slot, generation, checksum, age_us, spared_us)
    wanted[#wanted + 1] = is_wanted and '\1' or '\0'
  end
  return table.concat(wanted)
end

local function gone(number, hash, slot, generation, reason, cause, with_order)
  local b = present(hash)
  for _, p in ipairs(b and places_of(b) or {}) do
    if p.segment == number and p.slot == slot and p.generation == generation then
      drop_place(p, reason, cause, with_order)
      if reason == 'verify_failed' then count('bad_blocks') end
      return 1
    end
  end
  return 0
end

-- Up to `most` placements of a lost segment go, the newest first; how many are left.
local function lose(number, most)
  local s = segment(number)
  if not s then return 0 end
  while s.blocks > 0 and most > 0 do
    count('lost_blocks')
    drop_place(place(s.first), 'node_down', nil, false)
    most = most - 1
  end
  if s.blocks > 0 then return s.blocks end
  segments[number] = false
  redis.call('HDEL', P .. 'seg', number)
  redis.call('DEL', leaf_key(number, 0), leaf_key(number, 1), P .. 'freed:' .. int(number))
  return 0
end

local function orders(id, after, most)
  local slots = redis.call('ZRANGEBYSCORE', P .. 'outq:' .. id, '(' .. int(after), '+inf', 'LIMIT', 0,
    math.min(most, SLICE))
  if #slots == 0 then return '' end
  return table.concat(redis.call('HMGET', P .. 'out:' .. id, unpack(slots)))
end

local function acknowledge(id, number)
  local key = P .. 'outq:' .. id
  local slots = redis.call('ZRANGEBYSCORE', key, '-inf', number, 'LIMIT', 0, SLICE)
  while #slots > 0 do
    redis.call('HDEL', P .. 'out:' .. id, unpack(slots))
    redis.call('ZREM', key, unpack(slots))
    slots = redis.call('ZRANGEBYSCORE', key, '-inf', number, 'LIMIT', 0, SLICE)
  end
end
