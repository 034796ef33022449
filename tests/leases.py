"""Leases, as tests let them end."""

from lowq.store import Client


def run_out(client: Client, prefix: str) -> None:
    """The lease of the shard with that prefix has run out; fit for a server that is full, too."""
    client.command("DEL", f"{prefix}lease")
    client.command("HDEL", f"{prefix}meta", "leased_until")  # which says the same, should the key have been evicted
