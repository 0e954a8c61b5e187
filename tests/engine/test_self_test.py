"""An engine that cannot compute a token is found out before anybody is told that it is ready."""

import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import engine.build
from engine.build import EnginePlan, build_engine, plan_engine
from engine.model_runner import LayerHook, ModelRunner, RowResult
from engine.options import EngineOptions
from engine.scheduler import Schedule
from engine.self_test import self_test
from engine.sequence import TokenSample
from engine.wire import DoorLimits
from kv_cache.layout import KVCacheLayout, KVDtype
from runtime.errors import ErrorCode, KvferryError, invalid
from tests.support.tiny_checkpoints import make_model, save_checkpoint

LAYOUT = KVCacheLayout(
    model_id="m", model_revision="1", num_layers=1, num_kv_heads=1, head_dim=16, block_size=8, dtype=KVDtype.FP32
)
LIMITS = DoorLimits(vocab_size=3, max_context_tokens=8, eos_token_ids=frozenset({0}))


class ScriptedRunner:
    """Gives the tokens, errors or exceptions of a list, one a step."""

    def __init__(self, *results: RowResult | Exception) -> None:
        self.results = list(results)
        self.chunks: list[int] = []

    def run(self, schedule: Schedule, on_layer: LayerHook | None = None) -> dict[str, RowResult]:
        (item,) = schedule.items
        self.chunks.append(item.num_new_tokens)
        result = self.results.pop(0)
        if isinstance(result, Exception) and not isinstance(result, KvferryError):
            raise result
        return {item.seq.seq_id: result}


def one(token_id: int) -> RowResult:
    return (TokenSample(token_id),)


def test_it_computes_a_prompt_and_then_one_token() -> None:
    runner = ScriptedRunner(one(0), one(2))
    self_test(runner, LAYOUT, LIMITS)
    assert runner.chunks == [4, 1]


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ((RuntimeError("no kernel image"),), "RuntimeError: no kernel image"),
        ((one(1), MemoryError("pool")), "MemoryError: pool"),
        ((invalid("logits", "hold a NaN"),), "logits hold a NaN"),
        ((one(1), one(3)), r"it gave the tokens \[1, 3\]"),
    ],
)
def test_whatever_goes_wrong_is_one_error_that_says_so(results: tuple[RowResult | Exception, ...], words: str) -> None:
    with pytest.raises(KvferryError, match=f"the self-test of the engine failed: {words}") as failure:
        self_test(ScriptedRunner(*results), LAYOUT, LIMITS)
    assert failure.value.code == ErrorCode.INTERNAL


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("source"), make_model("llama_gqa"))


def _plan(source: Path, cache: Path, block_size: int) -> tuple[EngineOptions, EnginePlan]:
    options = EngineOptions(model=str(source), cache_dir=cache, num_blocks=2, block_size=block_size)
    return options, plan_engine(options, available_bytes=None)


@pytest.mark.parametrize("prefill_only", [False, True])
def test_it_leaves_nothing_in_the_engine_that_serves(source: Path, tmp_path: Path, prefill_only: bool) -> None:
    options, plan = _plan(source, tmp_path, 8)
    pool = memoryview(mmap.mmap(-1, plan.pool_bytes))
    built = build_engine(options, plan, pool, prefill_only=prefill_only)
    assert np.frombuffer(pool, np.uint8).any(), "it has computed"
    load = built.load()
    assert (load.steps, load.tokens_generated, load.prompt_tokens_computed) == (0, 0, 0)
    assert (load.blocks.free, load.blocks.cached) == (2, 0)
    assert built.is_idle
    built.check_integrity()


def test_weights_that_give_no_number_do_not_become_an_engine(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, plan = _plan(source, tmp_path, 16)

    class Broken(ModelRunner):
        def run(self, schedule: Schedule, on_layer: LayerHook | None = None) -> dict[str, RowResult]:
            results: Mapping[str, RowResult] = super().run(schedule, on_layer)
            return {name: KvferryError(ErrorCode.INTERNAL, "the logits hold a NaN") for name in results}

    monkeypatch.setattr(engine.build, "ModelRunner", Broken)
    with pytest.raises(KvferryError, match="self-test of the engine failed: the logits hold a NaN"):
        build_engine(options, plan, memoryview(mmap.mmap(-1, plan.pool_bytes)), prefill_only=False)
