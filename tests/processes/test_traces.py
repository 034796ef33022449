"""Links from batches to pushes on real processes, through their deaths."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import lowq.contrib.otel
from tests.processes.conftest import MakeRig
from tests.processes.support import Rig, until


class TracedRig:
    """Nodes that write their spans to a file, and a producer that keeps its own."""

    def __init__(self, make_rig: MakeRig, folder: Path) -> None:
        self._file = folder / "spans"
        self.rig: Rig = make_rig(ORDERS_SHARDS=1, ORDERS_SPANS=self._file)
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        lowq.contrib.otel.instrument(self.rig.app, tracer_provider=self.provider)

    def pushes(self) -> list[str]:
        """The span ids of the pushes."""
        contexts = [span.get_span_context() for span in self._exporter.get_finished_spans()]
        return [f"0x{found.span_id:016x}" for found in contexts if found is not None]

    def batches(self, count: int) -> list[dict[str, Any]]:
        """The spans of so many batches."""

        def found() -> list[dict[str, Any]]:
            lines = self._file.read_text().split("\n")[:-1] if self._file.exists() else []  # the last is incomplete
            spans = [json.loads(line) for line in lines]
            batches = [span for span in spans if span["name"] == "perform Orders"]
            return batches if len(batches) >= count else []

        return until(found, f"{count} spans of batches")

    def go(self) -> None:
        """Lets all handlers return that wait for that."""
        Path(f"{self.rig.history.path}.go").touch()


@pytest.fixture
def traced(make_rig: MakeRig, tmp_path: Path) -> Iterator[TracedRig]:
    traced = TracedRig(make_rig, tmp_path)
    yield traced
    traced.provider.shutdown()


def linked(span: dict[str, Any]) -> list[str]:
    return [link["context"]["span_id"] for link in span["links"]]


def test_after_kill_9_the_second_delivery_links_to_the_same_pushes(traced: TracedRig) -> None:
    rig = traced.rig
    rig.push("a", 1)
    rig.push("a", 2, do="wait")
    node = rig.node().holds_all()
    rig.begun("a", 2)
    rig.push("a", 3)
    node.kill()
    traced.go()
    rig.node().holds_all()
    rig.done("a", 3)
    rig.drained()
    pushes = traced.pushes()
    assert len(pushes) == 3

    def all_linked() -> bool:
        return {span_id for span in traced.batches(1) for span_id in linked(span)} == set(pushes)

    until(all_linked, "links to all pushes, from one batch or from two")
    spans = traced.batches(1)
    assert linked(spans[0])[:2] == pushes[:2], "the first one died with its process"
    assert all(link["attributes"] == {"lowq.job.id": "a"} for span in spans for link in span["links"])
    assert [key for key in rig.client.scan_iter() if "traces" in key] == []
