"""What travels to the other ranks of a worker: batches as numbers, setups as JSON."""

import socket
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import Batch, BatchRow, build_batch
from engine.options import EngineOptions
from engine.parallel.batch_wire import pack_batch, unpack_batch
from engine.parallel.channel import (
    FollowerAnswer,
    FollowerSetup,
    PoolFile,
    decode_answer,
    decode_setup,
    encode,
    receive_frame,
    send_frame,
)


def fields(batch: Batch) -> dict[str, object]:
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__}


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 1)), min_size=1, max_size=6))
def test_a_batch_arrives_as_it_was(rows: list[tuple[int, int, int]]) -> None:
    batch = build_batch(
        [BatchRow(list(range(7, 7 + count)), start, list(range(i, i + 8)), wanted)
         for i, (start, count, wanted) in enumerate(rows)], 8,
    )  # fmt: skip
    arrived = unpack_batch(bytearray(pack_batch(batch)))
    for name, value in fields(batch).items():
        got = getattr(arrived, name)
        assert type(got) is type(value), name
        if isinstance(value, Tensor):
            assert got.dtype == value.dtype, name
            assert torch.equal(got, value), name
        else:
            assert got == value, name


def test_frames_keep_their_borders_and_the_end_is_none() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            send_frame(ours, b"")
            send_frame(ours, b"abc" * 1000)
        assert receive_frame(theirs) == b""
        assert receive_frame(theirs) == b"abc" * 1000
        assert receive_frame(theirs) is None


def test_a_frame_that_breaks_off_is_no_frame() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(b"\x05\0\0\0\0\0\0\0ab")
        assert receive_frame(theirs) is None


def test_a_setup_and_its_answer_arrive_as_they_were() -> None:
    options = EngineOptions(model="m", cache_dir=Path("/c"), num_blocks=3, tensor_parallel=2)
    setup = FollowerSetup(1, 2, 4000, 17, PoolFile(5, 4096), 8192, options, "info")
    assert decode_setup(encode(setup)) == setup
    assert decode_answer(encode(FollowerAnswer("no"))) == FollowerAnswer("no")
