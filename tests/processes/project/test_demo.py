"""What `make demo` runs: the addresses that it prints answer, and Ctrl-C ends it while somebody looks."""

import os
import re
import signal
import subprocess
import sys

import lowq
from tests.processes.support import NEVER, PATIENCE, ROOT
from tests.rules.web.served import Stream, get
from tests.waiting import until

#: As a job in the background of a script: with INT ignored.
IGNORING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"


def test_the_addresses_answer_and_ctrl_c_ends_it() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOWQ_")}
    program = [sys.executable, "-u", str(ROOT / "examples" / "demo.py"), "--web", "--seconds", str(NEVER)]
    command = [sys.executable, "-c", IGNORING, *program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=kept) as demo:
        try:
            assert demo.stdout
            told = demo.stdout.readline() + demo.stdout.readline()
            found = re.search(r"LOWQ_REDIS_URL=(\S+) \S*lowq stats\nthe dashboard is at (\S+)\n", told)
            assert found, told
            store, dashboard = found.groups()
            app = lowq.Lowq(redis_url=store)
            assert [info.name for info in app.queues()] == ["OrderSync"]
            app.close()
            # On a machine that is busy its store may not answer at once: then the page says 503.
            until(lambda: get(dashboard, "/queues/OrderSync")[0] == 200, "the page of the queue")

            def opened() -> Stream | None:
                stream = Stream(dashboard)
                if stream.event()[0] == "figures":
                    return stream
                stream.__exit__()  # nor may it for a figure
                return None

            stream = until(opened, "a stream of figures")
            assert stream is not None
            with stream:
                demo.send_signal(signal.SIGINT)
                said, _ = demo.communicate(timeout=PATIENCE)
            assert demo.returncode == 0, said
            assert "each of the 50 orders was saved in its newest version" in said
        finally:
            demo.kill()
