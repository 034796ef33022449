"""Links from batches to pushes on real processes, through their deaths."""

import json
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import lowq.contrib.otel
from tests.processes.conftest import MakeRig
from tests.processes.support import until


def test_after_kill_9_the_second_delivery_links_to_the_same_pushes(make_rig: MakeRig, tmp_path: Path) -> None:
    spans, exporter, provider = tmp_path / "spans", InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    rig = make_rig(ORDERS_SHARDS=1, ORDERS_SPANS=spans)
    lowq.contrib.otel.instrument(rig.app, tracer_provider=provider)

    def links() -> list[list[dict[str, Any]]]:
        """Of each batch that has ended."""
        lines = spans.read_text().split("\n")[:-1] if spans.exists() else []  # the last one is incomplete
        return [span["links"] for span in map(json.loads, lines) if span["name"] == "perform Orders"]

    rig.push("a", 1)
    rig.push("a", 2, do="wait")
    node = rig.node().holds_all()
    rig.begun("a", 2)
    rig.push("a", 3)
    node.kill()
    Path(f"{rig.history.path}.go").touch()
    rig.node().holds_all()
    rig.done("a", 3)
    rig.drained()
    contexts = [span.get_span_context() for span in exporter.get_finished_spans()]
    pushes = [f"0x{context.span_id:016x}" for context in contexts if context is not None]
    assert len(pushes) == 3
    until(
        lambda: {link["context"]["span_id"] for batch in links() for link in batch} == set(pushes),
        "links to all pushes, from one batch or from two",
    )
    first = [link["context"]["span_id"] for link in links()[0]]
    assert first[:2] == pushes[:2], "the first batch died with its process"
    assert all(link["attributes"] == {"lowq.job.id": "a"} for batch in links() for link in batch)
    assert [key for key in rig.client.scan_iter() if "traces" in key] == []
    provider.shutdown()
