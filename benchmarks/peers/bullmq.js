// BullMQ: one process, concurrency 5. `addBulk` takes a thousand jobs. The verbs are those of adapter.py.
//
//     node bullmq.js VERB --url URL [--count N] [--size BYTES]

const fs = require("fs");
const { Queue, Worker } = require("bullmq");

const [verb, ...rest] = process.argv.slice(2);
const options = {};
for (let i = 0; i < rest.length; i += 2) options[rest[i]] = rest[i + 1];
const count = Number(options["--count"] ?? 0);
const size = Number(options["--size"] ?? 20);

const say = (event, details = {}) => fs.writeSync(1, JSON.stringify({ event, ...details }) + "\n");
const now = () => Number(process.hrtime.bigint()) / 1e9;
const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

if (verb === "versions") {
  const version = (name) => JSON.parse(fs.readFileSync(`${process.env.NODE_PATH}/${name}/package.json`)).version;
  say("versions", { text: `bullmq ${version("bullmq")}, ioredis ${version("ioredis")}, node ${process.version}` });
  process.exit();
}

const address = new URL(options["--url"]);
const connection = { host: address.hostname, port: Number(address.port), maxRetriesPerRequest: null };
// Finished jobs are removed: the others keep none either.
const defaultJobOptions = { removeOnComplete: true, removeOnFail: true };

function payloads(number, start) {
  const pad = "x".repeat(size - '{"v":100000,"p":""}'.length);
  return Array.from({ length: number }, (_, index) => ({ v: start + index, p: pad }));
}

let performed = 0;
let first = 0;
async function perform() {
  performed += 1;
  if (performed === 1) {
    first = now();
    say("first", { at: first });
  }
  if (performed === count) {
    const last = now();
    say("last", { at: last, seconds: last - first });
  }
}

const delays = [];
async function ping(job) {
  const at = now();
  if (job.data.sent === 0) return say("first", { at });
  delays.push(at - job.data.sent);
  if (delays.length === count) say("delays", { delays });
}

const workWith = (handler) => new Worker("bench", handler, { connection, concurrency: 5 });

async function main() {
  if (verb === "work") return workWith(perform);
  if (verb === "receive") return workWith(ping);
  const queue = new Queue("bench", { connection, defaultJobOptions });
  if (verb === "send") {
    let told = false;
    process.stdin.once("data", () => (told = true));
    for (let number = 0; !told; number += 1) {
      await queue.add("bench", { v: number, sent: 0 });
      await pause(0.1);
    }
    await pause(0.3);
    for (let number = 0; number < count; number += 1) {
      await pause(0.01 + Math.random() * 0.015);
      await queue.add("bench", { v: number, sent: now() });
    }
    say("done");
    process.exit();
  }
  await queue.add("bench", payloads(1, 100_000)[0]);
  const jobs = payloads(count, 200_000);
  const start = now();
  if (verb === "bulk") {
    for (let from = 0; from < jobs.length; from += 1000) {
      await queue.addBulk(jobs.slice(from, from + 1000).map((data) => ({ name: "bench", data })));
    }
  } else {
    for (const data of jobs) await queue.add("bench", data);
  }
  say("done", { seconds: now() - start });
  process.exit();
}

main();
