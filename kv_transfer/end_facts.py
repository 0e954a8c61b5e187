"""What this process can find out about its host that matters for the choice of a transport. Looks, changes nothing.

RDMA needs all of: a device under /sys/class/infiniband (InfiniBand, RoCE and EFA are all there) with a live port; its
/dev/infiniband/uverbs node, which a container often lacks although it sees the device; a library that was built with
verbs; and UCX variables, if the user has set any, that do not forbid it.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kv_transfer.choice import RDMA_CAPABLE, EndFacts
from kv_transfer.nixl_library import PACKAGES

# Any one of them will do. libucx comes with ucxx; without it, the system's libucp is the library of ucx.
_MODULES = {"ucx": ("libucx",), "nixl": PACKAGES}

INSTALL = {"ucx": "pip install 'kvferry[ucx]'", "nixl": "pip install 'kvferry[nixl]'"}
"""Transports that need a library, and the command that installs it."""

_ALWAYS = ("shm", "tcp")
_UCX_RDMA_TLS = ("rc", "dc", "ud", "srd")
# Where the loader looks beside LD_LIBRARY_PATH.
_SYSTEM_LIBRARY_DIRS = (
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
)


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Where to look; tests look elsewhere."""

    infiniband: Path = Path("/sys/class/infiniband")
    uverbs: Path = Path("/dev/infiniband")
    boot_id: Path = Path("/proc/sys/kernel/random/boot_id")
    pid_namespace: Path = Path("/proc/self/ns/pid")


def importable_transports() -> tuple[str, ...]:
    """Transports that reach other processes and whose library is installed here. Loads nothing: cheap."""
    return (*_ALWAYS, *(name for name in INSTALL if has_library(name)))


def has_library(transport: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the library behind a transport is installed; True for one that needs none."""
    if transport not in INSTALL or any(_is_module(name) for name in _MODULES[transport]):
        return True
    places = _system_dirs(os.environ if environ is None else environ)
    return transport == "ucx" and any((place / "libucp.so.0").exists() for place in places)


def end_facts(
    transports: tuple[str, ...], paths: HostPaths | None = None, environ: Mapping[str, str] | None = None
) -> EndFacts:
    """What this end tells its peers, having these transports. Some file look-ups, no more: any thread."""
    paths = paths or HostPaths()
    return EndFacts(host_id(paths), rdma_transports(transports, paths, environ))


def rdma_transports(
    transports: tuple[str, ...], paths: HostPaths | None = None, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Those of `transports` that should find RDMA here, best first. Empty means plain networks only."""
    paths, environ = paths or HostPaths(), os.environ if environ is None else environ
    devices = rdma_devices(paths)
    if not devices or not _has_nodes(paths) or not ucx_allows_rdma(environ, devices):
        return ()
    return tuple(name for name in RDMA_CAPABLE if name in transports and library_has_verbs(name, environ))


def rdma_devices(paths: HostPaths | None = None) -> tuple[str, ...]:
    """RDMA devices with a port that is up (or does not say), such as `mlx5_0`."""
    try:
        found = sorted((paths or HostPaths()).infiniband.iterdir())
    except OSError:
        return ()
    return tuple(device.name for device in found if _is_up(device))


def why_no_rdma(
    transports: tuple[str, ...], paths: HostPaths | None = None, environ: Mapping[str, str] | None = None
) -> str:
    """What is missing for RDMA on this host, as one clause; empty when nothing is."""
    paths, environ = paths or HostPaths(), os.environ if environ is None else environ
    if rdma_transports(transports, paths, environ):
        return ""
    devices = rdma_devices(paths)
    if not devices:
        return f"no RDMA device with a live port under {paths.infiniband}"
    listed = ", ".join(devices)
    if not _has_nodes(paths):
        return f"{listed} has no device node in {paths.uverbs}: is it passed into the container?"
    if not ucx_allows_rdma(environ, devices):
        return f"UCX_TLS or UCX_NET_DEVICES leaves {listed} out (if you set neither: --host is not an address of it)"
    wanted = [name for name in RDMA_CAPABLE if name in transports]
    if not wanted:
        return f"{listed} is there, but neither nixl nor ucx is among the transports ({INSTALL['nixl']})"
    return f"{listed} is there, but the library of {', '.join(wanted)} is built without verbs ({INSTALL['nixl']})"


def ucx_allows_rdma(environ: Mapping[str, str], devices: tuple[str, ...]) -> bool:
    """Whether UCX, as UCX_TLS and UCX_NET_DEVICES tell it, may use any of these devices. Unset allows everything; set
    but empty allows nothing."""
    return _lets_through(
        environ.get("UCX_TLS"), _UCX_RDMA_TLS, lambda name, family: name.lstrip("\\").split("_")[0] in ("ib", family)
    ) and _lets_through(environ.get("UCX_NET_DEVICES"), devices, lambda name, device: name.partition(":")[0] == device)


def library_has_verbs(transport: str, environ: Mapping[str, str]) -> bool:
    """Whether the library behind this transport can drive RDMA devices. nixl's wheels bring verbs; libucx's do not."""
    if transport != "ucx":
        return has_library(transport, environ)
    spec = importlib.util.find_spec("libucx") if _is_module("libucx") else None
    prefers_system = environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() != "false"
    if spec is None or prefers_system:
        places = _system_dirs(environ)
    else:
        places = [Path(place) / "lib" for place in spec.submodule_search_locations or ()]
    return any(any(place.glob("ucx/libuct_ib.so*")) for place in places)


def host_id(paths: HostPaths | None = None) -> str:
    """Equal for processes that can open each other's /proc entries: same boot, same pid namespace. Empty if unknown."""
    paths = paths or HostPaths()
    try:
        return f"{paths.boot_id.read_text(encoding='ascii').strip()} {paths.pid_namespace.readlink()}"
    except (OSError, ValueError):
        return ""


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _system_dirs(environ: Mapping[str, str]) -> list[Path]:
    named = [Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    return named + [Path(name) for name in _SYSTEM_LIBRARY_DIRS]


def _is_up(device: Path) -> bool:
    states = []
    for port in device.glob("ports/*/state"):
        try:
            states.append(port.read_text(encoding="ascii", errors="replace"))
        except OSError:
            continue
    return not states or any("ACTIVE" in state for state in states)


def _has_nodes(paths: HostPaths) -> bool:
    return any(os.access(node, os.R_OK | os.W_OK) for node in paths.uverbs.glob("uverbs*"))


def _lets_through(value: str | None, members: Sequence[str], names_it: Callable[[str, str], bool]) -> bool:
    """Whether a list as UCX reads it leaves any member in: `a,b`, `all`, or `^a,b` for all but these."""
    if value is None:
        return True
    names = [name.strip() for name in value.strip().removeprefix("^").split(",") if name.strip()]
    named = [member for member in members if any(name == "all" or names_it(name, member) for name in names)]
    return len(named) < len(members) if value.strip().startswith("^") else bool(named)
