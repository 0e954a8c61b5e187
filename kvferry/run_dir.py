"""The directory of one running local cluster: its logs, its secret and `state.json`, by which commands find it.

Layout: <root>/<name>/{state.json, secret (0600), control.sock (0600), roles/<worker>, logs/<process>.log}. `state.json`
is there only while the launcher lives; it names the launcher by pid and start time, so a stale file is recognised even
if the pid is used again.
"""

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.secret import create_secret_file

DEFAULT_ROOT = Path("~/.cache/kvferry/run").expanduser()
STATE_NAME = "state.json"
SECRET_NAME = "secret"
CONTROL_NAME = "control.sock"
ROUTERS_NAME = "routers"
ROLES_NAME = "roles"
_KEPT_DEAD_RUNS = 8


class RunDirInUseError(Exception):
    """Another live cluster uses the directory."""


class RunDir:
    """One launcher's own directory. Any thread, one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path | None = None, *, root: Path = DEFAULT_ROOT) -> "RunDir":
        """Make the directory (a random name under `root` unless `path` is given) with a fresh secret.

        Old runs under `root` are removed but for the latest few. Raises RunDirInUseError, or OSError.
        """
        if path is None:
            _prune(root)
            path = root / secrets.token_hex(4)
        path = path.expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if live_state(path) is not None:
            raise RunDirInUseError(f"a cluster is running in {path} already")
        run = cls(path)
        run.clear()
        run.role_path("").mkdir(mode=0o700)
        create_secret_file(run.secret_path)
        return run

    @property
    def secret_path(self) -> Path:
        """The cluster secret of this run."""
        return self.path / SECRET_NAME

    @classmethod
    def at(cls, state: Mapping[str, Any]) -> "RunDir":
        """The directory of a cluster whose state this is."""
        return cls(Path(state["state_dir"]))

    @property
    def control_path(self) -> Path:
        """The socket at which the launcher takes orders (`control.py`)."""
        return self.path / CONTROL_NAME

    @property
    def routers_path(self) -> Path:
        """The file that names where workers attach."""
        return self.path / ROUTERS_NAME

    def role_path(self, worker: str) -> Path:
        """The file in which this worker keeps its role."""
        return self.path / ROLES_NAME / worker

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replace `state.json` atomically, adding who the launcher is."""
        launcher = {"launcher_pid": os.getpid(), "launcher_started": process_start_ticks(os.getpid())}
        temporary = self.path / f".{STATE_NAME}.{os.getpid()}"
        temporary.write_text(json.dumps({**launcher, "state_dir": str(self.path), **state}, indent=1))
        temporary.chmod(0o600)
        temporary.rename(self.path / STATE_NAME)

    def clear(self) -> None:
        """Remove state, secret, socket and roles; logs stay."""
        for name in (STATE_NAME, SECRET_NAME, CONTROL_NAME, ROUTERS_NAME):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / ROLES_NAME, ignore_errors=True)


def live_state(path: Path) -> dict[str, Any] | None:
    """What `state.json` in `path` says, if it is readable and its launcher still lives."""
    try:
        state = json.loads((path / STATE_NAME).read_text())
        pid, started = int(state["launcher_pid"]), int(state["launcher_started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if process_start_ticks(pid) == started else None


def newest_live_state(root: Path = DEFAULT_ROOT) -> dict[str, Any] | None:
    """The state of the live cluster under `root` that was started last."""
    for path in sorted(_runs(root), key=_age_key, reverse=True):
        state = live_state(path)
        if state is not None:
            return state
    return None


def process_start_ticks(pid: int) -> int | None:
    """When the kernel started process `pid`, in clock ticks since boot; None if there is none (or a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _runs(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if path.is_dir()]
    except OSError:
        return []


def _age_key(path: Path) -> float:
    try:
        return (path / STATE_NAME).stat().st_mtime
    except OSError:
        return 0.0


def _prune(root: Path) -> None:
    dead = [path for path in _runs(root) if live_state(path) is None and (path / "logs").is_dir()]
    dead.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in dead[_KEPT_DEAD_RUNS:]:
        shutil.rmtree(path, ignore_errors=True)
