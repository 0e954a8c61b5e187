"""A whole engine around the toy model, on a pool that starts full of NaN."""

import mmap
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import torch

from engine.engine import Engine, SequenceOutput
from engine.model_runner import ModelRunner, Runner
from engine.paged_cache import PagedCache
from engine.prefix_holds import PoolCopies
from engine.sampler import Sampler
from engine.scheduler import SchedulerConfig
from engine.sequence import SamplingParams, Sequence
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import BlockManager
from kv_cache.layout import KVCacheLayout
from tests.support.ledger_model import LedgerModel
from tests.support.toy_model import ToyModel

EOS = 0
MODEL = ToyModel()
PROMPT = [11, 3, 52, 8, 8, 40, 7, 29, 31, 2, 19, 60, 44, 5, 1, 23, 17, 38, 9, 50, 4, 33, 27, 12, 6, 55, 20, 14]


def poisoned_cache(layout: KVCacheLayout, num_blocks: int) -> PagedCache:
    """A pool in which every float that nobody wrote is NaN."""
    buffer = memoryview(mmap.mmap(-1, layout.pool_bytes(num_blocks)))
    buffer[:] = b"\xff" * len(buffer)
    return PagedCache(layout, num_blocks, buffer)


class ToyEngine:
    """`engine` with its parts within reach of a test."""

    def __init__(
        self,
        model: ToyModel | LedgerModel,
        *,
        num_blocks: int,
        block_size: int = 8,
        token_budget: int = 16,
        max_num_seqs: int = 4,
        max_waiting: int = 64,
        prefill_only: bool = False,
        prefix_caching: bool = True,
        speculative_tokens: int = 0,
        make_runner: Callable[[PagedCache], tuple[Runner, PoolCopies | None]] | None = None,
    ) -> None:
        """`make_runner`: gives what computes in place of a ModelRunner, for the pool that hand-offs see, and what
        copies between that and its own."""
        layout = model.layout(block_size)
        self.model = model
        self.cache = poisoned_cache(layout, num_blocks)
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        runner: Runner
        copies: PoolCopies | None = None
        if make_runner is None:
            runner = ModelRunner(model, model.backend(self.cache), Sampler(), block_size)
        else:
            runner, copies = make_runner(self.cache)
        config = SchedulerConfig(
            token_budget, max_num_seqs, max_waiting, prefill_only, speculative_tokens=speculative_tokens
        )
        self.engine = Engine(config, self.blocks, BlockHasher.for_layout(layout), runner, copies)

    def step(self) -> list[SequenceOutput]:
        """Schedule, run, publish, audit; what is free afterwards is poisoned."""
        schedule = self.engine.schedule()
        outputs = self.engine.publish(schedule, self.engine.run(schedule))
        self.engine.check_integrity()
        self.poison(self.blocks._pool.free_list)
        return outputs

    def poison(self, block_ids: SequenceOf[int]) -> None:
        """Fill blocks with NaN."""
        for layer in range(self.cache.layout.num_layers):
            self.cache.k(layer)[list(block_ids)] = torch.nan
            self.cache.v(layer)[list(block_ids)] = torch.nan

    def run_until_idle(self, max_steps: int = 2000) -> list[SequenceOutput]:
        """Step while there is work; a test fails if that takes more than `max_steps`."""
        outputs: list[SequenceOutput] = []
        for _ in range(max_steps):
            if not self.engine.has_work:
                return outputs
            outputs += self.step()
        raise AssertionError(f"not done after {max_steps} steps")


def sequence(
    seq_id: str,
    prompt: Iterable[int],
    *,
    max_tokens: int = 8,
    output: SequenceOf[int] = (),
    temperature: float = 0.0,
    max_context_tokens: int = 400,
    cache_salt: bytes = b"",
    sampling: SamplingParams | None = None,
) -> Sequence:
    """A sequence that stops at EOS; greedy unless told otherwise."""
    return Sequence(
        seq_id,
        [*prompt, *output],
        sampling or SamplingParams(max_tokens=max_tokens, temperature=temperature),
        max_context_tokens=max_context_tokens,
        num_output_tokens=len(output),
        eos_token_ids=frozenset({EOS}),
        cache_salt=cache_salt,
    )


def assert_greedy_text(model: ToyModel, seq: Sequence) -> None:
    """Every token this engine sampled is the most likely one by the model without a cache.

    Compared on logits with the text given, so that rounding cannot decide between two equally likely tokens.
    """
    logits = model.dense_logits(seq.token_ids[:-1])[seq.num_tokens - 1 - len(seq.samples) :]
    chosen = logits.gather(1, torch.tensor([[sample.token_id] for sample in seq.samples])).squeeze(1)
    assert torch.all(chosen >= logits.amax(dim=1) - 1e-3), f"{seq.seq_id}: a token is not the most likely one"


def transfer(source: PagedCache, target: PagedCache, source_ids: SequenceOf[int], target_ids: SequenceOf[int]) -> None:
    """Copy whole blocks from one pool to another, as a hand-off does."""
    for layer in range(source.layout.num_layers):
        target.k(layer)[list(target_ids)] = source.k(layer)[list(source_ids)]
        target.v(layer)[list(target_ids)] = source.v(layer)[list(source_ids)]


def solo(prompt: Iterable[int], sampling: SamplingParams) -> list[int]:
    """The text of a roomy engine that serves nothing else."""
    toy = ToyEngine(MODEL, num_blocks=64, token_budget=512)
    seq = sequence("solo", prompt, sampling=sampling)
    toy.engine.add(seq)
    toy.run_until_idle()
    return seq.output_token_ids
