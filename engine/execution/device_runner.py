"""Runs schedules on a device that computes by itself: queue, prepare what comes next, wait for the tokens.

    launch(schedule)         the batch goes to the device; forward, logits and sampling are queued there
    prepare_next(schedule)   the decode step that probably follows is laid out and loaded, without its token ids
    results()                the one wait: sampled ids, and logits of rows that only the host can sample

When the next schedule is the one expected, its token ids are taken from where the sampler left them on the device, and
nothing has to be copied before it is queued. A batch that is only decoding is a captured graph; any other is queued
operation by operation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import Batch, build_batch
from engine.execution.device import Device, Event
from engine.execution.graphs import GraphPool
from engine.execution.layer_events import LayerEvents
from engine.execution.next_step import NextStep, expect_next
from engine.execution.sampling import DeviceSampler, needs_host
from engine.execution.staging import Fetch, Staging
from engine.model_runner import LayerHook, Model, RowResult, batch_row, no_hook, sample_row, verify
from engine.prompt_scoring import score_prompts
from engine.sampler import Sampler, SampleRow
from engine.scheduler import Schedule, ScheduledSequence
from engine.sequence import TokenSample
from runtime.errors import KvferryError


class LayerCopies(Protocol):
    """Who brings a layer's new KV to where `on_layer` promises it to be. See PoolMirror."""

    def layer_to_host(self, block_ids: Sequence[int], layer: int) -> Event:
        """Queue it; the event says when it is there."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DeviceParts:
    """What a DeviceRunner works with. `graphs` None: every step is queued operation by operation. `sampler` None:
    every row is sampled on the host. `copies` None: `on_layer` wants nothing but the pool itself."""

    device: Device
    staging: Staging
    graphs: GraphPool | None = None
    sampler: DeviceSampler | None = None
    copies: LayerCopies | None = None


class InFlight:
    """A step that was queued. `results` must be called, once, before the next launch; owner thread only."""

    def __init__(self, parts: DeviceParts, host_sampler: Sampler, layers: LayerEvents | None) -> None:
        self._device = parts.device
        self._host_sampler = host_sampler
        self._layers = layers
        self._logits: Tensor | None = None
        self._sampled: list[ScheduledSequence] = []
        self._rows: list[SampleRow] = []
        self._fetch: Fetch | None = None
        self.failed: dict[str, KvferryError] = {}  # sequences whose prompt cannot be scored

    def sample(self, logits: Tensor, sampled: list[ScheduledSequence], sampler: DeviceSampler | None) -> Tensor | None:
        """Queue the sampling behind `sampled` of logits [R, vocab]; tokens int64 [R] on the device if they are the
        final ones, all of them."""
        self._logits, self._sampled = logits, sampled
        if len(sampled) < len(logits):
            return None
        self._rows = [sample_row(item.seq) for item in sampled]
        on_host = [needs_host(row) for row in self._rows]
        if sampler is None or all(on_host):
            return None
        # Rows for the host are sampled too, in vain: that costs less than taking them out.
        token_ids = sampler.sample(logits, self._rows)
        self._fetch = Fetch(self._device, token_ids)
        return None if any(on_host) else token_ids

    def results(self) -> dict[str, RowResult]:
        """See ModelRunner.run. Tells of layers first, as their hook may be waited for elsewhere."""
        if self._layers is not None:
            self._layers.finish()
        return {**self._sampled_results(), **self.failed}

    def _sampled_results(self) -> dict[str, RowResult]:
        logits = self._logits
        if logits is None:
            return {}
        if len(self._sampled) < len(logits):
            return verify(self._host_sampler, self._to_host(logits), self._sampled)
        token_ids = [-1] * len(self._rows) if self._fetch is None else self._fetch.wait().tolist()
        results: list[TokenSample | KvferryError] = [TokenSample(token_id) for token_id in token_ids]
        # The host says what is wrong with a row that the device could not sample.
        rest = [i for i, row in enumerate(self._rows) if token_ids[i] < 0 or needs_host(row)]
        if rest:
            values = self._to_host(logits, rest)
            for i, result in zip(rest, self._host_sampler.sample(values, [self._rows[i] for i in rest]), strict=True):
                results[i] = result
        return {
            item.seq.seq_id: result if isinstance(result, KvferryError) else (result,)
            for item, result in zip(self._sampled, results, strict=True)
        }

    def _to_host(self, logits: Tensor, rows: list[int] | None = None) -> Tensor:
        with self._device.queueing():
            return logits.cpu() if rows is None or len(rows) == len(logits) else logits[rows].cpu()


class DeviceRunner:
    """A Runner. Owner thread only."""

    def __init__(
        self, model: Model, attention: AttentionBackend, parts: DeviceParts, sampler: Sampler, block_size: int
    ) -> None:
        """`model` and `attention` compute on the device, `sampler` on the host."""
        self._model = model
        self._attention = attention
        self._parts = parts
        self._sampler = sampler
        self._block_size = block_size
        self._next: NextStep | None = None
        # Where that step is on the device already: queues it, with these token ids.
        self._queue_next: Callable[[Tensor], Tensor | None] | None = None
        self._token_ids: Tensor | None = None  # sampled by the last step, on the device
        self._last: Batch | None = None
        self.prepared_steps = 0  # laid out ahead
        self.steps_as_prepared = 0  # of these: were the step that followed

    @property
    def has_graphs(self) -> bool:
        """Whether any step is a captured graph."""
        return self._parts.graphs is not None

    def use_graphs(self, graphs: GraphPool) -> None:
        """From now on, steps that fit are these. Between steps only."""
        self._parts = replace(self._parts, graphs=graphs)

    def run(self, schedule: Schedule, on_layer: LayerHook | None = None) -> dict[str, RowResult]:
        """See ModelRunner.run; but `on_layer(l)` is called once the KV of layer l can be read on the host, which may be
        after the layer's attention, in order, and before this returns."""
        in_flight = self.launch(schedule, on_layer)
        # Who wants to hear of layers computes prompts: no decode step follows there.
        if on_layer is None:
            self.prepare_next(schedule)
        return in_flight.results()

    @torch.inference_mode()
    def launch(self, schedule: Schedule, on_layer: LayerHook | None = None) -> InFlight:
        """Queue a schedule that is not empty. The last step's `results` must have been published before."""
        with self._parts.device.queueing():
            expected, queue_next, token_ids = self._next, self._queue_next, self._token_ids
            self._next = self._queue_next = self._token_ids = None
            layers = None if on_layer is None else LayerEvents(self._mark(schedule), on_layer)
            if expected is not None and not expected.matches(schedule):
                expected = None
            self.steps_as_prepared += expected is not None
            in_flight = InFlight(self._parts, self._sampler, layers)
            if expected is None:
                batch = build_batch([batch_row(item) for item in schedule.items], self._block_size)
                logits = self._queue(batch, layers, schedule, in_flight)
            elif queue_next is None or token_ids is None or layers is not None:
                batch = expected.filled(schedule, self._block_size)
                logits = self._queue(batch, layers, schedule, in_flight)
            else:
                batch = expected.batch
                logits = queue_next(token_ids)
            if logits is not None:
                sampled = [schedule.items[i] for i in dict.fromkeys(batch.logits_order)]
                self._token_ids = in_flight.sample(logits, sampled, self._parts.sampler)
            self._last = batch
            return in_flight

    @torch.inference_mode()
    def prepare_next(self, schedule: Schedule) -> None:
        """Lay out what probably follows the step that was launched last, with this schedule; call it before the
        schedule is published."""
        if self._last is None:
            return
        self._next = expect_next(schedule, self._block_size, self._last.logits_order)
        if self._next is None:
            return
        self.prepared_steps += 1
        if self._next.is_complete and self._next.keeps_order and self._token_ids is not None:
            with self._parts.device.queueing():
                self._queue_next = self._load(self._next.batch)

    def _load(self, batch: Batch) -> Callable[[Tensor], Tensor | None]:
        """Put a batch on the device. Returns what queues it, once its token ids are known there."""
        graphs = self._parts.graphs
        if graphs is None or not graphs.fits(batch):
            on_device = self._parts.staging.upload_batch(batch)
            return lambda token_ids: self._logits(
                self._model.forward(replace(on_device, token_ids=token_ids), self._attention, no_hook), on_device
            )
        graphs.load(batch)
        return lambda token_ids: graphs.replay(batch, token_ids)

    def _queue(
        self, batch: Batch, layers: LayerEvents | None, schedule: Schedule, in_flight: InFlight
    ) -> Tensor | None:
        """Logits, if any are wanted, of a batch on the host. Prompts are scored here: the host waits for each slice."""
        graphs = self._parts.graphs
        if layers is None and graphs is not None and graphs.fits(batch):
            graphs.load(batch)
            return graphs.replay(batch)
        on_device = self._parts.staging.upload_batch(batch)
        hidden = self._model.forward(on_device, self._attention, no_hook if layers is None else layers.stored)
        if len(batch.scored_rows):
            in_flight.failed = score_prompts(self._model.logits, hidden, on_device, schedule.items)
        return self._logits(hidden, on_device)

    def _mark(self, schedule: Schedule) -> Callable[[int], Event]:
        """What LayerEvents asks when a layer is queued."""
        device, copies, size = self._parts.device, self._parts.copies, self._block_size
        if copies is None:
            return lambda layer: device.record()
        written = {
            block_id
            for item in schedule.items
            for block_id in item.block_table[item.start // size : -(-item.end // size)]
        }
        return lambda layer: copies.layer_to_host(sorted(written), layer)

    def _logits(self, hidden: Tensor, batch: Batch) -> Tensor | None:
        if not batch.logits_order:
            return None
        if len(batch.logits_order) < len(hidden):
            hidden = hidden[batch.logits_rows]
        return self._model.logits(hidden)
