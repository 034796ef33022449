"""What `lowq nodes` says of a node besides its figures."""

from lowq.cli.look import _remarks
from lowq.inspection.registry import NodeInfo
from tests.rows import case


def test_remarks_on_a_node() -> None:
    rows: list[tuple[bool, int, str]] = [
        (False, 0, ""), (True, 0, "quiet"), (False, 2, "written off: 2"), (True, 1, "quiet, written off: 1"),
    ]  # fmt: skip
    for quiet, written_off, remarks in rows:
        with case(quiet, written_off, remarks):
            assert _remarks(NodeInfo("me:1:abc", 0.0, 0.0, quiet=quiet, written_off=written_off)) == remarks


def test_a_node_that_waits_says_so_first() -> None:
    assert _remarks(NodeInfo("me:1:abc", 0.0, 0.0, quiet=True, waiting=True)) == "waiting, quiet"
