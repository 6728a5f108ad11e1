-- Decides one request.
--
-- KEYS[1]  the stack's reset generation
-- KEYS[n]  the counter of a limit, claim by claim in the order claimed
-- ARGV[1]  T to take, R to take although a tier refuses whatever its counters say, or P to peek; then for each limit two
--          bytes and three doubles, packed: a letter, a place, its count, its window in milliseconds, and the hits claimed.
--          The letter is s for served, c for checked, d for dry and served, e for dry and checked; an upper-case one says
--          that the tier refuses. The place is 2 if a tier begins, 1 if a further claim of it does, else 0.
--
-- A counter is a number. The last ten digits are the hits used, the others are the number of the window since the Unix
-- epoch, modulo 900000, so that numbers stay exact and one INCRBY charges. When the server's clock has been set back, the
-- window goes on for one more length from then; the counter is the string "end:used:number" until that end, in
-- milliseconds. Keys outlive their window by a second, so that none is forgotten before its end.
--
-- Returns packed doubles: the time in milliseconds, then the hits used of each limit. Unless every limit admits the
-- hits, in the window that the time says, and there was no reset, this is followed by the claim that was refused (from 0,
-- or -1), the generation, the milliseconds left of each limit, and the number of its window; and a limit that did not
-- admit the hits has its own turned to -1 - hits.

local call, try, take = redis.call, redis.pcall, struct.unpack
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local spec, last = ARGV[1], #KEYS
local taking = string.byte(spec) ~= 80

-- Most requests are allowed, by counters that are there: charging those tells all that there is to know. The first
-- limit for which that is not so ends this, and what was charged is taken back.
if string.byte(spec) == 84 and call('EXISTS', KEYS[1]) == 0 then
	local used, charged, at = {now}, 1, 2
	for n = 2, last do
		local _, count, window, hits, after, before
		_, _, count, window, hits, at = take('>BBddd', spec, at)
		after = try('INCRBY', KEYS[n], hits)
		if type(after) ~= 'number' then break end
		charged = n
		after = after - (now - now % window) / window % 900000 * 1e10
		before = after - hits
		if before < 1 or before + math.max(hits, 1) > count then break end
		used[n] = after
		if call('PTTL', KEYS[n]) < 0 then call('PEXPIRE', KEYS[n], window - now % window + 1000 .. '') end
	end
	if used[last] then return struct.pack('>' .. string.rep('d', last), unpack(used)) end
	for n = 2, charged do
		if call('DECRBY', KEYS[n], (take('>d', spec, 26 * n - 32))) == 0 then call('DEL', KEYS[n]) end
	end
end
