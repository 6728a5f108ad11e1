-- Sends the requests of many clients, one after the other: wrk ... -- <clients> <the first one>
local requests, at = {}, 0

function init(args)
  local clients = tonumber(args[1])
  at = tonumber(args[2])
  for i = 0, clients - 1 do
    local n = i * 7919 % clients -- neighbours are not to come one after the other
    wrk.headers["X-Forwarded-For"] = string.format("11.%d.%d.%d", math.floor(n / 65536), math.floor(n / 256) % 256, n % 256)
    wrk.headers["X-User"] = "user-" .. n
    requests[i] = wrk.format("GET", "/")
  end
  count = clients
end

function request()
  local r = requests[at]
  at = at + 1
  if at == count then at = 0 end
  return r
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format('result: {"Requests":%d,"Seconds":%f,"Statuses":%d,"Broken":%d}\n', summary.requests,
    summary.duration / 1e6, e.status, e.connect + e.read + e.write + e.timeout))
end
