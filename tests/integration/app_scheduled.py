"""A worker with schedules of the test's own, that writes down each tick that it performs.

python -m tests.integration.app_scheduled run      a node
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lowq
from lowq.node.node import Node
from lowq.queue import Queue
from lowq.sharding import shard_of

#: name -> seconds between its ticks, of this node's code: JSON.
SCHEDULES = json.loads(os.environ["SCHEDULES"])
#: The file that ticks are written to, a line each.
TICKS = Path(os.environ["SCHEDULES_TICKS"])
#: "1": it is killed between the push of its third tick and the release.
DIES = os.environ.get("SCHEDULES_DIES") == "1"
#: "1": a build in which the record is written behind the push, and not together with it.
BROKEN = os.environ.get("SCHEDULES_BROKEN") == "1"

app = lowq.Lowq()


# append: a tick that is pushed twice is performed twice, also when the first is still waiting.
@app.worker(shards_count=2, merge="append")
def report(job_id: str, payloads: list[Any]) -> None:
    if DIES and pushed >= 3:
        time.sleep(3600)  # it would be killed before the acknowledgement
    with TICKS.open("a") as file:
        file.writelines(f"{os.getpid()} {job_id} {payload['planned_at']}\n" for payload in payloads)


for name, seconds in SCHEDULES.items():
    lowq.every(seconds, name=name, missed="all")(report)

pushed = 0
push_ticks = Queue.push_ticks


def push_ticks_here(self: Queue, schedule: str, ticks: Any, record: bytes, new_record: bytes) -> bool:
    global pushed  # noqa: PLW0603 - it is this process's
    pushed += 1
    if BROKEN:
        self.push({"id": schedule, "payload": {"planned_at": tick}, "score": tick} for tick in ticks)
        accepted = True
    else:
        accepted = push_ticks(self, schedule, ticks, record, new_record)
    if DIES and pushed == 3:
        Path(f"{TICKS}.last").write_text(json.dumps(list(ticks)))
        os.kill(os.getpid(), signal.SIGKILL)
    if BROKEN:
        prefix = self._prefixes[shard_of(schedule.encode(), self.shards_count)]
        accepted = bool(app.client.run("set_schedule", prefix, "", schedule, record, new_record))
    return accepted


Queue.push_ticks = push_ticks_here  # type: ignore[method-assign]  # what happens there is the test's


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(threadName)s %(message)s")
    sys.exit(Node(app, threads=1).run())
