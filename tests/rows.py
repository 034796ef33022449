"""Rows of a table that one test goes through."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*row: object) -> Iterator[None]:
    """Names the row in what its assertions, or anything else, raise."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the row: {', '.join(map(shown, row))}"[:2000])
        raise


def shown(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # an int of more digits than Python writes out, or what a test has made unprintable
        return f"<{type(value).__name__} without repr: {type(error).__name__}>"
