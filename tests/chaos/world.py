"""Network, PID and mount namespaces with a node in each network namespace; all of it is gone with the process.

`enter` starts this interpreter again inside; everything else here is for inside. The process there is the first of its
PID namespace: what it leaves running dies with it, and what runs there can only be its own.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.chaos.plan import NODES
from tests.chaos.switch import MTU, LinkState, Pair, Switch, open_tun, slower

CLIENT = "client"
ADDRESSES = {CLIENT: "10.231.0.1", **{name: f"10.231.0.{10 + index}" for index, name in enumerate(NODES)}}
_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
_NAMESPACES = Path("/run/netns")


def why_not() -> str:
    """What keeps this machine from having such namespaces; empty when nothing does."""
    for tool in ("unshare", "nsenter", "ip", "mount"):
        if shutil.which(tool) is None:
            return f"network namespaces need the command `{tool}`, which is not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "network namespaces need /dev/net/tun, which cannot be opened"
    trial = "mount -t tmpfs tmpfs /run && mkdir /run/netns && ip netns add trial"
    done = subprocess.run([*_UNSHARE, "sh", "-c", trial], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        return f"network namespaces are not permitted here: {done.stderr.strip()}"
    return ""


def enter(module: str, arguments: Sequence[str]) -> int:
    """Run a module inside, and return its exit status."""
    return subprocess.run([*_UNSHARE, sys.executable, "-m", module, *arguments], check=False).returncode


def unmount(disk: Path) -> None:
    """Take a world's disk away, with all that is on it."""
    subprocess.run(["umount", "-l", str(disk)], check=False, capture_output=True, timeout=30)


class World:
    """The nodes' networks, and a small disk for what they write. Faults on links add up while they last."""

    def __init__(self, disk: Path, disk_bytes: int, seed: int) -> None:
        """Raises CalledProcessError, OSError."""
        self.disk = disk
        # Names of namespaces are files in /run: with one of its own, nobody else sees them.
        _run("mount", "--make-rprivate", "/")
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")
        _NAMESPACES.mkdir()
        disk.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={disk_bytes}", "tmpfs", str(disk))
        _run("ip", "link", "set", "lo", "up")
        tuns = {name: _join(name, address) for name, address in ADDRESSES.items()}
        self._switch = Switch(tuns, ADDRESSES, seed)
        self._faults: list[tuple[frozenset[Pair], LinkState]] = []

    def argv(self, node: str, command: Sequence[str]) -> tuple[str, ...]:
        """How a command is started in a node's network; its process id is that of the command."""
        return ("nsenter", f"--net={_NAMESPACES / node}", *command)

    def disturb(self, pairs: Iterable[Pair], state: LinkState) -> "Disturbance":
        """Make links bad, until the end of the `with` block."""
        return Disturbance(self, frozenset(pairs), state)

    def add(self, fault: tuple[frozenset[Pair], LinkState]) -> None:
        """One more fault."""
        self._faults.append(fault)
        self._apply(fault[0])

    def remove(self, fault: tuple[frozenset[Pair], LinkState]) -> None:
        """One fault less."""
        self._faults.remove(fault)
        self._apply(fault[0])

    def close(self) -> None:
        """Stop moving packets."""
        self._switch.close()

    def _apply(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            state = LinkState()
            for disturbed, worse in self._faults:
                if pair in disturbed:
                    state = slower(state, worse)
            self._switch.set_links([pair], state)


class Disturbance:
    """A fault of links, for as long as the block lasts."""

    def __init__(self, world: World, pairs: frozenset[Pair], state: LinkState) -> None:
        self._world = world
        self._fault = (pairs, state)

    def __enter__(self) -> None:
        self._world.add(self._fault)

    def __exit__(self, *_: object) -> None:
        self._world.remove(self._fault)


def _join(name: str, address: str) -> int:
    """A TUN device with this address, in a namespace of this name; the client's is that of this process."""
    device = f"tun-{name}"[:15]
    tun = open_tun(device)
    ip: tuple[str, ...] = ("ip",)
    if name != CLIENT:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "set", device, "netns", name)
        ip = ("ip", "-n", name)
        _run(*ip, "link", "set", "lo", "up")
    _run(*ip, "addr", "add", f"{address}/24", "dev", device)
    _run(*ip, "link", "set", device, "mtu", str(MTU), "up")
    return tun


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
