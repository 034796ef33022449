-- The scripts run inside Redis: Lua 5.1 with its sandbox, checked as assembled by tests/luacheck.py.
std = "lua51"
read_globals = { "redis", "cjson", "KEYS", "ARGV" }
-- The sandbox has none of these, or no use for them.
not_globals = { "collectgarbage", "dofile", "io", "loadfile", "module", "os", "package", "print", "require" }
max_line_length = 120
