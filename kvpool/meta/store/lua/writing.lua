-- Reserve, commit, abort: as kvpool/core/directory/writing.py.

local WANTED, EXISTS, IS_IN_FLIGHT, NO_ROOM = 0, 1, 2, 3
local WRITTEN = '<c32HI4c8c8'
local WRITTEN_BYTES = 54

local function visible_prefix(hashes, blocks_asked)
  local low, step, high = 0, 1, nil
  local function is_visible(i)
    local b = present(hash_at(hashes, i))
    return b and b.state == VISIBLE
  end
  while low < blocks_asked do
    local probe = math.min(low + step, blocks_asked) - 1
    if not is_visible(probe) then
      high = probe
      break
    end
    low, step = probe + 1, step * 2
  end
  if not high then return blocks_asked end
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_visible(middle) then low = middle + 1 else high = middle end
  end
  return low
end

local function missing_ancestor(hashes, first, parent)
  if parent ~= '' and not present(parent) then return -1 end
  for i = first > 0 and visible_prefix(hashes, first) or 0, first - 1 do
    if not present(hash_at(hashes, i)) then return i end
  end
  return nil
end

local function open_writer(owner, deadline_us)
  count('last_number')
  local number = ns.base + ns.last_number
  redis.call('ZADD', P .. 'due', deadline_us, int(number))
  if owner ~= '' then redis.call('HSET', P .. 'owners', int(number), owner) end
  return number
end

local function share_of(w, number, shard)
  local key = number * 256 + shard
  local share = w.shares[key]
  if not share then
    share = { number = number, shard = shard, indexes = {} }
    w.shares[key] = share
    w.order[#w.order + 1] = share
  end
  return share.indexes
end

local function choice_near(w, b)
  return b and b.place ~= NIL and w.choices.by_number[home(b)] or nil
end

local function claim(w, b)
  b.writer = w.number
  w.rows[#w.rows + 1] = b.row
end

-- As many new blocks from `i` on as one segment takes without evicting; how many.
local function place_run(w, i, above, near)
  local c, most = room(w.choices, ns.slot_bytes * ns.shards, near, w.last - i + 1)
  if not c then return nil end
  local done = 0
  while done < most do
    local hash = hash_at(w.hashes, i + done)
    if done > 0 and present(hash) then break end
    local b = insert(hash, above)
    claim(w, b)
    for shard = 0, ns.shards - 1 do
      add_place(b, shard, use_segment(c.number, c.id))
      table.insert(share_of(w, c.number, shard), i + done - w.first)
    end
    above, done = hash, done + 1
  end
  return done, c
end

-- One block, evicting what must go. It is linked first: as a child in flight it keeps its ancestors.
local function place_one(w, i, above, near)
  local b, chosen = insert(hash_at(w.hashes, i), above), {}
  claim(w, b)
  for shard = 0, ns.shards - 1 do
    local c = choose(w.choices, near, w.age_slack)
    if not c then
      w.rows[#w.rows] = nil
      b.writer = 0
      remove_block(b, 'cold')
      return nil
    end
    add_place(b, shard, use_segment(c.number, c.id))
    chosen[shard], near = c, c
  end
  for shard = 0, ns.shards - 1 do table.insert(share_of(w, chosen[shard].number, shard), i - w.first) end
  return 1, near
end

-- A block that need not be written; false when the hashes are not one chain.
local function standing(hash, above)
  local b = present(hash)
  if not b then return nil end
  if parent_hash(b) ~= above then return false end
  if b.state == DORMANT and b.missing > 0 then -- written anew, rather than wait for a node that may never come back
    remove_block(b, 'node_down')
    return nil
  end
  return b
end

local function give_back(w)
  for _, row in ipairs(w.rows) do
    local b = block(row)
    b.writer = 0
    remove_block(b, 'expired', 'aborted')
  end
  redis.call('ZREM', P .. 'due', int(w.number))
  redis.call('HDEL', P .. 'owners', int(w.number))
end

local function walk(w, above)
  local wants, above_b = {}, above ~= '' and present(above) or nil
  local near = above_b and above_b.first == NIL and choice_near(w, above_b) or nil -- a branch may lie anywhere
  local i = w.first
  while i <= w.last do
    local hash = hash_at(w.hashes, i)
    local b = standing(hash, above)
    if b == false then return nil, i end
    if b then
      near = b.first == NIL and (choice_near(w, b) or near) or nil
      wants[#wants + 1] = b.state == IN_FLIGHT and IS_IN_FLIGHT or EXISTS
      i = i + 1
    else
      local done, c = place_run(w, i, above, near)
      if not done then done, c = place_one(w, i, above, near) end
      if not done then
        count('refused_blocks', w.last - i + 1)
        while i <= w.last do
          wants[#wants + 1] = NO_ROOM
          i = i + 1
        end
        break
      end
      for _ = 1, done do wants[#wants + 1] = WANTED end
      near, i = c, i + done
    end
    above = hash_at(w.hashes, i - 1)
  end
  return wants
end

-- What nodes must free for the new blocks, and no grant has carried yet: {number, orders, ...}.
local function take_freed(numbers)
  local found, taken = {}, {}
  for _, number in ipairs(numbers) do
    if not taken[number] then
      taken[number] = true
      local key = P .. 'freed:' .. int(number)
      found[#found + 1] = number
      found[#found + 1] = table.concat(redis.call('LRANGE', key, 0, -1))
      redis.call('DEL', key)
    end
  end
  return found
end

-- Blocks of a chain that would have to be written.
local function lacking(hashes, first)
  local last, lack = #hashes / HASH - 1, 0
  find_all(hashes, first, last)
  for i = first, last do
    local b = present(hash_at(hashes, i))
    if not b or (b.state == DORMANT and b.missing > 0) then lack = lack + 1 end
  end
  return lack
end

-- {missing_from} | {'loop'} | {'chain', i} | {'ok', number, wants, shares, freed}
local function reserve(hashes, first, parent, owner, ttl_us, choices, age_slack)
  expire()
  local last = #hashes / HASH - 1
  find_all(hashes, first, last)
  local missing = missing_ancestor(hashes, first, parent)
  if missing then return { 'missing', missing } end
  local above, is_new, has_ghost = first > 0 and hash_at(hashes, first - 1) or parent, {}, false
  for i = first, last do
    local hash = hash_at(hashes, i)
    if find(hash) ~= NIL and block(find(hash)).state == GHOST then is_new[hash], has_ghost = true, true end
  end
  if has_ghost and would_loop(is_new, above) then return { 'loop' } end
  local w = { hashes = hashes, first = first, last = last, choices = choices, age_slack = age_slack,
    shares = {}, order = {}, rows = {}, number = open_writer(owner, now + ttl_us) }
  local wants, bad = walk(w, above)
  if not wants then
    give_back(w)
    return { 'chain', bad }
  end
  if #w.rows == 0 then
    give_back(w)
    w.number = 0
  end
  for start = 1, #w.rows, SLICE do
    redis.call('SADD', rows_key(w.number), unpack(w.rows, start, math.min(start + SLICE - 1, #w.rows)))
  end
  local shares, numbers = {}, {}
  for _, share in ipairs(w.order) do
    numbers[#numbers + 1] = share.number
    local indexes = {}
    for _, i in ipairs(share.indexes) do indexes[#indexes + 1] = struct.pack('<I4', i) end
    shares[#shares + 1] = struct.pack('<HH', share.number, share.shard)
    shares[#shares + 1] = table.concat(indexes)
  end
  local said = {}
  for _, want in ipairs(wants) do said[#said + 1] = string.char(want) end
  return { 'ok', int(w.number), table.concat(said), shares, take_freed(numbers) }
end

local function commit(number, segment_number, written)
  local statuses = {}
  for at = 1, #written, WRITTEN_BYTES do
    local hash, shard, slot, generation, checksum = struct.unpack(WRITTEN, written, at)
    local b = present(hash)
    local p = b and b.writer == number and b.state == IN_FLIGHT and find_place(b, shard, segment_number) or nil
    if p and slot ~= NO_SLOT and p.slot == NO_SLOT then
      p.slot, p.generation, p.checksum = slot, generation, checksum
      b.missing = b.missing - 1
      if b.missing == 0 then
        release_writer(b)
        b.used_us = now
        complete(b)
      end
      statuses[#statuses + 1] = '\0'
    else
      statuses[#statuses + 1] = '\1'
    end
  end
  return table.concat(statuses)
end

-- Blocks given back: all of the reservation, or those of `hashes`.
local function abort(number, hashes, crowded)
  local rows, seen = {}, {}
  if hashes == '' then rows = redis.call('SMEMBERS', rows_key(number)) end
  for i = 0, #hashes / HASH - 1 do rows[#rows + 1] = find(hash_at(hashes, i)) end
  local done = 0
  for _, row in ipairs(rows) do
    row = tonumber(row)
    local b = row ~= NIL and not seen[row] and block(row) or nil
    if b and b.state == IN_FLIGHT and b.writer == number then
      seen[row], done = true, done + 1
      local where = {}
      for _, p in ipairs(places_of(b)) do where[p.segment] = true end
      remove_block(b, 'expired', 'aborted')
      for at in pairs(where) do
        if crowded then make_hole(at) end
      end
    end
  end
  return done
end
