"""Installs what is missing of the peers (`make bench-peers`). What can't be installed is named, and skipped later."""

from benchmarks.peers import PEERS
from benchmarks.peers.environment import NotInstalled


def main() -> None:
    """Goes through all of them."""
    for environment in dict.fromkeys(peer.environment for peer in PEERS):
        label = next(peer.label for peer in PEERS if peer.environment == environment)
        try:
            environment.install()
        except NotInstalled as error:
            print(f"{label}: left out: {error}")


if __name__ == "__main__":
    main()
