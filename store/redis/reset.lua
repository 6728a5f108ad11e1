-- Forgets counters and moves the stack's reset generation on, so that every instance drops what it remembers.
--
-- KEYS[1]   the stack's reset generation
-- KEYS[n+1] the counters
-- ARGV[1]   how long the generation is kept, in milliseconds

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local before = tonumber(redis.call('MGET', KEYS[1])[1]) or 0
if not (before >= 0 and before < 2 ^ 53) then before = 0 end -- what no reset has written
local generation = math.max(before + 1, now)
for n = 2, #KEYS do redis.call('DEL', KEYS[n]) end
redis.call('SET', KEYS[1], generation, 'PX', ARGV[1])
return generation
