"""Small tensors on their way to a device and back."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from engine.batch import Batch, BatchRow, build_batch
from engine.execution.device import DONE, CpuDevice, Event
from engine.execution.staging import Fetch, Staging

TENSORS = [
    torch.arange(5),
    torch.arange(3, dtype=torch.int32),
    torch.empty(0, dtype=torch.int64),
    torch.arange(6, dtype=torch.int32).view(2, 3),
    torch.tensor([0.5], dtype=torch.float64),
]


class WatchedDevice(CpuDevice):
    """Copies, and notes for which of them somebody waited."""

    def __init__(self) -> None:
        super().__init__(reads_host=False)
        self.recorded = 0
        self.waited: list[int] = []

    def record(self) -> Event:
        device, number = self, self.recorded
        self.recorded += 1

        class Noted:
            def done(self) -> bool:
                return False

            def wait(self) -> None:
                device.waited.append(number)

        return Noted()


def test_tensors_are_handed_out_as_they_are_where_the_device_reads_the_host() -> None:
    given = Staging(CpuDevice()).upload(TENSORS)
    assert all(ours is theirs for ours, theirs in zip(given, TENSORS, strict=True))


def test_copies_are_equal_aligned_parts_of_one_buffer_and_outlive_their_sources() -> None:
    sources = [tensor.clone() for tensor in TENSORS]
    copies = Staging(CpuDevice(reads_host=False)).upload(sources)
    for source in sources:
        source.zero_()
    for copy, tensor in zip(copies, TENSORS, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    assert all(copy.storage_offset() * copy.itemsize % 16 == 0 for copy in copies)


def test_later_copies_leave_earlier_ones_alone() -> None:
    staging = Staging(CpuDevice(reads_host=False))
    copies = [staging.upload([torch.full((1 + 1000 * i,), i)])[0] for i in range(8)]
    assert all(bool((copy == i).all()) for i, copy in enumerate(copies))


def test_a_buffer_is_filled_again_only_when_its_last_copy_is_done() -> None:
    device = WatchedDevice()
    staging = Staging(device)
    for _ in range(3):
        staging.upload(TENSORS)
    assert device.waited == []
    for _ in range(3):
        staging.upload(TENSORS)
    assert device.waited == [0, 1, 2]


@pytest.mark.parametrize("reads_host", [True, False])
def test_an_uploaded_batch_is_the_same_batch(reads_host: bool) -> None:
    batch = build_batch([BatchRow([4, 5, 6], 7, [2, 0]), BatchRow([9], 3, [1]), BatchRow([8], 0, [3], 0)], 8)
    uploaded = Staging(CpuDevice(reads_host=reads_host)).upload_batch(batch)
    for field in fields(Batch):
        ours, theirs = getattr(uploaded, field.name), getattr(batch, field.name)
        if isinstance(theirs, Tensor):
            assert torch.equal(ours, theirs)
            assert reads_host or not theirs.numel() or ours.data_ptr() != theirs.data_ptr()
        else:
            assert ours == theirs


@pytest.mark.parametrize("reads_host", [True, False])
def test_what_is_fetched_is_what_the_device_had(reads_host: bool) -> None:
    assert Fetch(CpuDevice(reads_host=reads_host), torch.tensor([3, -1, 7])).wait().tolist() == [3, -1, 7]


def test_fetching_waits_for_the_copy() -> None:
    device = WatchedDevice()
    fetch = Fetch(device, torch.tensor([3]))
    assert device.waited == []
    fetch.wait()
    assert device.waited == [0]
    assert DONE.done()
