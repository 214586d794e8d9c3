-- What servers call. KEYS[1] is the first part of every key of one namespace, its hash tag included.

local UNKNOWN = { err = 'UNKNOWN the namespace is not open in this store' }

-- What takes more blocks in is refused while Redis is full; all else is not: it is how room comes back.
local GROWS = { kvpool_reserve = true, kvpool_announce = true }

local function register(name, callback, changes)
  redis.register_function({
    function_name = name .. SUFFIX,
    flags = GROWS[name] and {} or { 'allow-oom' },
    callback = function(keys, args)
      if not open(keys[1]) then return UNKNOWN end
      local answer = callback(args)
      if changes then close() end
      return answer
    end,
  })
end

redis.register_function('kvpool_open' .. SUFFIX, function(keys, args)
  local fresh = {
    slot_bytes = args[1], shards = args[2], base = args[3], tombstones = args[4], next_block = 0, free_block = NIL,
    next_place = 0, free_place = NIL,
  }
  for name, value in pairs(fresh) do redis.call('HSETNX', keys[1] .. 'ns', name, value) end
  return redis.status_reply('OK')
end)

register('kvpool_match', function(a)
  return match(a[1], tonumber(a[2]), tonumber(a[3]), tonumber(a[4]), tonumber(a[5]), tonumber(a[6]))
end)
register('kvpool_match_sparse', function(a)
  return match_sparse(a[1], tonumber(a[2]), tonumber(a[3]), tonumber(a[4]), tonumber(a[5]))
end)
register('kvpool_locate', function(a) return locate(a[1], tonumber(a[2]), tonumber(a[3])) end)
register('kvpool_explain', function(a) return explain(a[1]) end)
register('kvpool_why', function(a)
  local reasons = {}
  for i = 0, #a[1] / HASH - 1 do reasons[i + 1] = why(hash_at(a[1], i)) end
  return reasons
end)
register('kvpool_orders', function(a) return orders(a[1], tonumber(a[2]), tonumber(a[3])) end)
register('kvpool_stats', function()
  local used = {}
  for _, number in ipairs(redis.call('HKEYS', P .. 'seg')) do
    used[#used + 1] = tonumber(number)
    used[#used + 1] = segment(tonumber(number)).blocks
  end
  return { redis.call('HGETALL', P .. 'ns'), redis.call('ZCARD', P .. 'due'), redis.call('HLEN', P .. 'leases'), used }
end)
register('kvpool_lacking', function(a) return lacking(a[1], tonumber(a[2])) end)
register('kvpool_oldest', function(a)
  local leaf = victim(read_choices(a[1]), nil, 0)
  return leaf and { rank(leaf), int(leaf.used_us) } or {}
end)
register('kvpool_evict', function(a)
  local choices, numbers = read_choices(a[1]), {}
  local freed = evict_older(choices, tonumber(a[2]), tonumber(a[3]), tonumber(a[4]))
  for _, c in ipairs(choices) do numbers[#numbers + 1] = c.number end
  return { freed, take_freed(numbers) }
end, true)
register('kvpool_reserve', function(a)
  return reserve(a[1], tonumber(a[2]), a[3], a[4], tonumber(a[5]), read_choices(a[6]), tonumber(a[7]))
end, true)
register('kvpool_commit', function(a) return commit(tonumber(a[1]), tonumber(a[2]), a[3]) end, true)
register('kvpool_abort', function(a) return abort(tonumber(a[1]), a[2], a[3] == '1') end, true)
register('kvpool_expire', function() return expire() or 0 end, true)
register('kvpool_release', function(a) return release(a[1]) end, true)
register('kvpool_announce', function(a) return announce(read_choices(a[1])[1], tonumber(a[2]), a[3]) end, true)
register('kvpool_gone', function(a)
  return gone(tonumber(a[1]), a[2], tonumber(a[3]), a[4], a[5], a[6], a[7] == '1')
end, true)
register('kvpool_lose', function(a) return lose(tonumber(a[1]), tonumber(a[2])) end, true)
register('kvpool_acknowledge', function(a) return acknowledge(a[1], tonumber(a[2])) or 0 end, true)
register('kvpool_pin', function(a)
  local b = present(a[1])
  if not b then return 0 end
  count('pins', redis.call('HSET', P .. 'pins', b.row, tonumber(a[2]) < 0 and FOREVER or now + tonumber(a[2])))
  push_leaf(b)
  return 1
end, true)
register('kvpool_unpin', function(a)
  local b = present(a[1])
  if not b or redis.call('HDEL', P .. 'pins', b.row) == 0 then return 0 end
  count('pins', -1)
  push_leaf(b)
  return 1
end, true)

-- Of the whole pool: KEYS[1] is the first part of its own keys.

local function micros()
  local time = redis.call('TIME')
  return time[1] * 1e6 + time[2]
end

local function of_pool(name, callback)
  redis.register_function({
    function_name = name .. SUFFIX,
    flags = { 'allow-oom' },
    callback = function(keys, args) return callback(keys[1], args) end,
  })
end

-- A value changes only if it still is the one that the caller saw.
of_pool('kvpool_replace', function(pool, a)
  if (redis.call('GET', pool .. a[1]) or '') ~= a[2] then return 0 end
  redis.call('SET', pool .. a[1], a[3])
  return 1
end)

-- The same of a field, which an empty value removes; whoever looks at the version learns of it.
of_pool('kvpool_swap', function(pool, a)
  if (redis.call('HGET', pool .. a[1], a[2]) or '') ~= a[3] then return 0 end
  if a[4] == '' then redis.call('HDEL', pool .. a[1], a[2]) else redis.call('HSET', pool .. a[1], a[2], a[4]) end
  redis.call('INCR', pool .. 'version')
  return 1
end)

of_pool('kvpool_now', function() return micros() end)

of_pool('kvpool_seen', function(pool, a) return redis.call('HSET', pool .. a[1], a[2], micros()) end)

-- Who has not been seen for so long.
of_pool('kvpool_silent', function(pool, a)
  local seen, silent, limit = redis.call('HGETALL', pool .. a[1]), {}, micros() - a[2]
  for i = 1, #seen, 2 do
    if tonumber(seen[i + 1]) < limit then silent[#silent + 1] = seen[i] end
  end
  return silent
end)
