"""Programs of other releases of Debian than this machine's: servers and a Python, unpacked into `.matrix/debian`.

Nothing is installed: apt-get works on lists and a state of its own, packages are unpacked with `dpkg -x`. Each program
comes with the libraries of its release, the C library among them, and is started through that one's loader. So it runs
on any Linux that has apt-get and Debian's keys.

    .venv/bin/python -m tests.debian valkey-8.1     prints the path of the program, or why it can't be had
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".matrix" / "debian"
MIRROR = "http://deb.debian.org/debian"
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
#: Seconds that one call of apt-get may take.
PATIENCE = 300


@dataclass(frozen=True)
class Packaged:
    """A program that a release of Debian has."""

    #: As the matrix calls it: the program and its version, as far as the release keeps it.
    name: str
    #: The releases whose packages are looked at; the last one is where the program is.
    suites: tuple[str, ...]
    #: The packages that are unpacked; the libraries that they need come with them.
    packages: tuple[str, ...]
    #: The name that it is called with.
    program: str
    #: Its file in usr/bin, if that is not its name.
    binary: str = ""


def _server(name: str, *suites: str) -> Packaged:
    kind = name.partition("-")[0]
    # Debian's server is a link to this file, which goes by the name that it is called with.
    return Packaged(name, suites, (f"{kind}-tools",), f"{kind}-server", f"{kind}-check-rdb")


#: What the matrix runs on besides the server on PATH, in this order.
SERVERS = (
    _server("valkey-9", "sid"),  # a release has none yet
    _server("redis-8.0", "trixie"),
    _server("valkey-8.1", "trixie"),
    _server("valkey-8.0", "bookworm", "bookworm-backports"),
)
#: The newest Python that is supported. Debian splits its standard library.
PYTHON = Packaged(
    "python-3.14",
    ("sid",),
    ("python3.14", "python3.14-minimal", "libpython3.14-stdlib", "python3.14-venv"),
    "python3.14",
)


class Unavailable(Exception):
    """The program can't be had here; the message says why."""


def installed() -> str | None:
    """The server that the variable REDIS_SERVER names, or the one on PATH."""
    return os.environ.get("REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")


def version_of(program: str | Path) -> str:
    """As the server says it: `Redis 7.0.15`, `Valkey 8.1.1`.

    Raises:
        Unavailable: it does not start.
    """
    said = _call(program)
    found = re.search(r"^(\w+) server v=(\S+)", said)
    if found is None:
        raise Unavailable(f"{program} does not say its version, but {said[:100]!r}")
    return f"{found[1].capitalize()} {found[2]}"


def _call(program: str | Path) -> str:
    """What it says when it is asked for its version."""
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{program} does not start: {_reason(error)}") from None


def unpacked(wanted: Packaged, folder: Path = FOLDER) -> Path:
    """That program; downloads and unpacks it when it is not there yet. Processes wait for each other.

    Raises:
        Unavailable: apt-get or Debian's keys are missing, the network is, or what was unpacked does not start.
    """
    program = folder / wanted.name / "usr" / "bin" / wanted.program
    with _locked(folder):
        if not program.exists():
            _unpack(wanted, folder / wanted.name, program)
    _call(program)
    return program


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unpack(wanted: Packaged, root: Path, program: Path) -> None:
    for tool in ("apt-get", "apt-cache", "dpkg"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is missing: {wanted.name} comes from Debian's packages")
    if not KEYS.exists():
        raise Unavailable(f"{KEYS} is missing: install debian-archive-keyring")
    shutil.rmtree(root, ignore_errors=True)
    apt = _Apt(root / "apt", wanted.suites)
    try:
        apt.run("apt-get", "update")
        for package in apt.download(apt.with_libraries(wanted.packages, wanted.suites[-1])):
            subprocess.run(["dpkg", "-x", package, root], capture_output=True, check=True, timeout=PATIENCE)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{wanted.name} can't be had from {MIRROR}: {_reason(error)}") from None
    shutil.rmtree(apt.folder)
    binary = program.with_name(wanted.binary or wanted.program)
    loaders = [path for path in root.glob("**/ld-linux-*.so.*") if not path.is_symlink()]
    if not binary.exists() or len(loaders) != 1:
        raise Unavailable(f"the packages of {wanted.name} have no program or no loader where they are expected")
    libraries = ":".join(str(path) for path in sorted({path.parent for path in root.glob("**/*.so.*")}))
    started = binary.rename(binary.with_name("started-through-the-loader"))
    # A Python finds its standard library, and its virtual environment, from the path that it is called by.
    program.write_text(f'#!/bin/sh\nexec "{loaders[0]}" --library-path "{libraries}" --argv0 "$0" "{started}" "$@"\n')
    program.chmod(0o755)


class _Apt:
    """apt-get with lists, state and archives of its own."""

    def __init__(self, folder: Path, suites: tuple[str, ...]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        for name in ("state/lists/partial", "cache/archives/partial", "etc/apt.conf.d", "etc/preferences.d", "debs"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        lines = [f"deb [signed-by={KEYS}] {MIRROR} {suite} main\n" for suite in suites]
        (folder / "etc" / "sources.list").write_text("".join(lines))
        places = {"State": "state", "State::status": "status", "Cache": "cache", "Etc": "etc"}
        options = [f"Dir::{name}={folder / place}" for name, place in places.items()]
        # Without a sandbox: its user may not read this folder. Only this machine's proxy is taken from its settings.
        options += ["Acquire::Languages=none", "APT::Sandbox::User=root", "Acquire::Retries=3"]
        self._options = [word for option in options for word in ("-o", option)]

    def run(self, tool: str, *arguments: str) -> str:
        return subprocess.run(
            [tool, "-qq", *self._options, *arguments],
            cwd=self.folder / "debs", capture_output=True, text=True, check=True, timeout=PATIENCE,
        ).stdout  # fmt: skip

    def with_libraries(self, packages: tuple[str, ...], suite: str) -> list[str]:
        """`package/suite`, the libraries that these need, and those that they need."""
        names = [f"{package}/{suite}" for package in packages]
        seen = set(packages)
        for name in names:
            policy = self.run("apt-cache", "show", "--no-all-versions", "-t", suite, name.partition("/")[0])
            depends = " ".join(re.findall(r"^(?:Pre-)?Depends: (.*)$", policy, re.MULTILINE))
            needed = dict.fromkeys(re.findall(r"(?:^|[, ] ?)((?:lib|zlib)[\w.+-]*)", depends))
            names += [library for library in needed if library not in seen]
            seen.update(needed)
        return names

    def download(self, packages: list[str]) -> list[Path]:
        self.run("apt-get", "download", *packages)
        return sorted((self.folder / "debs").glob("*.deb"))


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None) or ""
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    return " ".join(text.split())[-300:] or str(error)


def main(names: list[str]) -> int:
    known = {packaged.name: packaged for packaged in (*SERVERS, PYTHON)}
    if not names or not set(names) <= known.keys():
        print(f"usage: python -m tests.debian {' | '.join(known)} ...", file=sys.stderr)
        return 2
    missing = 0
    for name in names:
        try:
            print(unpacked(known[name]), flush=True)
        except Unavailable as error:
            print(f"{name}: {error}", file=sys.stderr)
            missing = 1
    return missing


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
