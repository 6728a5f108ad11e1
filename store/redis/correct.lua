
local values, at = redis.call('MGET', unpack(KEYS)), 1
for n = 1, #KEYS do
	local window, wanted, hits
	window, wanted, hits, at = struct.unpack('>ddd', ARGV[1], at)
	local used, number, finish = read(values[n], window)
	local corrected = math.min(math.max(used + hits, 0), 4294967295)
	if number == wanted and corrected ~= used then write(KEYS[n], window, corrected, number, finish) end
end
return #KEYS
