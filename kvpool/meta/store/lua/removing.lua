-- What lies where, and how it leaves: placements, orders to nodes, the memory of what left.

local FREED_MAX = 1024

local function add_place(b, shard, s)
  local p = new_place()
  p.block, p.shard, p.segment, p.slot = b.row, shard, s.number, NO_SLOT
  p.generation, p.checksum = string.rep('\0', 8), string.rep('\0', 8)
  p.next, b.place = b.place, p.row
  p.after, p.before = s.first, NIL
  if s.first ~= NIL then place(s.first).before = p.row end
  s.first, s.blocks = p.row, s.blocks + 1
  return p
end

local function remove_place(p)
  local b, s = block(p.block), segment(p.segment)
  if b.place == p.row then
    b.place = p.next
  else
    local before = place(b.place)
    while before.next ~= p.row do before = place(before.next) end
    before.next = p.next
  end
  if p.before ~= NIL then place(p.before).after = p.after else s.first = p.after end
  if p.after ~= NIL then place(p.after).before = p.before end
  s.blocks = s.blocks - 1
  p.block, p.next, ns.free_place = NIL, ns.free_place, p.row
end

local function places_of(b)
  local found, row = {}, b.place
  while row ~= NIL do
    found[#found + 1] = place(row)
    row = found[#found].next
  end
  return found
end

local function find_place(b, shard, number)
  local row = b.place
  while row ~= NIL do
    local p = place(row)
    if p.shard == shard and p.segment == number then return p end
    row = p.next
  end
  return nil
end

-- Orders are kept by segment id, which outlives a node's session: a freed block is never taken for a new one.
local function order_free(p, rest)
  if p.slot == NO_SLOT then return end
  local s = segment(p.segment)
  rest = rest or s.spared_us > now
  count('last_order')
  local slot = struct.pack('<I4', p.slot)
  local order = struct.pack('<dI4c8B', ns.last_order, p.slot, p.generation, rest and 1 or 0)
  redis.call('HSET', P .. 'out:' .. s.id, slot, order)
  redis.call('ZADD', P .. 'outq:' .. s.id, ns.last_order, slot)
  local freed = P .. 'freed:' .. int(s.number)
  if redis.call('RPUSH', freed, order) > FREED_MAX then redis.call('LPOP', freed) end
end

local function has_freed(id, slot, generation)
  local order = redis.call('HGET', P .. 'out:' .. id, struct.pack('<I4', slot))
  return order and string.sub(order, 13, 20) == generation
end

local function bury(b, reason, cause, number)
  if ns.tombstones == 0 then return end
  local known = redis.call('HGET', P .. 'tomb', b.hash)
  count('buried')
  if not known then count('tombs') end
  local tombstone = cjson.encode({ int(ns.buried), reason, cause or '', number, int(now), int(b.used_us) })
  redis.call('HSET', P .. 'tomb', b.hash, tombstone)
  redis.call('RPUSH', P .. 'tombq', b.hash .. int(ns.buried))
  while ns.tombs > ns.tombstones do
    local oldest = redis.call('LPOP', P .. 'tombq')
    if not oldest then return end
    local hash = string.sub(oldest, 1, HASH)
    local found = redis.call('HGET', P .. 'tomb', hash)
    if found and cjson.decode(found)[1] == string.sub(oldest, HASH + 1) then
      redis.call('HDEL', P .. 'tomb', hash)
      count('tombs', -1)
    end
  end
end

local function rows_key(number) return P .. 'r:' .. int(number) end

-- The block is in flight no more.
local function release_writer(b)
  if b.writer == 0 then return end
  local rows = written[b.writer] or {}
  written[b.writer] = rows
  rows[#rows + 1], b.writer = b.row, 0
end

local function forget(b, reason, cause, number)
  if reason ~= 'cold' then bury(b, reason, cause, number) end -- else it found no room: why it left before still holds
  release_writer(b)
  remove(b)
end

local function remove_block(b, reason, cause)
  local rest = b.first ~= NIL or hold_us(b) > now -- a lease on a block below covers this one too
  local number = b.place ~= NIL and home(b) or NIL
  for _, p in ipairs(places_of(b)) do
    order_free(p, rest)
    remove_place(p)
  end
  forget(b, reason, cause, number)
end

local function evict(b, cause)
  count('evicted_blocks')
  if cause == 'scattered' then count('scattered_blocks') end
  count('evicted_bytes', #places_of(b) * ns.slot_bytes)
  remove_block(b, 'evicted', cause)
end

local function drop_place(p, reason, cause, with_order)
  local b, shard, number = block(p.block), p.shard, p.segment
  if with_order then order_free(p, true) end
  remove_place(p)
  if b.place == NIL then return forget(b, reason, cause, number) end
  if b.state == IN_FLIGHT then return remove_block(b, reason, cause) end
  for _, other in ipairs(places_of(b)) do
    if other.shard == shard then return push_leaf(b) end
  end
  b.missing = b.missing + 1
  doze({ b }, real(b.parent))
  bury(b, reason, cause, number)
  push_leaf(b)
end

local function complete_shard(b)
  b.missing = b.missing - 1
  if b.missing > 0 then return doze({ b }, real(b.parent)) end -- the others come from other nodes, or never
  complete(b)
end

-- Free what abandoned reservations hold, and forget leases that ran out.
local function expire()
  for _, number in ipairs(redis.call('ZRANGEBYSCORE', P .. 'due', '-inf', now, 'LIMIT', 0, SLICE)) do
    written[tonumber(number)] = written[tonumber(number)] or {} -- it is over, whatever it has left
    for _, row in ipairs(redis.call('SMEMBERS', P .. 'r:' .. number)) do
      count('expired_blocks')
      remove_block(block(tonumber(row)), 'expired')
    end
  end
  for _, number in ipairs(redis.call('ZRANGEBYSCORE', P .. 'lease_ends', '-inf', now, 'LIMIT', 0, SLICE)) do
    end_lease(number)
  end
end
