-- One namespace as rows of fixed size, packed into strings: the same tables as the directory in memory
-- (kvpool/core/directory/table.py). A function reads the rows that it needs once, changes them as tables of named fields,
-- and writes what has changed when it ends. (A library is loaded without `struct` and `string`: sizes are written out.)

local NIL, ROOT = -1, -2
local GHOST, IN_FLIGHT, DORMANT, VISIBLE = 0, 1, 2, 3 -- a ghost is a hash that is not there, but that children wait for
local NEVER, FOREVER = -1, 9e15
local NO_SLOT = 0xFFFFFFFF
local HASH = 32
local CHUNK = 254 -- rows a string: with these, both kinds fill what the allocator gives them
local SLICE = 1000 -- arguments of one command, so that Lua's stack holds them

local BLOCK = '<c32i4i4i4i4i4BHddd'
local BLOCK_BYTES = 79
local STATE_AT = HASH + 5 * 4
local USED_AT = STATE_AT + 1 + 2 + 8
local PLACE = '<i4HHI4c8c8i4i4i4'
local PLACE_BYTES = 40
local SEGMENT = '<c16i4dd'

local P, ns, now, blocks, places, segments, index, indexed, chunks, written

local function int(number) return string.format('%.0f', number) end

local function hash_at(hashes, i) return string.sub(hashes, i * HASH + 1, (i + 1) * HASH) end

local function chunk_key(kind, number) return P .. kind .. int(number) end

-- The string that a row is in, and where: the whole string is read only when a second row of it is asked for.
local function read_record(kind, row, size)
  local at = row % CHUNK
  local number, read = (row - at) / CHUNK, chunks[kind]
  local chunk = read[number]
  if chunk == nil then
    read[number] = false
    return redis.call('GETRANGE', chunk_key(kind, number), at * size, (at + 1) * size - 1), 1
  elseif not chunk then
    chunk = redis.call('GET', chunk_key(kind, number))
    read[number] = chunk
  end
  return chunk, at * size + 1
end

local function write_record(kind, row, size, offset, bytes)
  local at = row % CHUNK
  redis.call('SETRANGE', chunk_key(kind, (row - at) / CHUNK), at * size + offset, bytes)
end

-- Write many rows, those that follow one another in a string at once.
local function write_rows(kind, size, packed)
  local rows = {}
  for row in pairs(packed) do rows[#rows + 1] = row end
  table.sort(rows)
  local i = 1
  while i <= #rows do
    local first, run = rows[i], { packed[rows[i]] }
    while rows[i + 1] == first + #run and rows[i + 1] % CHUNK ~= 0 do
      i = i + 1
      run[#run + 1] = packed[rows[i]]
    end
    write_record(kind, first, size, 0, table.concat(run))
    i = i + 1
  end
end

local function block(row)
  local b = blocks[row]
  if not b then
    local chunk, at = read_record('b:', row, BLOCK_BYTES)
    b = { row = row, raw = string.sub(chunk, at, at + BLOCK_BYTES - 1) }
    b.hash, b.parent, b.first, b.following, b.previous, b.place, b.state, b.missing, b.writer, b.used_us, b.held_us =
      struct.unpack(BLOCK, b.raw)
    blocks[row] = b
  end
  return b
end

local function place(row)
  local p = places[row]
  if not p then
    local chunk, at = read_record('p:', row, PLACE_BYTES)
    p = { row = row, raw = string.sub(chunk, at, at + PLACE_BYTES - 1) }
    p.block, p.shard, p.segment, p.slot, p.generation, p.checksum, p.next, p.after, p.before =
      struct.unpack(PLACE, p.raw)
    places[row] = p
  end
  return p
end

-- The part of a segment that this namespace uses; nil when it uses nothing there.
local function segment(number)
  local s = segments[number]
  if s == nil then
    local raw = redis.call('HGET', P .. 'seg', number)
    s = false
    if raw then
      s = { number = number, raw = raw }
      s.id, s.first, s.blocks, s.spared_us = struct.unpack(SEGMENT, raw)
    end
    segments[number] = s
  end
  return s or nil
end

local function use_segment(number, id)
  local s = segment(number)
  if not s then
    s = { number = number, id = id, first = NIL, blocks = 0, spared_us = NEVER }
    segments[number] = s
  end
  return s
end

local function used_bytes(number)
  local s = segment(number)
  return s and s.blocks * ns.slot_bytes or 0
end

local function find(hash)
  local row = index[hash]
  if row == nil then
    row = tonumber(redis.call('HGET', P .. 'idx', hash)) or NIL
    index[hash] = row
  end
  return row
end

-- Look many hashes up at once, for `find` to know; what this call has changed it knows better than Redis yet does.
local function find_all(hashes, from, to)
  for start = from, to, SLICE do
    local some = {}
    for i = start, math.min(start + SLICE - 1, to) do
      local hash = hash_at(hashes, i)
      if index[hash] == nil then some[#some + 1] = hash end
    end
    local rows = #some > 0 and redis.call('HMGET', P .. 'idx', unpack(some)) or {}
    for i, hash in ipairs(some) do index[hash] = tonumber(rows[i]) or NIL end
  end
end

local function present(hash)
  local row = find(hash)
  local b = row ~= NIL and block(row) or nil
  return b and b.state ~= GHOST and b or nil
end

local function new_row(kind, size, following)
  local row = ns[following]
  ns[following] = row + 1
  if row % CHUNK == 0 then -- at its full length at once: growing it would cost up to twice the bytes
    redis.call('SETRANGE', P .. kind .. int(row / CHUNK), CHUNK * size - 1, '\0')
  end
  return row
end

local function new_block(hash)
  local row = ns.free_block
  if row == NIL then row = new_row('b:', BLOCK_BYTES, 'next_block') else ns.free_block = block(row).parent end
  local b = {
    row = row, hash = hash, parent = NIL, first = NIL, following = NIL, previous = NIL, place = NIL, state = GHOST,
    missing = 0, writer = 0, used_us = 0, held_us = NEVER,
  }
  blocks[row], index[hash], indexed[hash] = b, row, row
  return b
end

local function free_block(b)
  index[b.hash], indexed[b.hash] = NIL, NIL
  b.hash, b.state, b.parent, b.first, b.place = string.rep('\0', HASH), GHOST, ns.free_block, NIL, NIL
  ns.free_block = b.row
end

local function new_place()
  local row = ns.free_place
  if row == NIL then row = new_row('p:', PLACE_BYTES, 'next_place') else ns.free_place = place(row).next end
  local p = { row = row }
  places[row] = p
  return p
end

local function count(name, by) ns[name] = (ns[name] or 0) + (by or 1) end

-- Begin: `prefix` is that of the namespace's keys. Time never runs backwards, whichever server counts it.
local function open(prefix)
  P, blocks, places, segments, index, indexed, written = prefix, {}, {}, {}, {}, {}, {}
  chunks = { ['b:'] = {}, ['p:'] = {} }
  local fields = redis.call('HGETALL', P .. 'ns')
  ns = { raw = {} }
  for i = 1, #fields, 2 do
    ns.raw[fields[i]] = fields[i + 1]
    ns[fields[i]] = tonumber(fields[i + 1]) or fields[i + 1]
  end
  if not ns.slot_bytes then return false end
  local time = redis.call('TIME')
  now = math.max(time[1] * 1e6 + time[2], ns.clock or 0)
  ns.clock = now
  return true
end

local function close_index()
  local set, gone = {}, {}
  for hash, row in pairs(indexed) do
    if row == NIL then
      gone[#gone + 1] = hash
    else
      set[#set + 1], set[#set + 2] = hash, row
    end
  end
  for i = 1, #set, SLICE do redis.call('HSET', P .. 'idx', unpack(set, i, math.min(i + SLICE - 1, #set))) end
  for i = 1, #gone, SLICE do redis.call('HDEL', P .. 'idx', unpack(gone, i, math.min(i + SLICE - 1, #gone))) end
end

-- Reservations that lost rows; one without any is over.
local function close_writers()
  for number, rows in pairs(written) do
    local key = P .. 'r:' .. int(number)
    for i = 1, #rows, SLICE do redis.call('SREM', key, unpack(rows, i, math.min(i + SLICE - 1, #rows))) end
    if redis.call('EXISTS', key) == 0 then
      redis.call('ZREM', P .. 'due', int(number))
      redis.call('HDEL', P .. 'owners', int(number))
    end
  end
end

local function close_tables()
  local changed = {}
  for row, b in pairs(blocks) do
    local raw = struct.pack(BLOCK, b.hash, b.parent, b.first, b.following, b.previous, b.place, b.state, b.missing,
      b.writer, b.used_us, b.held_us)
    if raw ~= b.raw then changed[row] = raw end
  end
  write_rows('b:', BLOCK_BYTES, changed)
  changed = {}
  for row, p in pairs(places) do
    local raw = struct.pack(PLACE, p.block, p.shard, p.segment, p.slot, p.generation, p.checksum, p.next, p.after, p.before)
    if raw ~= p.raw then changed[row] = raw end
  end
  write_rows('p:', PLACE_BYTES, changed)
end

-- End: write what has changed.
local function close()
  close_index()
  close_writers()
  close_tables()
  for number, s in pairs(segments) do
    local raw = s and struct.pack(SEGMENT, s.id, s.first, s.blocks, s.spared_us)
    if s and raw ~= s.raw then redis.call('HSET', P .. 'seg', number, raw) end
  end
  for name, value in pairs(ns) do
    if name ~= 'raw' and type(value) == 'number' and ns.raw[name] ~= int(value) then
      redis.call('HSET', P .. 'ns', name, int(value))
    end
  end
end
