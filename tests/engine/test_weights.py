"""The weights file: written as a stream, mapped without copies, shared by processes, refused when damaged."""

import json
import multiprocessing
import struct
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.weights import TensorForm, check_tensors, map_weights, write_weights
from runtime.errors import KvferryError

_SHAPES = {"b": (5, 3), "a": (4,), "c": (2, 2, 2)}


def _forms(dtype: torch.dtype = torch.float32) -> dict[str, TensorForm]:
    return {name: TensorForm(shape, dtype) for name, shape in _SHAPES.items()}


def _tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in _SHAPES.items()}


def _file(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    if isinstance(header, bytes):
        text = header
    else:
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_written_is_mapped_and_is_readable_by_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = _tensors(dtype)
    path = tmp_path / "weights.safetensors"
    write_weights(path, _forms(dtype), tensors.__getitem__)
    mapped = map_weights(path)
    by_library = load_file(path)
    assert list(mapped) == list(_SHAPES)
    for name, tensor in tensors.items():
        assert torch.equal(mapped[name], tensor)
        assert torch.equal(by_library[name], tensor)


def test_the_first_tensor_begins_on_a_page(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_weights(path, _forms(), _tensors().__getitem__)
    assert map_weights(path)["b"].data_ptr() % 4096 == 0


def test_files_of_the_safetensors_library_are_mapped(tmp_path: Path) -> None:
    tensors = _tensors()
    save_file(tensors, tmp_path / "w.safetensors")
    mapped = map_weights(tmp_path / "w.safetensors")
    assert all(torch.equal(mapped[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_that_is_not_as_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"b is torch.float32 \[5\], not torch.float32 \[5, 3\]"):
        write_weights(tmp_path / "w", {"b": TensorForm((5, 3), torch.float32)}, lambda _: torch.zeros(5))


def test_tensors_of_several_dtypes_share_a_file_widest_first(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
    forms = {str(dtype): TensorForm((3,), dtype) for dtype in dtypes}
    tensors = {str(dtype): torch.tensor([1, -2, 3]).to(dtype) for dtype in dtypes}
    path = tmp_path / "weights.safetensors"
    write_weights(path, forms, tensors.__getitem__)
    mapped, by_library = map_weights(path), load_file(path)
    for name, tensor in tensors.items():
        assert mapped[name].dtype == tensor.dtype
        assert torch.equal(mapped[name], tensor)
        assert torch.equal(by_library[name], tensor)
    with pytest.raises(ValueError, match=r"float16 would begin at byte 3, not aligned"):
        write_weights(path, dict(reversed(forms.items())), tensors.__getitem__)


def test_a_write_to_a_mapped_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_weights(path, _forms(), _tensors().__getitem__)
    before = path.read_bytes()
    map_weights(path)["a"].zero_()
    assert path.read_bytes() == before


def _mapping_kib(path: Path) -> dict[str, int]:
    """What the kernel counts for this process's mapping of a file, in KiB, by its own words."""
    counts: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            inside = words[-1] == str(path)
        elif inside and words[-1] == "kB":
            counts[words[0][:-1]] = counts.get(words[0][:-1], 0) + int(words[1])
    return counts


def _read_in_another_process(path: Path, pipe: Connection) -> None:
    mapped = map_weights(path)["w"]
    pipe.send((float(mapped.sum()), _mapping_kib(path)))
    pipe.recv()


def test_two_processes_share_the_pages(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    size_kib = 4096
    form = TensorForm((size_kib * 256,), torch.float32)
    write_weights(path, {"w": form}, lambda _: torch.ones(size_kib * 256))
    mapped = map_weights(path)["w"]
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_read_in_another_process, args=(path, there))
    other.start()
    try:
        total, others = here.recv()
        assert total == float(mapped.sum()) == size_kib * 256
        own = _mapping_kib(path)
    finally:
        here.send(None)
        other.join()
    for counts in (own, others):
        assert counts["Rss"] >= size_kib
        assert counts["Anonymous"] == 0, "pages were copied"
    # Dirty only means that the kernel has not yet written the new file to its disk.
    assert own["Shared_Clean"] + own["Shared_Dirty"] >= size_kib


_GOOD = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


def _changed(**changes: Any) -> dict[str, Any]:
    return {"w": {**_GOOD["w"], **changes}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "too short"),
        (b"1234567", "too short"),
        (struct.pack("<Q", 1 << 63) + b"{}", "beyond its end"),
        (struct.pack("<Q", 99) + b"{}", "beyond its end"),
        (_file(b"{", b""), "no readable header"),
        (_file(b"\xff\xff", b""), "no readable header"),
        (_file(b"[]", b""), "no JSON object"),
        (_file({"w": 3}, b""), "malformed"),
        (_file(_changed(shape="22"), bytes(16)), "malformed"),
        (_file(_changed(data_offsets=[0, 16, 32]), bytes(16)), "malformed"),
        (_file(_changed(dtype="I16"), bytes(16)), "dtype I16"),
        (_file(_changed(shape=[2, -2]), bytes(16)), "has the shape"),
        (_file(_changed(shape=[2, 0]), bytes(16)), "has the shape"),
        (_file(_changed(shape=[1 << 62, 4]), bytes(16)), "has the shape"),
        (_file(_changed(shape=[2, 3]), bytes(16)), "does not fit its bytes"),
        (_file(_changed(data_offsets=[16, 0]), bytes(16)), "does not fit its bytes"),
        (_file(_changed(data_offsets=[-16, 0]), bytes(16)), "does not fit its bytes"),
        (_file(_GOOD, bytes(15)), "does not fit its bytes"),
        (_file(_GOOD, bytes(17)), "its tensors end at"),
        (_file(_changed(data_offsets=[4, 20]), bytes(20)), "not where the one before ends"),
        (_file({**_GOOD, "x": _GOOD["w"]}, bytes(16)), "not where the one before ends"),
        (_file(json.dumps(_GOOD).encode().ljust(97), bytes(16)), "not aligned for F32"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(KvferryError, match=expected):
        map_weights(path)


@settings(deadline=None, max_examples=100)
@given(position=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_a_damaged_header_is_refused_or_read_within_the_file(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int
) -> None:
    header = {name: {"dtype": "F32", "shape": [4], "data_offsets": [at, at + 16]} for name, at in (("a", 0), ("b", 16))}
    content = bytearray(_file(json.dumps(header).encode().ljust(160), bytes(32)))
    content[position % len(content)] = value
    path = tmp_path_factory.mktemp("damaged") / "weights.safetensors"
    path.write_bytes(content[: len(content) - cut])
    try:
        tensors = map_weights(path)
    except KvferryError:
        return
    assert sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) <= 32


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvferryError, match="cannot map"):
        map_weights(tmp_path / "none")


def test_tensors_that_do_not_fit_the_config_are_refused() -> None:
    tensors, forms = _tensors(), _forms()
    check_tensors(Path("w"), tensors, forms)
    one = TensorForm((1,), torch.float32)
    for wanted, expected in (
        ({**forms, "d": one}, "lacks d"),
        ({"a": forms["a"], "b": forms["b"]}, "has an unknown c"),
        ({**forms, "a": one}, r"has a as torch.float32 \[4\] instead of torch.float32 \[1\]"),
        ({**forms, "a": TensorForm((4,), torch.int8)}, r"has a as torch.float32 \[4\] instead of torch.int8 \[4\]"),
    ):
        with pytest.raises(KvferryError, match=expected):
            check_tensors(Path("w"), tensors, wanted)
