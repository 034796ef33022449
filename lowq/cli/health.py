"""The health of a node over HTTP, for probes and for Prometheus: ``lowq run --health``, and ``lowq ready``.

| path | answers 200 | otherwise 503, with the reason |
|---|---|---|
| ``/livez`` | while the process is worth keeping | its maintenance loop hangs: it is to be restarted |
| ``/readyz`` | while it takes jobs | it starts, waits for Redis, is quiet, stops, or its threads are stuck |
| ``/metrics`` | always | |

A Redis outage fails readiness, never liveness: a restart would not end it, and finished jobs would be performed again.
"""

import http.client
import http.server
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from lowq.cli.output import Failure, WrongUsage, say
from lowq.cli.web import address, announce
from lowq.logs import get_log
from lowq.observe.health import Vitals

log = get_log("lowq.cli")

#: Seconds that a client may take for its request and the answer together.
REQUEST_SECONDS = 5.0
#: Connections at a time; further ones are closed at once.
CONNECTIONS = 64
#: The text format of Prometheus.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Figure of a `Reading` -> metric, its type and its help.
_METRICS = {
    "processed": ("processed_total", "counter", "Jobs performed by this process"),
    "failed": ("failed_total", "counter", "Failures that were charged by this process"),
    "buried": ("buried_total", "counter", "Jobs that this process has buried"),
    "cancelled": ("cancelled_total", "counter", "Jobs of this process that were cancelled while they ran"),
    "performs": ("performs_total", "counter", "Batches that handlers have ended"),
    "perform_seconds": ("perform_seconds_total", "counter", "Seconds that handlers ran"),
    "shards": ("shards", "gauge", "Shards that the process holds"),
    "lag": ("lag_seconds", "gauge", "Seconds since the oldest due job of these shards became due"),
    "threads": ("threads", "gauge", "Threads that perform jobs"),
    "threads_busy": ("threads_busy", "gauge", "Threads that perform a batch"),
    "tasks_busy": ("tasks_busy", "gauge", "Shards that the event loop works"),
}
#: Seconds that `lowq ready` waits for an answer.
READY_SECONDS = 5.0


def health_option(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The address of a node's health, as it was typed, for `address`."""

    def check(_context: click.Context, _param: click.Parameter, value: str | None) -> str | None:
        if value is not None:
            address(value)
        return value

    return click.option(
        "--health", metavar="HOST:PORT", envvar="LOWQ_HEALTH", show_envvar=True, callback=check, help=text
    )


@contextmanager
def serving_health(bind: tuple[str, int], vitals: Callable[[], Vitals]) -> Iterator[None]:
    """Serves /livez, /readyz and /metrics for the time of the block.

    Raises:
        WrongUsage: the address can't be had.
    """
    try:
        server = HealthServer(*bind, vitals)
    except (OSError, TypeError) as error:  # TypeError: no name of a host
        shown, reason = "{}:{}".format(*bind), getattr(error, "strerror", None) or error
        raise WrongUsage(f"--health {shown}: {reason}; choose another address, or port 0") from None
    server.start()
    announce(f"the health server listens at {server.url} (/livez, /readyz, /metrics)", "health", url=server.url)
    try:
        yield
    finally:
        server.close()


@click.command
@health_option("The address of the node's health, as in lowq run --health.")
@click.option("--live", is_flag=True, help="Ask whether it is worth keeping (/livez) instead.")
def ready(health: str | None, live: bool) -> None:
    """Ask the node on this machine whether it takes jobs.

    For probes that run a command; others ask /readyz themselves. Exit code 0: it does; 1: it does not, or does not
    answer.
    """
    if health is None:
        raise WrongUsage("which node? --health HOST:PORT or LOWQ_HEALTH, the same as for its lowq run")
    host, port = address(health)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(host, port, timeout=READY_SECONDS)
    try:
        connection.request("GET", "/livez" if live else "/readyz")
        response = connection.getresponse()
        text = response.read(10_000).decode("utf-8", "replace").strip()
    except (OSError, UnicodeError, http.client.HTTPException) as error:  # UnicodeError: no name of a host
        raise Failure(f"no node answers at {health}: {error}; is it started with --health {health}?") from None
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise Failure(text)
    say(text)


# --- the server ---


class HealthServer:
    """Serves the health of a process in threads of its own. ``vitals`` is called in these; it must not wait.

    Raises:
        OSError: the address can't be bound.
    """

    def __init__(self, host: str, port: int, vitals: Callable[[], Vitals]) -> None:
        self._vitals = vitals
        self._server = _Server((host, port), self._answer)
        self._thread = threading.Thread(target=self._server.serve_forever, name="lowq-health", daemon=True)

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def start(self) -> None:
        """Answers from now on."""
        self._thread.start()

    def close(self) -> None:
        """Frees the address."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str) -> tuple[int, str, str]:
        """Status, content type and text."""
        if path not in ("/livez", "/readyz", "/metrics"):
            return 404, "text/plain", "there are /livez, /readyz and /metrics\n"
        vitals = self._vitals()
        if path == "/metrics":
            return 200, METRICS_TYPE, "".join(f"{line}\n" for line in metric_lines(vitals))
        trouble = vitals.dead if path == "/livez" else vitals.dead or vitals.unready
        return (200, "text/plain", "ok\n") if trouble is None else (503, "text/plain", f"{trouble}\n")


def metric_lines(vitals: Vitals) -> Iterator[str]:
    """The figures in the text format of Prometheus."""
    yield "# HELP lowq_node_ready 1: the process takes jobs"
    yield "# TYPE lowq_node_ready gauge"
    yield f"lowq_node_ready {int(vitals.dead is None and vitals.unready is None)}"
    samples: dict[str, list[str]] = {name: [] for name in _METRICS}
    for process, queues in vitals.readings.items():
        for queue, reading in queues.items():
            labels = _labels(process=process, queue=queue)
            for name, value in (*reading.counters.items(), *reading.gauges.items()):
                samples[name].append(f"lowq_node_{_METRICS[name][0]}{labels} {float(value)!r}")
    for name, lines in samples.items():
        if lines:
            metric, kind, text = _METRICS[name]
            yield f"# HELP lowq_node_{metric} {text}"
            yield f"# TYPE lowq_node_{metric} {kind}"
            yield from lines


def _labels(**labels: str) -> str:
    escape = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    shown = ",".join(f'{name}="{value.translate(escape)}"' for name, value in labels.items() if value)
    return f"{{{shown}}}" if shown else ""


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    allow_reuse_address = True  # new code of the same process binds it again at once

    def __init__(self, address: tuple[str, int], answer: Callable[[str], tuple[int, str, str]]) -> None:
        self.answer = answer
        self.free = threading.BoundedSemaphore(CONNECTIONS)
        #: Connection -> the monotonic time at which it is cut off.
        self.ends: dict[Any, float] = {}
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks for the name of the host, which may take seconds

    def verify_request(self, *_request: Any) -> bool:
        return self.free.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.ends[request] = time.monotonic() + REQUEST_SECONDS
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        if self.ends.pop(request, None) is not None:
            self.free.release()

    def service_actions(self) -> None:
        """Cuts off clients that send, or read, bit by bit, every half a second."""
        for request, end in list(self.ends.items()):
            if end < time.monotonic():
                with suppress(OSError):  # it has just ended
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_request: Any) -> None:
        """A client that has hung up harms nobody. Whatever else it is, the client learns nothing of it."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("the health server could not answer: %r", error, exc_info=error)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS
    server_version, sys_version = "lowq", ""

    def do_GET(self) -> None:
        status, content_type, text = self.server.answer(self.path.partition("?")[0])
        data = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

    def log_message(self, *_args: object) -> None:
        """Probes come every few seconds."""
