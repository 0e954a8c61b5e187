"""Builds the C helpers of kv_transfer and of the engine where there is a compiler. Where there is none, kvferry runs
without them."""

import os
import shlex
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Products may be fused with the sum they go into, in vectors too; nothing else about floats is relaxed. Vectors are
# passed only to functions that are inlined, so the ABI that gcc warns of does not matter.
_FLAGS = (
    *("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-pthread"),
)
_LIBRARIES = ("-lm",)
# The kernels take a minute of a quiet core.
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Helper:
    """One shared library: paths below the root of the project, and what goes slower without it."""

    sources: tuple[Path, ...]
    target: Path
    slower: str


HELPERS = (
    Helper((Path("kv_transfer/native/pages.c"),), Path("kv_transfer/native/pages.so"), "moves KV"),
    Helper(
        tuple(Path("engine/native", name) for name in ("attention.c", "gemm.c", "ops.c", "threads.c")),
        Path("engine/native/kernels.so"),
        "computes on the CPU",
    ),
)


class NativeHelperHook(BuildHookInterface):  # type: ignore[type-arg]
    """For wheels and editable installs. The sdist carries the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; with any success the wheel is one of this platform, else one of any."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        for helper in HELPERS:
            (root / helper.target).unlink(missing_ok=True)
            reason = compile_helper(helper, root)
            if reason:
                self.app.display_warning(
                    f"kvferry is installed without its C helper {helper.target.name}, and {helper.slower} slower: "
                    f"{reason}"
                )
                continue
            build_data["artifacts"].append(f"/{helper.target}")
            build_data["pure_python"] = False
            # Plain C, no Python ABI: one file for every Python of this platform.
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def clean(self, versions: list[str]) -> None:
        """Remove what was built."""
        for helper in HELPERS:
            Path(self.root, helper.target).unlink(missing_ok=True)


def compile_helper(helper: Helper, root: Path) -> str:
    """Why it could not be built, or nothing. CC names another compiler than the system's cc, as is the custom."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        return f"there is no C compiler {' '.join(compiler)!r}"
    # Beside the target and then renamed: a process that has the old one mapped keeps it.
    target = root / helper.target
    built = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        sources = [str(root / source) for source in helper.sources]
        command = [*compiler, *_FLAGS, "-o", str(built), *sources, *_LIBRARIES]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            return f"{' '.join(compiler)} failed: {done.stderr.strip()[-500:]}"
        built.replace(target)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        built.unlink(missing_ok=True)
    return ""
