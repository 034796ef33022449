"""A certificate of the tests' own, and a port of a server that speaks TLS with it."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.redis_server import RedisServer, free_port


class Tls:
    """The options with which a server may speak TLS, and where it does."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is missing, which makes the server's certificate: sudo apt-get install openssl")
        folder.mkdir(parents=True, exist_ok=True)
        self._key, self._certificate = folder / "key.pem", folder / "certificate.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", self._key, "-out", self._certificate],
            check=True, capture_output=True,
        )  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        """Those of a server that may speak TLS, as `RedisServer` takes them."""
        certificate = str(self._certificate)
        return {
            "tls_cert_file": certificate, "tls_ca_cert_file": certificate, "tls_key_file": str(self._key),
            "tls_auth_clients": "no",
        }  # fmt: skip

    @property
    def query(self) -> str:
        """What a URL with TLS ends with."""
        return f"?ssl_ca_certs={self._certificate}"

    def server(self) -> RedisServer:
        return RedisServer(**self.options)

    def port(self, server: RedisServer) -> int:
        """Lets the server, which runs, listen with TLS, too, and returns where."""
        with redis.Redis(port=server.port) as client:
            # Only now, as another port that is free at some moment may not be free when it starts.
            while not _listens(client, port := free_port()):
                pass
        return port

    def url(self, server: RedisServer) -> str:
        """As `port`, as a URL."""
        return f"rediss://127.0.0.1:{self.port(server)}/0{self.query}"


def _listens(client: "redis.Redis", port: int) -> bool:
    try:
        return bool(client.config_set("tls-port", port))
    except redis.ResponseError:  # somebody else has it
        return False
