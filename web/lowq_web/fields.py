"""The fields of a request, in its address or in a form. Ids among them may be of any bytes."""

from urllib.parse import parse_qsl

from starlette.requests import Request

import lowq
from lowq_web.security import visit_of


def query_of(request: Request) -> dict[str, str]:
    """The query's last value of each name.

    Raises:
        ConfigError: there are too many.
    """
    raw = request.scope["query_string"].decode("ascii", "replace")
    try:
        return dict(parse_qsl(raw, keep_blank_values=True, errors="surrogateescape", max_num_fields=100))
    except ValueError:
        raise lowq.ConfigError("the address has too many fields") from None


def form_of(request: Request) -> list[tuple[str, str]]:
    """The fields of a form that was sent, in order: those of ticked boxes have one name.

    Raises:
        ConfigError: there are too many.
    """
    body = visit_of(request).body.decode("ascii", "replace")
    try:
        return parse_qsl(body, keep_blank_values=True, errors="surrogateescape", max_num_fields=5000)
    except ValueError:
        raise lowq.ConfigError("the form has too many fields") from None
