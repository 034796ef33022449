"""The tables, as Markdown: of the terminal and of the docs."""

from collections.abc import Iterable, Sequence

from benchmarks.figures import FIGURES
from benchmarks.numbers import shown
from benchmarks.peers import BASE, PEERS
from benchmarks.results import Results

#: Column -> its heading.
COLUMNS = {
    "bulk": "enqueue in bulk, jobs/s",
    "single": "one by one, jobs/s",
    "drain": "drain, jobs/s",
    "drain_cpu": "Redis CPU, drain, µs/job",
    "bytes": "bytes per queued job, 100 B payload",
    "pickup_p50": "pickup when idle, p50, ms",
    "pickup_p99": "p99, ms",
}


def beside_the_peers(results: Results) -> str:
    """Medians, with the ratio to lowq's own in brackets."""
    lines = []
    for peer in PEERS:
        label, row = peer.label, results.rows.get(peer.label)
        if row:
            lines.append([label, *(_with_ratio(results, label, column) for column in COLUMNS), _yes(peer.ordered)])
        elif label in results.skipped:
            lines.append([label, f"left out: {results.skipped[label]}", *[""] * (len(COLUMNS) - 1), _yes(peer.ordered)])
    return table(["system", *COLUMNS.values(), "in order per id"], lines)


def _with_ratio(results: Results, label: str, column: str) -> str:
    value, base = results.median(f"{label}/{column}"), results.median(f"{BASE}/{column}")
    if value is None:
        return ""
    if label == BASE or not base:
        return shown(value)
    return f"{shown(value)} ({shown_ratio(value / base)})"


def shown_ratio(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x" if ratio >= 0.01 else f"{ratio:.1g}x"


def spreads(results: Results) -> str:
    """Minimum, median and maximum of every cell."""
    lines = []
    for label in results.rows:
        for column, heading in COLUMNS.items():
            found = results.spread(f"{label}/{column}")
            if found:
                lines.append([label, heading, *(shown(value) for value in found)])
    return table(["system", "figure", "min", "median", "max"], lines)


def reach(results: Results) -> str:
    """lowq's own figures, beside what must be reached and what is aimed at."""
    lines = []
    for figure in FIGURES:
        found = results.spread(figure.key)
        if found is None:
            continue
        bounds = [f"{shown(bound)}" if bound is not None else "" for bound in (figure.must, figure.aim)]
        values = [shown(value) for value in found]
        lines.append([figure.title, figure.unit, *values, *bounds, figure.reached(found.median)])
    return table(["figure", "unit", "min", "median", "max", "must", "aim", "reached"], lines)


def against_sidekiq(results: Results) -> str:
    """How many times Sidekiq's rates lowq's are; '' when Sidekiq was not measured."""
    parts = []
    for column, name in (("drain", "drain"), ("bulk", "bulk enqueue"), ("single", "single enqueue")):
        ours, theirs = results.median(f"{BASE}/{column}"), results.median(f"Sidekiq/{column}")
        if ours and theirs:
            parts.append(f"{name} {ours / theirs:.2g}x")
    return f"lowq against Sidekiq in this run: {', '.join(parts)}." if parts else ""


def load(results: Results) -> str:
    """Delays by load."""
    lines = [
        [f"{percent:g} %", *(shown(results.median(f"load/{percent:g}/{share}") or 0) for share in _SHARES)]
        for percent, _ in results.points("load", "p50")
    ]
    return table(["load", *(f"{share}, ms" for share in _SHARES)], lines)


_SHARES = ("p50", "p99", "p99.9")
_CASES = {
    "hot/alone": "cold ids, alone in their shard",
    "hot/beside": "the same beside a hot id, 2,000 payloads a second for it",
    "slow/alone": "a fast worker alone",
    "slow/beside": "beside a slow worker that gets 60 % of what 5 threads can do",
    "slow/backlog, lag": "beside a slow worker with a backlog, `LagScheduler`",
    "slow/backlog, seq": "beside a slow worker with a backlog, `SeqScheduler`",
}


def fairness(results: Results) -> str:
    """Delays of those that are cold or fast."""
    lines = [
        [title, *(shown(results.median(f"{case}/{share}") or 0) for share in _SHARES)]
        for case, title in _CASES.items()
        if f"{case}/p50" in results.figures
    ]
    return table(["delay of", *(f"{share}, ms" for share in _SHARES)], lines)


def merging(results: Results) -> str:
    """Payloads for few ids."""
    return _curve(
        results, "merge", "ids", {"push": "pushed/s", "rate": "performed/s", "payloads": "payloads per perform"}
    )


def payload_size(results: Results) -> str:
    """The cost by the size of a payload."""
    names = {
        "bulk": "bulk enqueue, jobs/s",
        "bulk_cpu": "Redis µs/job",
        "drain": "drain, jobs/s",
        "drain_cpu": "Redis µs/job",
        "bytes": "bytes per queued job",
    }
    return _curve(results, "size", "payload, bytes", names)


def options(results: Results) -> str:
    """What the options of a queue cost."""
    names = {
        "bulk": "bulk enqueue, jobs/s", "bulk_cpu": "Redis µs/job", "drain": "drain, jobs/s",
        "drain_cpu": "Redis µs/job", "bytes": "bytes per queued job",
    }  # fmt: skip
    lines = [
        [title, *(shown(results.median(f"options/{name}/{column}") or 0) for column in names)]
        for name, title in _OPTIONS.items()
        if f"options/{name}/bulk" in results.figures
    ]
    return table(["option", *names.values()], lines)


_OPTIONS = {
    "none": 'none (`merge="collapse"`)',
    "append": '`merge="append"`',
    "latest": '`merge="latest"`',
    "ttl": "`ttl`",
    "priority": "`priority`",
    "capacity": "`capacity`",
    "debounce": "`debounce`, `max_wait`",
}


def cluster(results: Results) -> str:
    """A cluster beside one Redis."""
    names = {
        "bulk": "bulk enqueue, jobs/s", "bulk_cpu": "Redis µs/job", "bulk_least": "least of a primary, %",
        "bulk_most": "most, %", "drain": "drain, jobs/s", "drain_cpu": "Redis µs/job",
        "drain_least": "least of a primary, %", "drain_most": "most, %", "moved": "calls to a wrong primary",
    }  # fmt: skip
    return _curve(results, "cluster", "primaries", names)


def queue_length(results: Results) -> str:
    """The cost by the length of the queue."""
    names = {"push_cpu": "enqueue, Redis µs/job", "drain_cpu": "drain, Redis µs/job", "drain": "drain, jobs/s"}
    return _curve(results, "length", "queued jobs", names)


def growth(results: Results) -> str:
    """How each cost grows: at the least and at the most of each curve."""
    lines = []
    for axis, curve, names in _GROWTH:
        for name, cost in names.items():
            points = results.points(curve, name)
            if len(points) > 1:
                (least, first), *_, (most, last) = points
                ratio = shown_ratio(last.median / first.median)
                lines.append(
                    [axis, cost, f"{least:,.0f}", shown(first.median), f"{most:,.0f}", shown(last.median), ratio]
                )
    return table(["what grows", "cost", "from", "", "to", "", "grows"], lines)


_EACH = {"redis_cpu": "Redis µs/job", "node_cpu": "node µs/job"}
_GROWTH = [
    ("shards of a queue", "shards", _EACH),
    ("queues, of 5 shards", "queues", _EACH),
    ("nodes", "nodes", _EACH),
    ("queued jobs", "length", {"push_cpu": "push, Redis µs/job", "drain_cpu": "drain, Redis µs/job"}),
    (
        "payloads of one id", "payloads",
        {"push_cpu": "push, Redis µs/payload", "drain_cpu": "drain, Redis µs/payload"},
    ),
    ("bytes of a payload", "size", {"bulk_cpu": "push, Redis µs/job", "drain_cpu": "drain, Redis µs/job"}),
]  # fmt: skip


def waiting(results: Results) -> str:
    """Handlers that wait, in one and several processes."""
    return _curve(results, "waiting", "processes", {"10_ms": "handler of 10 ms, %", "1_ms": "of 1 ms, %"})


def _curve(results: Results, curve: str, axis: str, names: dict[str, str]) -> str:
    columns = [dict(results.points(curve, name)) for name in names]
    lines = [
        [f"{x:,.0f}", *(shown(column[x].median) if x in column else "" for column in columns)]
        for x in sorted(columns[0])
    ]
    return table([axis, *names.values()], lines)


def machine(results: Results) -> str:
    """The machine and the versions, in a sentence each."""
    about = results.machine
    ours = ", ".join(f"{name} {about[name]}" for name in ("lowq", "Python", "Redis", "redis", "hiredis"))
    lines = [
        f"{about['processor']}, {about['cores']} cores, {about['system']}; {ours.replace('redis ', 'redis-py ', 1)}."
    ]
    others = {label: text for label, text in results.versions.items() if not label.startswith(BASE)}
    if others:
        lines.append("Peers: " + "; ".join(dict.fromkeys(others.values())) + ".")
    return "\n".join(lines)


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its columns padded for whoever reads the source."""
    rows = [list(heads), *(list(line) for line in lines)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(heads))]
    padded = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    return "\n".join([padded[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *padded[1:]])


def _yes(value: bool) -> str:
    return "yes" if value else "no"
