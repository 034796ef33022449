"""What Redis keeps of an error, or of a reason: a text, cut and encoded."""

from collections.abc import Callable

#: Bytes of UTF-8 that are kept of an error, or of a reason: G6 bounds what a job takes.
MAX_ERROR_BYTES = 8192
#: Bytes that ``dump_error`` may make of them.
MAX_DUMPED_BYTES = 8 * MAX_ERROR_BYTES


def format_error(error: BaseException) -> str:
    """What is kept of an exception: its traceback, cut in the middle beyond 8 KiB."""
    import traceback

    return cut_error("".join(traceback.format_exception(error)).rstrip())


def cut_error(text: str) -> str:
    """A text as it is kept with a job: all that are longer than ``MAX_ERROR_BYTES`` are cut here, in the middle.

    Raises:
        TypeError: it is no text.
    """
    text = "".join((text,))  # a plain str, also of a subclass
    if len(text) <= MAX_ERROR_BYTES // 4:  # which has 4 bytes a character at most
        return text
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= MAX_ERROR_BYTES:
        return text
    head, tail = data[: MAX_ERROR_BYTES // 4], data[-(MAX_ERROR_BYTES * 3 // 4 - 64) :]
    omitted = len(data) - len(head) - len(tail)
    return f"{head.decode('utf-8', 'ignore')}\n... {omitted} bytes left out ...\n{tail.decode('utf-8', 'ignore')}"


def dump_text(dump_error: Callable[[str], bytes], text: str) -> bytes:
    """An error or a reason as Redis keeps it: cut, then encoded by the setting ``dump_error``.

    Raises:
        TypeError: it is no text, or ``dump_error`` gave no bytes. ValueError: it gave too many. What it raises.
    """
    data: object = dump_error(cut_error(text))
    if not isinstance(data, bytes):
        raise TypeError(f"dump_error gave a {type(data).__name__} instead of bytes")
    data = bytes(memoryview(data))  # plain bytes, also of a subclass
    if len(data) > MAX_DUMPED_BYTES:
        raise ValueError(f"dump_error gave {len(data)} bytes; it may give {MAX_DUMPED_BYTES}")
    return data


def dump_error(text: str) -> bytes:
    # The name of a file that is no UTF-8 is in the error as surrogates, which UTF-8 has no bytes for.
    return text.encode("utf-8", "backslashreplace")
