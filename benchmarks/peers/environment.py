"""Where a peer's own packages are: a folder of its own below benchmarks/.peers, made when it is missing.

Each has its own, as they want different versions of redis-py. What can't be installed is said in a word; the peer is
skipped then.
"""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent / ".peers"
HERE = Path(__file__).resolve().parent
#: Seconds that an installation may take.
PATIENCE = 600.0


class NotInstalled(Exception):
    """A peer can't be measured; the message is why."""


@dataclass(frozen=True)
class Ours:
    """lowq itself, in the environment that runs the benchmarks."""

    module: str

    def install(self) -> None:
        pass

    def command(self) -> list[str]:
        return [sys.executable, "-m", f"benchmarks.peers.{self.module}"]

    def variables(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True)
class FromPyPI:
    """Distributions from PyPI, in a virtual environment."""

    module: str
    requirements: tuple[str, ...]

    def install(self) -> None:
        if _stamp(self.module).exists():
            return
        shutil.rmtree(HOME / self.module, ignore_errors=True)
        venv.create(HOME / self.module)
        _run([sys.executable, "-m", "pip", "--python", self._python(), "install", "-q", *self.requirements])
        _stamp(self.module).touch()

    def command(self) -> list[str]:
        if not _stamp(self.module).exists():
            raise NotInstalled("not installed: make bench-peers")
        return [self._python(), "-m", f"benchmarks.peers.{self.module}"]

    def variables(self) -> dict[str, str]:
        return {}

    def _python(self) -> str:
        return str(HOME / self.module / "bin" / "python")


@dataclass(frozen=True)
class FromNpm:
    """Packages of npm's, the first of which gives the folder its name, for a script that node runs."""

    script: str
    packages: tuple[str, ...]

    @property
    def package(self) -> str:
        return self.packages[0]

    def install(self) -> None:
        if _stamp(self.package).exists():
            return
        if shutil.which("npm") is None or shutil.which("node") is None:
            raise NotInstalled("needs node and npm")
        folder = HOME / self.package
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text("{}\n")
        _run(["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder), *self.packages])
        _stamp(self.package).touch()

    def command(self) -> list[str]:
        if not _stamp(self.package).exists():
            raise NotInstalled("not installed: make bench-peers")
        return ["node", str(HERE / self.script)]

    def variables(self) -> dict[str, str]:
        return {"NODE_PATH": str(HOME / self.package / "node_modules")}


@dataclass(frozen=True)
class FromDebian:
    """Packages of Debian's or Ubuntu's, for a script that ruby runs. Installed as root only."""

    script: str
    libraries: tuple[str, ...]
    packages: tuple[str, ...]

    def install(self) -> None:
        if self._is_there():
            return
        wanted = " ".join(self.packages)
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise NotInstalled(f"needs Debian's {wanted}")
        _run(["apt-get", "update", "-qq"])
        _run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *self.packages])

    def command(self) -> list[str]:
        if not self._is_there():
            raise NotInstalled(f"needs Debian's {' '.join(self.packages)}")
        return ["ruby", str(HERE / self.script)]

    def variables(self) -> dict[str, str]:
        return {}

    def _is_there(self) -> bool:
        if shutil.which("ruby") is None:
            return False
        loads = "; ".join(f"require {library!r}" for library in self.libraries)
        return subprocess.run(["ruby", "-e", loads], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Nowhere:
    """Not to be had from PyPI, npm or Debian."""

    why: str

    def install(self) -> None:
        raise NotInstalled(self.why)

    def command(self) -> list[str]:
        raise NotInstalled(self.why)

    def variables(self) -> dict[str, str]:
        return {}


Environment = Ours | FromPyPI | FromNpm | FromDebian | Nowhere


def _stamp(name: str) -> Path:
    return HOME / name / ".installed"


def _run(command: Sequence[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{command[0]} took longer than {PATIENCE:g} s") from None
    if ran.returncode != 0:
        lines = [line for line in (ran.stderr or ran.stdout).splitlines() if line.strip()] or ["no word of why"]
        raise NotInstalled(f"{lines[-1][:200]}")
