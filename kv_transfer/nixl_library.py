"""NIXL's library: what has to be set before it is loaded, the loading itself, and which network devices it may use.

NIXL carries a UCX of its own. UCX takes its settings from the environment, once, when it is first loaded: there is no
other way for most of them. They are set here and nowhere else, only where the user has not, and logged. `ucx`
uses the same UCX where both are installed; see ucx_library.py.
"""

import importlib
import importlib.util
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_transfer.interfaces import set_unless_set, ucx_devices, ucx_settings

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""Any one of them will do."""


@dataclass(frozen=True, slots=True)
class NixlLibrary:
    """The loaded library. `devices`: the network devices that its UCX may use, as in UCX_NET_DEVICES; or "all"."""

    bindings: Any
    devices: str


def load(bind_host: str) -> NixlLibrary:
    """Load the library, with settings for a worker that listens at `bind_host`. Raises ValueError when it is missing.

    The settings of the first call in a process last: UCX does not read them again.
    """
    package = next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)
    if package is None:
        raise ValueError("transport nixl needs the package nixl-cu12 or nixl-cu13: pip install 'kvferry[nixl]'")
    set_unless_set(_settings(bind_host))
    return NixlLibrary(_import(package), os.environ.get("UCX_NET_DEVICES", "all"))


def bundled_ucx() -> tuple[Path, Path] | None:
    """Where the UCX of the installed package is, as (libucp, libucs); None without the package, or in another form."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations if spec is not None else None) or ():
            libraries = Path(place).parent / f"{package}.libs"
            found = [next(iter(libraries.glob(f"{name}-*.so*")), None) for name in ("libucp", "libucs")]
            if found[0] is not None and found[1] is not None:
                return found[0], found[1]
    return None


def _settings(bind_host: str) -> dict[str, str]:
    settings = ucx_settings()
    devices = ucx_devices(bind_host)
    if devices is not None:
        settings["UCX_NET_DEVICES"] = devices
    return settings


def _import(package: str) -> Any:
    """The bindings of an installed package. Raises ValueError when it does not load."""
    raising = logging.raiseExceptions
    try:
        return importlib.import_module(f"{package}._bindings")
    except ImportError as error:
        raise ValueError(f"transport nixl: {package} is installed but does not load: {error}") from error
    finally:
        # The package takes over logging for itself, to stdout, and silences errors of everybody's handlers.
        logging.raiseExceptions = raising
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        if "NIXL_LOG_LEVEL" not in os.environ:
            logger.setLevel(logging.WARNING)
