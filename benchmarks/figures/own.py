"""lowq with settings, as a row that is measured like the peers; and what figures share."""

from benchmarks.peers import Peer
from benchmarks.peers.environment import Ours


def lowq_with(**settings: object) -> Peer:
    """lowq with settings of `peers/lowq.py`."""
    given = {name: str(value) for name, value in settings.items()}
    label = "lowq" + "".join(f", {name}={value}" for name, value in given.items())
    return Peer(label, Ours("lowq"), 0, 0, given, ordered=True)
