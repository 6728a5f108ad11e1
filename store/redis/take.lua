-- Decides one request.
--
-- KEYS[1]  the stack's reset generation
-- KEYS[n]  the counter of a limit, tier by tier in the order claimed
-- ARGV[1]  T to take or P to peek; then for each limit a letter, its count, and its window in milliseconds, packed as a
--          byte and two doubles. The letter is s for served, c for checked, d for dry and served, e for dry and
--          checked; an upper-case one begins a tier.
--
-- A counter is a number. The last ten digits are the hits used, the others are the number of the window since the Unix
-- epoch, modulo 900000, so that numbers stay exact and one INCR charges. When the server's clock has been set back, the
-- window goes on for one more length from then; the counter is the string "end:used" until that end, in milliseconds.
-- Keys outlive their window by a second, so that none is forgotten before its end.
--
-- Returns packed doubles: the time in milliseconds, then the hits used of each limit. Unless every limit admits the
-- hit, in the window that the time says, and there was no reset, this is followed by the tier that refused (from 0, or
-- -1), the generation, and the milliseconds left of each limit; and a limit that did not admit the hit has its hits
-- negated.

local call, try, take = redis.call, redis.pcall, struct.unpack
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local spec, last = ARGV[1], #KEYS
local taking = string.byte(spec) == 84

-- Most requests are allowed, by counters that are there: charging those tells all that there is to know. The first
-- limit for which that is not so ends this, and what was charged is taken back.
if taking and call('EXISTS', KEYS[1]) == 0 then
	local used, charged, at = {now}, 1, 2
	for n = 2, last do
		local hits, _, count, window = try('INCR', KEYS[n]), nil, nil, nil
		if type(hits) ~= 'number' then break end
		charged, _, count, window, at = n, take('>Bdd', spec, at)
		hits = hits - (now - now % window) / window % 900000 * 1e10
		if hits < 2 or hits > count then break end
		used[n] = hits
		if call('PTTL', KEYS[n]) < 0 then call('PEXPIRE', KEYS[n], window - now % window + 1000 .. '') end
	end
	if used[last] then return struct.pack('>' .. string.rep('d', last), unpack(used)) end
	for n = 2, charged do
		if call('DECR', KEYS[n]) == 0 then call('DEL', KEYS[n]) end
	end
end

-- From here on all reads come before all writes, and the tiers are looked at one by one.

-- The number of a counter that has no hits in the current window.
local function start(window)
	return (now - now % window) / window % 900000 * 1e10
end

-- What a counter says: the hits used; and if the clock was set back, the end of the window, and whether it is news.
local function read(value, window)
	local number, finish, hits = tonumber(value), nil, nil
	if number then
		hits = number - start(window)
		if hits >= 0 and hits < 1e10 then return math.floor(hits) end
		if not (hits / 1e10 % 900000 < 450000) then return 0 end
		finish, hits = now + 2 * window, math.floor(number % 1e10)
	else
		finish, hits = string.match(value, '^(%d+):(%d+)$')
		finish, hits = tonumber(finish), tonumber(hits)
	end
	if not finish or finish <= now then return 0 end
	return hits, math.min(finish, now + window), finish > now + window
end

local values = call('MGET', unpack(KEYS))
local used, left, ends, news, letters, windows, tiers = {}, {}, {}, {}, {}, {}, {}
local exceeded, refused, tier, at = {}, nil, -1, 2
for n = 2, last do
	local count, letter, window
	letter, count, window, at = take('>Bdd', spec, at)
	if letter < 97 then
		letter = letter + 32
		if exceeded[tier] == 'live' then refused = refused or tier end
		tier = tier + 1
	end
	used[n] = 0
	if values[n] then used[n], ends[n], news[n] = read(values[n], window) end
	left[n] = ends[n] and ends[n] - now or window - now % window
	if not refused and used[n] >= count then
		exceeded[tier] = (letter == 100 or letter == 101) and 'dry' or 'live'
		used[n] = -used[n]
	end
	tiers[n], letters[n], windows[n] = tier, letter, window
end
if exceeded[tier] == 'live' then refused = refused or tier end

local reply = {now}
for n = 2, last do
	local key, life = KEYS[n], left[n] + 1000 .. ''
	local checked = letters[n] == 99 or letters[n] == 101
	local charged = not exceeded[tiers[n]] and (not refused or checked and tiers[n] < refused)
	if taking then
		if charged then used[n] = used[n] + 1 end
		if ends[n] and (charged or news[n]) then
			call('SET', key, ends[n] .. ':' .. math.abs(used[n]), 'PX', life)
		elseif charged then
			call('SET', key, string.format('%.0f', start(windows[n]) + used[n]), 'PX', life)
		elseif values[n] and call('PTTL', key) < 0 then
			call('PEXPIRE', key, life)
		end
	end
	reply[n], reply[last + 1 + n] = used[n], left[n]
end
local generation = tonumber(values[1])
if not (generation and generation >= 0 and generation < 2 ^ 53) then generation = 0 end -- what no reset has written
reply[last + 1], reply[last + 2] = refused or -1, generation
return struct.pack('>' .. string.rep('d', 2 * last + 1), unpack(reply, 1, 2 * last + 1))
