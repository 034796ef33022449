# Sidekiq: threads. `push_bulk` takes a thousand jobs. The verbs are those of adapter.py.
#
#     ruby sidekiq.rb VERB --url URL [--count N] [--size BYTES]

return if defined?(COUNT) # Sidekiq loads it once more, as the file with the workers

require "json"
require "redis"
require "hiredis"
require "redis/connection/hiredis"
require "sidekiq"
require "sidekiq/version"

$stdout.sync = true
verb = ARGV.shift
options = Hash[*ARGV]
count = options.fetch("--count", "0").to_i
size = options.fetch("--size", "20").to_i

def say(event, **details)
  $stdout.syswrite(JSON.generate({event: event, **details}) + "\n")
end

def now
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

if verb == "versions"
  say("versions", text: "sidekiq #{Sidekiq::VERSION}, redis-rb #{Redis::VERSION}, hiredis-rb " \
    "#{Gem.loaded_specs["hiredis"]&.version || Hiredis::VERSION}, ruby #{RUBY_VERSION}")
  exit
end

require "sidekiq/cli" if %w[work receive].include?(verb) # before: it makes this process a server
# redis-rb 4.8 has a word about each of Sidekiq's calls, which halves its rate.
Redis.silence_deprecations = true if Redis.respond_to?(:silence_deprecations=)
redis = {url: options.fetch("--url"), driver: :hiredis}
Sidekiq.configure_server { |config| config.redis = redis }
Sidekiq.configure_client { |config| config.redis = redis }
Sidekiq.logger.level = Logger::ERROR

# How many jobs were performed, for the threads of the worker.
class Count
  def initialize(expected)
    @expected = expected
    @number = 0
    @delays = []
    @lock = Mutex.new
  end

  def job
    number = @lock.synchronize { @number += 1 }
    if number == 1
      @first = now
      say("first", at: @first)
    end
    if number == @expected
      last = now
      say("last", at: last, seconds: last - @first)
    end
  end

  def ping(sent)
    at = now
    return say("first", at: at) if sent == 0

    @lock.synchronize do
      @delays << at - sent
      say("delays", delays: @delays) if @delays.size == @expected
    end
  end
end

COUNT = Count.new(count)

class Blank
  include Sidekiq::Worker

  def perform(_payload)
    COUNT.job
  end
end

class Ping
  include Sidekiq::Worker

  def perform(payload)
    COUNT.ping(payload["sent"])
  end
end

def payloads(count, size, start)
  pad = "x" * (size - '{"v":100000,"p":""}'.size)
  (start...start + count).map { |number| {"v" => number, "p" => pad} }
end

case verb
when "bulk"
  Blank.perform_async(payloads(1, size, 100_000)[0])
  jobs = payloads(count, size, 200_000)
  start = now
  jobs.each_slice(1000) { |part| Sidekiq::Client.push_bulk("class" => Blank, "args" => part.map { |job| [job] }) }
  say("done", seconds: now - start)
when "single"
  Blank.perform_async(payloads(1, size, 100_000)[0])
  jobs = payloads(count, size, 200_000)
  start = now
  jobs.each { |job| Blank.perform_async(job) }
  say("done", seconds: now - start)
when "send"
  number = 0
  until $stdin.wait_readable(0.1)
    Ping.perform_async({"v" => number += 1, "sent" => 0})
  end
  sleep 0.3
  count.times do |index|
    sleep rand(0.010..0.025)
    Ping.perform_async({"v" => index, "sent" => now})
  end
  say("done")
when "work", "receive"
  cli = Sidekiq::CLI.instance
  cli.parse(["-c", "5", "-r", __FILE__])
  Sidekiq.logger.level = Logger::ERROR
  cli.run
end
