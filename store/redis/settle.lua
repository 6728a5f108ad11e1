-- Corrects counters.
--
-- KEYS[n]  the counter of a limit
-- ARGV[1]  for each limit three doubles, packed: its window in milliseconds, the number of the window that is to be
--          corrected, and the hits to add, or to take back if they are negative

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
