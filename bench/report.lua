-- wrk's script of the benchmark `gateway`: prints one JSON object at the end.
--
-- The first argument is "same" (each request is equal), "new" (each request has a new path and header value) or "close"
-- (each request opens a new connection). With "new", the second argument is what the paths begin with.

local number = 0

function init(arguments)
   local kind = arguments[1] or "same"
   if kind == "close" then
      wrk.headers["Connection"] = "close"
   elseif kind == "new" then
      local beginning = arguments[2] or "/page"
      request = function()
         number = number + 1
         return wrk.format("GET", beginning .. "/" .. number, { ["X-Number"] = tostring(number) })
      end
   end
end

function done(summary, latency, requests)
   local failures = summary.errors
   io.write(string.format(
      '\n{"requests": %d, "seconds": %.6f, "p50_ms": %.4f, "p99_ms": %.4f, "failures": %d}\n',
      summary.requests,
      summary.duration / 1000000,
      latency:percentile(50) / 1000,
      latency:percentile(99) / 1000,
      failures.connect + failures.read + failures.write + failures.status + failures.timeout
   ))
end
