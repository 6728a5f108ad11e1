-- Decides one request. All reads come before all writes, so an error leaves every counter as it was.
--
-- KEYS[1]   the stack's reset generation
-- KEYS[n+1] the counter of the nth limit, tier by tier in the order written
-- ARGV[1]   T to take or P to peek, then a letter for each limit: s served, c checked, d dry and served, e dry and
--           checked; an upper-case one begins a tier
-- ARGV[2n], ARGV[2n+1]  the nth limit's count, and its window in milliseconds
--
-- A counter is the string "end:used", with the end of its window in milliseconds since the Unix epoch.
--
-- Returns the generation, the time in milliseconds, the tier that refused (from 0, or -1), and for each limit the
-- hits used and the milliseconds left. A limit that did not admit the hit has its hits negated.

local call, match = redis.call, string.match
local letters = {string.byte(ARGV[1], 1, -1)}
local values = call('MGET', unpack(KEYS))
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local limits = #KEYS - 1
local used, ends, moved, first, exceeded = {}, {}, {}, {}, {}
local reply = {tonumber(values[1]) or 0, now, -1}
local tier, full, refused, dry = -1, false, nil, false

for n = 1, limits do
	local letter = letters[n + 1]
	if letter < 97 then
		if full and not dry then refused = refused or tier end
		tier, full, letter = tier + 1, false, letter + 32
		dry = letter == 100 or letter == 101
	end
	first[n] = tier
	local window, limit = tonumber(ARGV[2 * n + 1]), tonumber(ARGV[2 * n])
	local value, finish, count = values[n + 1], nil, nil
	if value then finish, count = match(value, '^(%d+):(%d+)$') end
	finish = tonumber(finish)
	if finish and finish > now then
		-- An end beyond one window means that the clock has been set back: the window goes on for one more length.
		if finish > now + window then finish, moved[n] = now + window, true end
		count = tonumber(count)
	else
		finish, count = now - now % window + window, 0
	end
	used[n], ends[n] = count, finish
	reply[2 * n + 2] = count
	if count >= limit and not refused then
		full, exceeded[tier] = true, true
		reply[2 * n + 2] = -count
	end
	reply[2 * n + 3] = finish - now
end
if full and not dry then refused = refused or tier end
if refused then reply[3] = refused end
if string.byte(ARGV[1]) == 80 then return reply end

for n = 1, limits do
	local letter, at, key = letters[n + 1], first[n], KEYS[n + 1]
	if letter < 97 then letter = letter + 32 end
	local checked = letter == 99 or letter == 101
	-- Keys outlive their window by a second, so that none is forgotten before its end.
	local life = ends[n] - now + 1000
	if not exceeded[at] and (not refused or (checked and at < refused)) then
		reply[2 * n + 2] = used[n] + 1
		call('SET', key, ends[n] .. ':' .. (used[n] + 1), 'PX', life)
	elseif moved[n] then
		call('SET', key, ends[n] .. ':' .. used[n], 'PX', life)
	elseif values[n + 1] and call('PTTL', key) < 0 then
		call('PEXPIRE', key, life)
	end
end
return reply
