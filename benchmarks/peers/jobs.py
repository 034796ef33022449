"""The jobs that all queue systems are given: small mappings."""

from typing import Any


def payloads(count: int, size: int, start: int = 100_000) -> list[dict[str, Any]]:
    """Payloads of `size` bytes as JSON without blanks, 10 or more. From 20 bytes on they are all different."""
    room = size - len('{"v":100000,"p":""}')
    if room < 0:
        digits = size - len('{"v":}')
        return [{"v": 10 ** (digits - 1) + number % (9 * 10 ** (digits - 1))} for number in range(count)]
    pad = "x" * room
    return [{"v": number, "p": pad} for number in range(start, start + count)]
