-- Match, locate, explain: as kvpool/core/directory/lookup.py.

local UNCAPPED = -1

-- Length of the visible prefix by O(log n) reads of one byte, and the row of its last block.
local function peek_visible(hash)
  local row = tonumber(redis.call('HGET', P .. 'idx', hash))
  if not row then return nil end
  local at = row % CHUNK
  local offset = at * BLOCK_BYTES + STATE_AT
  local state = redis.call('GETRANGE', P .. 'b:' .. int((row - at) / CHUNK), offset, offset)
  return string.byte(state) == VISIBLE and row or nil
end

local function prefix(hashes, asked)
  local low, step, high, last = 0, 1, nil, nil
  while low < asked do
    local probe = math.min(low + step, asked) - 1
    local row = peek_visible(hash_at(hashes, probe))
    if not row then
      high = probe
      break
    end
    low, step, last = probe + 1, step * 2, row
  end
  if not high then return asked, last end
  while low < high do
    local middle = math.floor((low + high) / 2)
    local row = peek_visible(hash_at(hashes, middle))
    if row then low, last = middle + 1, row else high = middle end
  end
  return low, last
end

local function tombstone(hash)
  local found = redis.call('HGET', P .. 'tomb', hash)
  return found and cjson.decode(found) or nil
end

-- Why a block cannot be matched; '' when it can. 'unknown': a shard has not come, and nobody knows why.
local function why(hash)
  local b = present(hash)
  if b and b.state == VISIBLE then return '' end
  if b and b.state == IN_FLIGHT then return 'in_flight' end
  if b and b.missing == 0 then return 'parent_missing' end
  local left = tombstone(hash)
  return left and left[2] or (b and 'unknown' or 'cold')
end

local function touch(row)
  write_record('b:', row, BLOCK_BYTES, USED_AT, struct.pack('<d', now))
end

-- Blocks of a match that the cap allows: leases may hold `share` of what the namespace uses, under pressure.
local function within_cap(first, matched, row, share)
  if share == UNCAPPED then return matched end
  for _, number in ipairs(redis.call('ZRANGEBYSCORE', P .. 'lease_ends', '-inf', now, 'LIMIT', 0, SLICE)) do
    end_lease(number)
  end
  local used = 0
  for _, number in ipairs(redis.call('HKEYS', P .. 'seg')) do used = used + used_bytes(tonumber(number)) end
  local block_bytes = ns.slot_bytes * ns.shards
  local spare = math.floor(share * used) - (ns.leased_bytes or 0)
  local charged = tonumber(redis.call('HGET', P .. 'charged', row)) or 0
  if (matched - first) * block_bytes <= spare + charged then return matched end
  return math.min(matched, first + math.max(0, math.floor(spare / block_bytes)))
end

local function grant_lease(row, lease_us, blocks_leased)
  local b, until_us = block(row), now + lease_us
  b.used_us, b.held_us = now, math.max(b.held_us, until_us)
  count('last_lease')
  local lease = int(ns.base + ns.last_lease)
  redis.call('ZADD', P .. 'lease_ends', until_us, lease)
  put_lease(lease, row, until_us, blocks_leased * ns.slot_bytes * ns.shards)
  return lease
end

-- The rest of a match of `whole` blocks that ends in `row`; `at(i)` is the hash of block i of the chain, nil where the
-- caller has not sent it: then it has to send all of them.
local function finish(asked, whole, row, first, lease_us, share, at)
  local matched = whole
  if lease_us > 0 and whole > 0 then matched = within_cap(first, whole, row, share) end
  if matched > 0 and matched < whole then
    local last = at(matched - 1)
    if not last then return { 'again' } end
    row = find(last)
  end
  local lease = '0'
  if matched > 0 and lease_us > 0 and matched > first then
    lease = grant_lease(row, lease_us, matched - first)
  elseif matched > 0 then
    touch(row)
  end
  local ends = matched < asked and at(matched) or nil
  if matched < asked and not ends then return { 'again' } end
  local reason = ends and why(ends) or ''
  if lease_us > 0 then close() end
  return { 'matched', matched, reason, lease, whole }
end

-- Of a chain of which blocks from `base` on are sent, those before being visible.
local function match(hashes, base, asked, first, lease_us, share)
  local found, row = prefix(hashes, math.min(#hashes / HASH, asked - base))
  if base > 0 and found == 0 then return { 'again' } end
  local function at(i) return i >= base and (i - base + 1) * HASH <= #hashes and hash_at(hashes, i - base) or nil end
  return finish(asked, base + found, row, first, lease_us, share, at)
end

-- Of a long chain of which some blocks are sent, ever farther apart, the last one among them. When they are all visible
-- the whole chain is; else the caller sends those between the last that is and the first that is not.
local function match_sparse(hashes, asked, first, lease_us, share)
  local row
  for i = 0, #hashes / HASH - 1 do
    local visible = peek_visible(hash_at(hashes, i))
    if not visible then return { 'between', i } end
    row = visible
  end
  return finish(asked, asked, row, first, lease_us, share, function() return nil end)
end

local function release(number)
  local row = end_lease(number)
  if not row then return 0 end
  local latest = redis.call('ZRANGE', lease_key(row), -1, -1, 'WITHSCORES')
  local b = block(row)
  b.held_us = tonumber(latest[2]) or NEVER
  push_leaf(b)
  return 1
end

-- Add the placements of a block to `found`; false when it is not visible.
local function add_places(found, row, i, shard)
  local chunk, start = read_record('b:', row, BLOCK_BYTES)
  local at, state = struct.unpack('<i4B', chunk, start + STATE_AT - 4)
  if state ~= VISIBLE then return false end
  while at ~= NIL do
    local places_read, begins = read_record('p:', at, PLACE_BYTES)
    local record = string.sub(places_read, begins, begins + PLACE_BYTES - 1)
    if ns.shards == 1 then
      found[#found + 1] = record
      return true
    end
    local of_shard = struct.unpack('<H', record, 5)
    if shard < 0 or of_shard == shard then found[#found + 1] = struct.pack('<I4', i) .. record end
    at = struct.unpack('<i4', record, PLACE_BYTES - 11)
  end
  return true
end

-- Placements of the visible blocks from `first` on; with their index where a block has several, else in order. It ends at
-- a hole, which only a list that is not one chain can have.
local function gather(hashes, first, matched, shard)
  local found = {}
  for start = first, matched - 1, SLICE do
    local some = {}
    for i = start, math.min(start + SLICE, matched) - 1 do some[#some + 1] = hash_at(hashes, i) end
    local rows = redis.call('HMGET', P .. 'idx', unpack(some))
    for i = 1, #some do
      local row = rows[i] and tonumber(rows[i])
      if not row or not add_places(found, row, start + i - 1 - first, shard) then return found, start + i - 1 - first end
    end
  end
  return found, math.max(0, matched - first)
end

local function locate(hashes, first, shard)
  local asked = #hashes / HASH
  local matched, last = prefix(hashes, asked)
  if last then touch(last) end
  local found, located = gather(hashes, first, matched, shard)
  if ns.shards == 1 and shard > 0 then found = {} end
  local reason = matched < asked and why(hash_at(hashes, matched)) or ''
  return { located, reason, table.concat(found) }
end

-- For people: why, where it is, who writes it, what is known of how it left, the nearest ancestor that is missing.
local function explain(hash)
  local reason, b, left = why(hash), present(hash), tombstone(hash)
  local said = { reason = reason, now = int(now) }
  if b then
    said.where = {}
    for _, p in ipairs(places_of(b)) do said.where[#said.where + 1] = p.segment end
    said.used = int(b.used_us)
    said.owner = b.writer ~= 0 and redis.call('HGET', P .. 'owners', int(b.writer)) or ''
    said.deadline = b.writer ~= 0 and redis.call('ZSCORE', P .. 'due', int(b.writer)) or ''
  end
  if reason == 'parent_missing' then
    local above = b
    while why(above.hash) == 'parent_missing' do above = block(above.parent) end
    said.missing, said.missing_reason = {}, why(above.hash)
    for at = 1, HASH do said.missing[at] = string.byte(above.hash, at) end
  end
  if left and (not b or (b.state == DORMANT and b.missing > 0)) then said.left = left end
  return cjson.encode(said)
end
