
-- From here on all reads come before all writes, and the tiers are looked at one by one.

local values = call('MGET', unpack(KEYS))
local used, number, ends, news, left = {}, {}, {}, {}, {}
local letters, tiers, windows, claimed = {}, {}, {}, {}
local exceeded, refused, refusedBy = {}, nil, nil
local tier, claim, at = -1, -1, 2
for n = 2, last do
	local letter, place, count, window, hits
	letter, place, count, window, hits, at = take('>BBddd', spec, at)
	if place > 0 then claim = claim + 1 end
	if place == 2 then
		if exceeded[tier] == 'live' then refused = refused or tier end
		tier = tier + 1
	end
	local refuses = letter < 97
	if refuses then letter = letter + 32 end
	used[n], number[n], ends[n], news[n] = read(values[n], window)
	left[n] = ends[n] and ends[n] - now or window - now % window
	if not refused then
		local full = used[n] + math.max(hits, 1) > count
		if full or refuses then
			local dry = letter == 100 or letter == 101
			exceeded[tier] = dry and 'dry' or 'live'
			if not dry then refusedBy = refusedBy or claim end
		end
		if full then used[n] = -1 - used[n] end
	end
	tiers[n], letters[n], windows[n], claimed[n] = tier, letter, window, hits
end
if exceeded[tier] == 'live' then refused = refused or tier end

local reply = {now}
for n = 2, last do
	local key = KEYS[n]
	local checked = letters[n] == 99 or letters[n] == 101
	local charged = claimed[n] > 0 and not exceeded[tiers[n]] and (not refused or checked and tiers[n] < refused)
	if taking then
		if charged then used[n] = used[n] + claimed[n] end
		if charged or news[n] then
			write(key, windows[n], used[n] < 0 and -1 - used[n] or used[n], number[n], ends[n])
		elseif values[n] and call('PTTL', key) < 0 then
			call('PEXPIRE', key, left[n] + 1000 .. '')
		end
	end
	reply[n], reply[last + 1 + n], reply[2 * last + n] = used[n], left[n], number[n]
end
local generation = tonumber(values[1])
if not (generation and generation >= 0 and generation < 2 ^ 53) then generation = 0 end -- what no reset has written
reply[last + 1], reply[last + 2] = refusedBy or -1, generation
return struct.pack('>' .. string.rep('d', 3 * last), unpack(reply, 1, 3 * last))
