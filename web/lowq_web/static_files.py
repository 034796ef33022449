"""Scripts, styles and the icon: read once, and fetched once by each browser.

Pages ask for a file together with what its content hashes to, so a browser may keep it for ever: another content has
another address.
"""

import functools
import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as it is sent."""

    media_type: str
    content: bytes
    version: str


@functools.cache
def files() -> Mapping[str, StaticFile]:
    """All static files, by name."""
    found = {}
    for path in resources.files("lowq_web").joinpath("static").iterdir():
        if path.is_file():
            content = path.read_bytes()
            media_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            version = hashlib.sha256(content).hexdigest()[:16]
            found[path.name] = StaticFile(media_type, content, version)
    return found


async def static(request: Request) -> Response:
    """One of them. A browser must revalidate it each time if the address has no version, or another one."""
    file = files().get(request.path_params["name"])
    if file is None:
        raise HTTPException(404)
    fresh = request.query_params.get("v") == file.version
    # Weak: with and without gzip it is the same file, but not the same bytes.
    tag = f'W/"{file.version}"'
    headers = {
        "cache-control": "private, max-age=31536000, immutable" if fresh else "no-cache",
        "etag": tag,
    }
    if tag.removeprefix("W/") in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
