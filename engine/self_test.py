"""A few tokens computed before anybody relies on the engine: weights, kernels, pool and sampler work here, together.

It runs in an engine of its own on the same runner, which is thrown away afterwards: no block, no count and no cached
prefix of it is left. What it writes into the pool is zeroed as ever when a block is opened.
"""

from engine.engine import Engine
from engine.model_runner import Runner
from engine.prefix_holds import PoolCopies
from engine.scheduler import SchedulerConfig
from engine.sequence import SamplingParams, Sequence
from engine.wire import DoorLimits
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import BlockManager
from kv_cache.layout import KVCacheLayout
from runtime.errors import ErrorCode, KvferryError

# Together fewer than the smallest block has, so that one block is enough and none is ever full.
_PROMPT_TOKENS = 4
_NEW_TOKENS = 2
_MOST_STEPS = 16


def self_test(runner: Runner, layout: KVCacheLayout, limits: DoorLimits, copies: PoolCopies | None = None) -> None:
    """Compute a fixed prompt, its first token, and one token more: a step of prefill and one of decode.

    `copies` as for `Engine`. By the thread that made the runner, before another engine uses it. Raises KvferryError
    (INTERNAL) with what went wrong, whatever it was.
    """
    config = SchedulerConfig(token_budget=_PROMPT_TOKENS, max_num_seqs=1, max_waiting=1, prefill_only=False)
    engine = Engine(config, BlockManager(1, layout.block_size), BlockHasher.for_layout(layout), runner, copies)
    seq = Sequence(
        "self-test",
        [index % limits.vocab_size for index in range(_PROMPT_TOKENS)],
        SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True),
        max_context_tokens=_PROMPT_TOKENS + _NEW_TOKENS,
    )
    try:
        engine.add(seq)
        _run(engine)
        engine.check_integrity()
    except KvferryError as error:
        raise _failed(error.message) from error
    except Exception as error:
        raise _failed(f"{type(error).__name__}: {error}") from error
    if len(seq.samples) != _NEW_TOKENS or not all(0 <= one.token_id < limits.vocab_size for one in seq.samples):
        raise _failed(f"it gave the tokens {[one.token_id for one in seq.samples]}")


def _run(engine: Engine) -> None:
    """Raises whatever a step raises, and the error that it had for the sequence."""
    for _ in range(_MOST_STEPS):
        schedule = engine.schedule()
        if not schedule:
            return
        for output in engine.publish(schedule, engine.run(schedule)):
            if output.error is not None:
                raise output.error


def _failed(what: str) -> KvferryError:
    return KvferryError(ErrorCode.INTERNAL, f"the self-test of the engine failed: {what}")
