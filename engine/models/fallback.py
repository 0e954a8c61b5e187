"""Models without native code: transformers computes them, with K, V and attention in kvferry's paged pool.

Slower than a native decoder, and as correct as transformers. The tokens of all sequences of a step go through as one
sequence of T tokens, with their positions; only attention knows where one ends and the next begins. K is stored as
transformers rotates it, in another order than a native model's, so their blocks must never meet: the revision of such a
model says so (`engine.fallback_manifest.fallback_revision`).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.attention.torch_paged import TorchAttention
from engine.batch import Batch, BatchRow, build_batch
from engine.model_config import ModelShape, unusable
from engine.models.fallback_probe import probe_shape
from engine.models.transformers_attention import ATTENTION_NAME, Question, answering, import_transformers, quiet
from engine.paged_cache import PagedCache
from engine.weights import summarise
from kv_cache.layout import KVCacheLayout, KVDtype

TOLERANCE = 1e-3
"""Largest difference from transformers' own logits that `load_fallback` accepts, as a share of their standard
deviation. Both compute in fp32 in another order, which is good for about a thousandth of this."""

_CHECK_BLOCK_SIZE = 8
_CHECK_TOKENS = 64  # enough for two blocks and for windows shorter than it


class FallbackModel:
    """A transformers model as an `engine.model_runner.Model`. One thread at a time, under inference_mode."""

    def __init__(self, network: Any, shape: ModelShape) -> None:
        """`network`: a causal language model of transformers in evaluation mode, set to kvferry's attention."""
        self.shape = shape
        self._network = network
        self._keeps_rows = "logits_to_keep" in inspect.signature(type(network).forward).parameters

    def forward(self, batch: Batch, attention: AttentionBackend, on_layer: Callable[[int], None]) -> Tensor:
        """Logits in place of hidden states, [T, vocab]: what a model does behind its last norm is its own affair.

        Only the rows that the batch wants are computed, where the model can leave out others; these are zero.
        """
        step = _Step(self.shape, batch, attention, on_layer)
        wanted = torch.cat((batch.scored_rows, batch.logits_rows)) if len(batch.scored_rows) else batch.logits_rows
        rows = {"logits_to_keep": wanted} if self._keeps_rows else {}
        with answering(step):
            logits: Tensor = self._network(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **rows
            ).logits[0]
        if step.layer != self.shape.num_layers:
            raise RuntimeError(f"{step.layer} of {self.shape.num_layers} layers asked for attention")
        if not self._keeps_rows:
            return logits
        # Zeroed by the kernel page by page when touched: rows that nobody reads cost nothing.
        spread = torch.zeros(batch.num_tokens, logits.shape[-1], dtype=torch.float32)
        spread[wanted] = logits.float()
        return spread

    def logits(self, hidden: Tensor) -> Tensor:
        """The same rows: `forward` has finished them."""
        return hidden.float()

    def plain_logits(self, token_ids: Tensor) -> Tensor:
        """Logits [T, vocab] of one sequence by transformers' own attention, without kvferry. For comparisons."""
        with quiet():
            self._network.set_attn_implementation("eager")
        try:
            logits: Tensor = self._network(input_ids=token_ids[None], use_cache=False).logits[0]
        finally:
            with quiet():
                self._network.set_attn_implementation(ATTENTION_NAME)
        return logits.float()


@dataclass(slots=True)
class _Step:
    """Answers from the pool."""

    shape: ModelShape
    batch: Batch
    attention: AttentionBackend
    on_layer: Callable[[int], None]
    layer: int = 0

    def attend(self, question: Question) -> Tensor:
        layer, self.layer = self.layer, self.layer + 1
        if layer >= self.shape.num_layers or question.beyond or question.layer != self.shape.attention[layer]:
            asked = f"{question.layer} and {question.beyond}"
            raise RuntimeError(f"layer {layer} asks for {asked}, unlike when the model was prepared")
        k, v, q = (part[0].transpose(0, 1).contiguous() for part in (question.k, question.v, question.q))
        self.attention.store(layer, k, v, self.batch)
        self.on_layer(layer)
        return self.attention.attend(layer, q, self.batch).view(1, *q.shape)


def load_fallback(directory: Path, shape: ModelShape) -> FallbackModel:
    """Load the checkpoint in `directory` in fp32, each process for itself, and compare it with transformers alone.

    Raises KvferryError when this transformers sees another shape than `shape` (found by `probe_shape`), when weights
    are missing, damaged or too many, or when two short sequences, computed in pieces and side by side over pages, get
    other logits than from transformers by more than TOLERANCE.
    """
    found = probe_shape(directory)
    if found != shape:
        raise unusable(f"{directory} was prepared as {shape}, but the installed transformers makes it {found}")
    transformers = import_transformers()
    try:
        with quiet():
            network, report = transformers.AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=torch.float32,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # it is foreign code: it may raise anything
        raise unusable(f"transformers cannot load {directory}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            names = summarise(sorted(str(name) for name in report[kind]))
            raise unusable(f"{directory} has {kind.replace('_keys', '')} tensors: {names}")
    # Nothing is ever padded here; with a token for it, some models look for it in every step.
    network.config.pad_token_id = None
    model = FallbackModel(network.eval(), shape)
    compare_with_plain(model)
    return model


@torch.inference_mode()
def compare_with_plain(model: FallbackModel) -> None:
    """Raise KvferryError unless logits over pages agree with those of transformers alone. See `load_fallback`."""
    shape = model.shape
    length = min(_CHECK_TOKENS, shape.max_context_tokens)
    draw = torch.Generator().manual_seed(1)
    long, short = (torch.randint(shape.vocab_size, (size,), generator=draw) for size in (length, length // 2))
    layout = KVCacheLayout(
        model_id="check",
        model_revision="check",
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=_CHECK_BLOCK_SIZE,
        dtype=KVDtype.FP32,
    )
    blocks = layout.blocks_for(length)
    attention = TorchAttention(PagedCache(layout, 2 * blocks), shape.attention)

    def paged(*rows: BatchRow) -> Tensor:
        batch = build_batch(rows, _CHECK_BLOCK_SIZE)
        logits = model.forward(batch, attention, lambda layer: None)[batch.logits_rows]
        return logits[[batch.logits_order.index(row) for row in range(len(rows))]]

    def row(tokens: Tensor, start: int, end: int, first_block: int) -> BatchRow:
        return BatchRow(tokens[start:end].tolist(), start, range(first_block, first_block + blocks))

    # A chunk; a second one beside the start of another sequence; a token of each.
    cut = length // 3
    actual = [
        paged(row(long, 0, cut, 0)),
        paged(row(long, cut, length - 1, 0), row(short, 0, len(short) - 1, blocks)),
        paged(row(long, length - 1, length, 0), row(short, len(short) - 1, len(short), blocks)),
    ]
    of_long, of_short = model.plain_logits(long), model.plain_logits(short)
    expected = torch.cat((of_long[[cut - 1, -2]], of_short[-2:-1], of_long[-1:], of_short[-1:]))
    difference = (torch.cat(actual) - expected).abs().max()
    # Written so that NaN does not pass.
    if not difference <= TOLERANCE * expected.std():
        raise unusable(
            f"over kvferry's pages, {shape.family} gets logits that differ from transformers' own by {difference:.2g} "
            f"(they spread by {expected.std():.2g}): its attention cannot be replaced"
        )
