"""What ucx needs before it can run, and how it sees memory."""

import ctypes
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libucx")

from kv_transfer import ucx_library
from kv_transfer.network import build_network
from kv_transfer.nixl_agent import NixlAgent
from kv_transfer.nixl_library import load
from kv_transfer.transport_ucx import UcxTransport
from kv_transfer.ucx_library import CUDA_MEMORY, HOST_MEMORY, UcxContext, UcxError, UcxLibrary
from kv_transfer.ucx_port import Span, span_of


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_library, "_WHEEL", "no_such_package_of_ucx")
    monkeypatch.setattr(ucx_library, "_SONAMES", ("libucp-that-nobody-has.so", "libucs-that-nobody-has.so"))
    monkeypatch.setattr(ucx_library, "bundled_ucx", lambda: None)
    with pytest.raises(ValueError, match=r"pip install 'kvferry\[ucx\]'"):
        UcxTransport("127.0.0.1")
    with pytest.raises(ValueError, match=r"pip install 'kvferry\[ucx\]'"):
        build_network(["ucx", "tcp"], "127.0.0.1")


def test_a_process_with_nixl_has_one_ucx_only() -> None:
    pytest.importorskip("nixl_cu12")
    UcxLibrary()
    NixlAgent(load("127.0.0.1"), []).close()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert len({line.split()[-1] for line in maps.splitlines() if "/libucm" in line and "cuda" not in line}) == 1


def test_settings_of_the_user_are_kept_and_ours_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variable = "UCX_RCACHE_MAX_UNRELEASED"
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(variable, "7")
    UcxLibrary()
    assert ucx_library.os.environ[variable] == "7"
    assert f"{variable}=7 is set already" in caplog.text
    monkeypatch.delenv(variable)
    UcxLibrary()
    assert ucx_library.os.environ[variable] == "1024"
    assert f"set {variable}=1024" in caplog.text


def test_only_the_interface_of_the_address_is_used_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = UcxLibrary()
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    for host, devices in (("127.0.0.1", "lo"), ("localhost", "lo"), ("0.0.0.0", "all")):
        context = UcxContext(library, host)
        assert context.devices == devices
        context.close()
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    context = UcxContext(library, "0.0.0.0")
    assert context.devices == "lo"
    context.close()
    context.close()


def test_a_setting_that_ucx_refuses_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no-such-transport")
    with pytest.raises(UcxError):
        UcxContext(UcxLibrary(), "127.0.0.1")


@dataclass
class DeviceArray:
    """As torch, cupy and others show memory of a CUDA device."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    typestr: str = "|u1"
    pointer: int = 0x7F00_0000_0000

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.typestr,
            "data": (self.pointer, False),
            "version": 3,
        }


def test_memory_of_the_host_is_where_it_is() -> None:
    memory = (ctypes.c_char * 100)()
    view = memoryview(memory).cast("B")
    assert span_of(view[10:30]) == Span(ctypes.addressof(memory) + 10, 20, HOST_MEMORY)
    assert span_of(view[10:30].toreadonly()) == Span(ctypes.addressof(memory) + 10, 20, HOST_MEMORY)


@pytest.mark.parametrize(
    ("array", "size_bytes"),
    [
        (DeviceArray((4096,)), 4096),
        (DeviceArray((4, 8), typestr="<f4"), 128),
        (DeviceArray((4, 8), (32, 4), typestr="<f4"), 128),
        (DeviceArray((1, 8), (999, 4), typestr="<f4"), 32),
    ],
)
def test_memory_of_a_device_goes_the_same_way(array: DeviceArray, size_bytes: int) -> None:
    assert span_of(array) == Span(array.pointer, size_bytes, CUDA_MEMORY)


@pytest.mark.parametrize("strides", [(64, 4), (4, 16)])
def test_scattered_memory_of_a_device_is_refused(strides: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        span_of(DeviceArray((4, 8), strides, typestr="<f4"))
