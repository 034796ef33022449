"""A polite crawler: many workers, one page per site at a time, without coordination of its own.

A job's id is the site, its payload a page to fetch. An id is out once at a time, so no site ever gets two requests at
once, however many workers there are; pages that are found twice while they wait become one. The sites are served by
this program itself, on 127.0.0.1, and count how many requests they had at once.

    python examples/crawler.py                                          without Redis
    LOWQ_REDIS_URL=redis://127.0.0.1:6379/0 python examples/crawler.py  with Redis
"""

import os
import re
import sys
import threading
import time
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import lowq
from lowq.consumer import Consumer

#: Sites, pages of each, and workers.
SITES, PAGES, WORKERS = 6, 25, 8


class Sites:
    """A few web sites whose pages link to each other, also across sites. A page is /SITE/PAGE."""

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        #: The most requests that a site ever had at once.
        self.most: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._lock = threading.Lock()

    def page(self, site: str, page: int) -> str:
        with self._lock:
            self._now[site] += 1
            self.most[site] = max(self.most[site], self._now[site])
            self.served[f"/{site}/{page}"] += 1
        time.sleep(0.002)  # so that requests could well meet
        with self._lock:
            self._now[site] -= 1
        number = int(site.removeprefix("site-"))
        links = [f"/{site}/{(page * 2 + more) % PAGES}" for more in (1, 2)]
        links.append(f"/site-{(number + 1) % SITES}/{page}")
        return "\n".join(f'<a href="{link}">{link}</a>' for link in links)


def serve(sites: Sites) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, site, page = self.path.split("/")
            body = sites.page(site, int(page)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class Crawler:
    """Fetches pages, and pushes those that they link to, as long as they are new."""

    def __init__(self, queue: lowq.Queue, address: str) -> None:
        self._queue = queue
        self._address = address
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def find(self, *links: str) -> None:
        with self._lock:
            new = [link for link in links if link not in self._seen]
            self._seen.update(new)
        self._queue.push({"id": link.split("/")[1], "payload": link} for link in new)

    def work(self, consumer: Consumer) -> None:
        """One of the workers. They share a consumer; several processes would have one each."""
        while jobs := consumer.take(timeout=1):
            for job in jobs:
                for link in job.payloads:  # of one site, in the order in which they were found
                    with urllib.request.urlopen(self._address + link) as answer:
                        self.find(*re.findall('href="([^"]+)"', answer.read().decode()))
                job.ack()


def main() -> int:
    app = lowq.Lowq(redis_url=os.environ.get("LOWQ_REDIS_URL", "memory://"))
    queue = app.queue("crawler", shards_count=4)
    sites = Sites()
    with serve(sites) as server:
        crawler = Crawler(queue, f"http://127.0.0.1:{server.server_port}")
        crawler.find("/site-0/0")
        with queue.consumer(ttr=60) as consumer:
            workers = [threading.Thread(target=crawler.work, args=(consumer,)) for _ in range(WORKERS)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        server.shutdown()
    print(f"{sum(sites.served.values())} requests for {len(sites.served)} pages of {len(sites.most)} sites")
    print(f"most requests that a site had at once: {max(sites.most.values())}")
    return 0 if max(sites.most.values()) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
