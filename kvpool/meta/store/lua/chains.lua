-- Who is whose parent, what is visible, and which leaf may go: as kvpool/core/directory/chains.py, with one difference.
-- A block whose parent is not there is linked to a ghost of it, which turns into the block when that comes.

local function hold_us(b)
  local pinned = ns.pins and ns.pins > 0 and tonumber(redis.call('HGET', P .. 'pins', b.row)) or NEVER
  return math.max(b.held_us, pinned)
end

-- Where the block waits to be evicted: with its first placement, the last of its list.
local function home(b)
  local p = place(b.place)
  while p.next ~= NIL do p = place(p.next) end
  return p.segment
end

local function rank(b) return b.state == VISIBLE and 1 or 0 end

local function leaf_key(number, of_rank) return P .. 'leaf:' .. int(number) .. ':' .. of_rank end

-- Entries are lazy: they are looked at again when they come first.
local function push_leaf(b)
  if b.first == NIL and b.state > IN_FLIGHT and b.place ~= NIL then
    redis.call('ZADD', leaf_key(home(b), rank(b)), b.used_us, b.row)
  end
end

local function wake_held()
  for _, row in ipairs(redis.call('ZRANGEBYSCORE', P .. 'held', '-inf', now, 'LIMIT', 0, SLICE)) do
    redis.call('ZREM', P .. 'held', row)
    row = tonumber(row)
    if row < ns.next_block then push_leaf(block(row)) end
  end
end

-- The least recently used leaf of a segment that nobody holds, dormant ones first; nil when there is none.
local function oldest_leaf(number)
  for of_rank = 0, 1 do
    local key = leaf_key(number, of_rank)
    local found = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    while found[1] do
      local b, queued_us = block(tonumber(found[1])), tonumber(found[2])
      local is_leaf = b.first == NIL and b.state > IN_FLIGHT and b.place ~= NIL
      if not is_leaf or rank(b) ~= of_rank or home(b) ~= number then
        redis.call('ZREM', key, b.row)
      elseif hold_us(b) > now then
        redis.call('ZREM', key, b.row)
        redis.call('ZADD', P .. 'held', hold_us(b), b.row)
      elseif b.used_us > queued_us then
        redis.call('ZADD', key, b.used_us, b.row)
      else
        return b
      end
      found = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    end
  end
  return nil
end

-- Leases: by number, and on each leased row those that hold it.

local function lease_of(number)
  local raw = redis.call('HGET', P .. 'leases', number)
  if not raw then return nil end
  local row, until_us, bytes = struct.unpack('<i4dd', raw)
  return { row = row, until_us = until_us, bytes = bytes }
end

local function lease_key(row) return P .. 'l:' .. int(row) end

-- The leases of a row are charged once: the largest since it was last without.
local function charge(row, bytes)
  local charged = tonumber(redis.call('HGET', P .. 'charged', row)) or 0
  if bytes > charged then
    redis.call('HSET', P .. 'charged', row, bytes)
    count('leased_bytes', bytes - charged)
  end
end

local function put_lease(number, row, until_us, bytes)
  redis.call('HSET', P .. 'leases', number, struct.pack('<i4dd', row, until_us, bytes))
  redis.call('ZADD', lease_key(row), until_us, number)
  charge(row, bytes)
end

local function uncharge(row)
  count('leased_bytes', -(tonumber(redis.call('HGET', P .. 'charged', row)) or 0))
  redis.call('HDEL', P .. 'charged', row)
end

local function end_lease(number)
  local lease = lease_of(number)
  if not lease then return nil end
  redis.call('HDEL', P .. 'leases', number)
  redis.call('ZREM', P .. 'lease_ends', number)
  redis.call('ZREM', lease_key(lease.row), number)
  if redis.call('ZCARD', lease_key(lease.row)) == 0 then uncharge(lease.row) end
  return lease.row
end

local function move_leases(row, heir)
  if redis.call('HEXISTS', P .. 'charged', row) == 0 then return end
  local numbers = redis.call('ZRANGE', lease_key(row), 0, -1)
  redis.call('DEL', lease_key(row))
  uncharge(row)
  for _, number in ipairs(numbers) do
    local lease = lease_of(number)
    if heir then
      put_lease(number, heir, lease.until_us, lease.bytes)
    else
      redis.call('HDEL', P .. 'leases', number)
      redis.call('ZREM', P .. 'lease_ends', number)
    end
  end
end

-- Links and states

local function real(row)
  local b = row >= 0 and block(row) or nil
  return b and b.state ~= GHOST and b or nil
end

local function parent_hash(b) return b.parent >= 0 and block(b.parent).hash or '' end

local function parent_is_visible(b)
  return b.parent == ROOT or (b.parent >= 0 and block(b.parent).state == VISIBLE)
end

local function link(b, parent)
  b.parent, b.following, b.previous = parent.row, parent.first, NIL
  if parent.first ~= NIL then block(parent.first).previous = b.row end
  parent.first = b.row
end

local function unlink(b)
  if b.parent < 0 then return end
  local parent = block(b.parent)
  if b.previous ~= NIL then block(b.previous).following = b.following else parent.first = b.following end
  if b.following ~= NIL then block(b.following).previous = b.previous end
  b.parent = NIL
  if parent.first ~= NIL then return end
  if parent.state == GHOST then free_block(parent) else push_leaf(parent) end
end

local function insert(hash, above)
  local row = find(hash)
  local b = row ~= NIL and block(row) or new_block(hash)
  b.state, b.missing, b.used_us, b.held_us, b.place, b.writer = IN_FLIGHT, ns.shards, now, NEVER, NIL, 0
  b.parent = ROOT
  if above ~= '' then
    local parent = find(above)
    link(b, parent ~= NIL and block(parent) or new_block(above))
  end
  count('live')
  return b
end

-- Whether the block `above` lies below one of the new hashes: a ring has no leaf, so nothing could ever evict it.
local function would_loop(is_new, above)
  local row = above ~= '' and find(above) or NIL
  local b = row ~= NIL and block(row) or nil
  if not b or b.state == VISIBLE then return false end
  while b.parent >= 0 do b = block(b.parent) end
  return b.state == GHOST and is_new[b.hash] == true
end

local function fold(b, heir)
  if heir then
    heir.used_us, heir.held_us = math.max(heir.used_us, b.used_us), math.max(heir.held_us, b.held_us)
  end
  move_leases(b.row, heir and heir.row)
end

local function children(b, found)
  local row = b.first
  while row ~= NIL do
    local child = block(row)
    found[#found + 1] = child
    row = child.following
  end
  return found
end

local function wake(b)
  local stack = { b }
  while #stack > 0 do
    local top = table.remove(stack)
    top.state = VISIBLE
    push_leaf(top)
    for _, child in ipairs(children(top, {})) do
      if child.state == DORMANT and child.missing == 0 then stack[#stack + 1] = child end
    end
  end
end

local function complete(b)
  if parent_is_visible(b) then return wake(b) end
  b.state = DORMANT
  push_leaf(b)
end

-- Blocks of one parent turn dormant, and what is visible below them; what they know of use and holds goes to `heir`.
local function doze(level, heir)
  while #level > 0 do
    local below = {}
    for _, b in ipairs(level) do
      if b.state == VISIBLE then children(b, below) end
    end
    for _, b in ipairs(level) do
      fold(b, heir)
      b.state = DORMANT
      push_leaf(b)
    end
    level = {}
    for _, child in ipairs(below) do
      if child.state == VISIBLE then level[#level + 1] = child end
    end
  end
end

local function remove(b)
  local awake = {}
  for _, child in ipairs(children(b, {})) do
    if child.state == VISIBLE then awake[#awake + 1] = child end
  end
  doze(awake, b)
  fold(b, real(b.parent))
  if ns.pins and ns.pins > 0 then count('pins', -redis.call('HDEL', P .. 'pins', b.row)) end
  count('live', -1)
  unlink(b)
  if b.first == NIL then return free_block(b) end
  b.state, b.parent, b.place, b.held_us, b.missing = GHOST, NIL, NIL, NEVER, 0
end
