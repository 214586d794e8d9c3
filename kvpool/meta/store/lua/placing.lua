-- Where a new block goes, and what makes room for it: as kvpool/core/directory/placing.py. The caller says which segments
-- there are, and what other namespaces use of them; it makes room in those first, if they hold older leaves.

local FILL_SLACK = 0.05
local HOLE_FACTOR = 3
local CHOICE = '<HBddc16' -- number, takes new blocks, capacity, used by other namespaces, id
local CHOICE_BYTES = 35

local function read_choices(packed)
  local choices, capacity, others = {}, 0, 0
  for at = 1, #packed, CHOICE_BYTES do
    local c = {}
    local takes
    c.number, takes, c.capacity, c.others, c.id = struct.unpack(CHOICE, packed, at)
    c.takes = takes == 1
    choices[#choices + 1], choices.by_number = c, choices.by_number or {}
    choices.by_number[c.number] = c
    capacity, others = capacity + c.capacity, others + c.others
  end
  choices.by_number = choices.by_number or {}
  choices.capacity, choices.others = capacity, others
  return choices
end

local function used_of(c) return c.others + used_bytes(c.number) end

local function used_of_all(choices)
  local used = 0
  for _, c in ipairs(choices) do used = used + used_of(c) end
  return used
end

local function with_room(choices, size, near)
  local used = used_of_all(choices)
  if choices.capacity - used < size then return nil end
  local mean = used / choices.capacity
  if near and near.takes and near.capacity - used_of(near) >= size
      and used_of(near) <= (mean + FILL_SLACK) * near.capacity then
    return near
  end
  local best
  for _, c in ipairs(choices) do
    if c.takes and c.capacity - used_of(c) >= size
        and (not best or used_of(c) / c.capacity < used_of(best) / best.capacity) then
      best = c
    end
  end
  return best
end

-- A segment that takes slots without evicting, and how many until another would be chosen.
local function room(choices, size, near, most)
  local c = with_room(choices, size, near)
  if not c then return nil end
  local level = (used_of_all(choices) / choices.capacity + FILL_SLACK) * c.capacity
  local before_level = math.floor((level - used_of(c)) / size)
  return c, math.max(1, math.min(most, math.floor((c.capacity - used_of(c)) / size), before_level))
end

local function older(one, other)
  if rank(one) ~= rank(other) then return rank(one) < rank(other) end
  return one.used_us < other.used_us
end

local function first_of(c)
  local s = segment(c.number)
  if not s or not c.takes or s.spared_us > now then return nil end
  return oldest_leaf(c.number)
end

-- The oldest leaf of all segments, or that of the parent's if it is nearly as old.
local function victim(choices, near, age_slack)
  wake_held()
  local oldest, own
  for _, c in ipairs(choices) do
    local first = c.capacity >= ns.slot_bytes and first_of(c) or nil
    if first and (not oldest or older(first, oldest)) then oldest = first end
    if first and near and c.number == near.number then own = first end
  end
  if own and rank(own) == rank(oldest) and own.used_us - oldest.used_us <= age_slack * (now - oldest.used_us) then
    return own
  end
  return oldest
end

local function choose(choices, near, age_slack)
  while true do
    local c = with_room(choices, ns.slot_bytes, near)
    if c then return c end
    local leaf = victim(choices, near, age_slack)
    if not leaf then return nil end
    evict(leaf, 'room')
  end
end

-- A node had the bytes for a slot but no extent long enough: its oldest leaves go, a few slots' worth.
local function make_hole(number)
  local s = segment(number)
  if not s or s.spared_us > now then return end
  local goal = s.blocks - HOLE_FACTOR
  while s.blocks > goal do
    wake_held()
    local leaf = oldest_leaf(number)
    if not leaf then return end
    evict(leaf, 'scattered')
  end
end

-- Make room for another namespace: leaves older than the given one go, up to so many bytes.
local function evict_older(choices, bytes, than_rank, than_us)
  local freed = 0
  while freed < bytes do
    local leaf = victim(choices, nil, 0)
    local than = { state = than_rank == 1 and VISIBLE or DORMANT, used_us = than_us }
    if not leaf or not older(leaf, than) then break end
    freed = freed + #places_of(leaf) * ns.slot_bytes
    evict(leaf, 'room')
  end
  return freed
end
