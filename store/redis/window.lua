
-- The number of a counter that has no hits in the current window.
local function start(window)
	return (now - now % window) / window % 900000 * 1e10
end

-- What a counter says: the hits used, and the number of the window that they are of; and if the clock was set back, the
-- end of the window, and whether it is news.
local function read(value, window)
	local current = (now - now % window) / window
	if not value then return 0, current end
	local number, finish, hits, of = tonumber(value), nil, nil, nil
	if number then
		if not (number >= 0 and number < 9e15) then return 0, current end
		hits = number - start(window)
		if hits >= 0 and hits < 1e10 then return math.floor(hits), current end
		if not (hits / 1e10 % 900000 < 450000) then return 0, current end
		finish, hits, of = now + 2 * window, math.floor(number % 1e10), current + math.floor(hits / 1e10 % 900000)
	else
		finish, hits, of = string.match(value, '^(%d+):(%d+):(%d+)$')
		finish, hits, of = tonumber(finish), tonumber(hits), tonumber(of)
	end
	if not (finish and finish > now and hits < 1e10 and of < 2 ^ 53) then return 0, current end
	return hits, of, math.min(finish, now + window), finish > now + window
end

-- Stores a counter, and how long it is kept.
local function write(key, window, used, number, finish)
	local value = finish and string.format('%.0f:%.0f:%.0f', finish, used, number) or string.format('%.0f', start(window) + used)
	redis.call('SET', key, value, 'PX', string.format('%.0f', (finish or now + window - now % window) - now + 1000))
end
