"""Sizing an engine before its memory is taken."""

import logging
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.build
from engine.attention.interface import AttentionBackend
from engine.attention.native import best_cpu_attention
from engine.build import build_engine, log_load, plan_engine
from engine.ops.interface import Ops
from engine.ops.native_ops import best_cpu_ops
from engine.options import EngineOptions
from engine.paged_cache import PagedCache
from engine.sequence import SamplingParams, Sequence
from tests.support.tiny_checkpoints import make_model, save_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("source"), make_model("llama_gqa"))


def test_the_pool_takes_a_quarter_of_the_memory_unless_told_otherwise(source: Path, tmp_path: Path) -> None:
    options = EngineOptions(model=str(source), cache_dir=tmp_path)
    plan = plan_engine(options, available_bytes=4_000_000)
    assert 900_000 < plan.pool_bytes <= 1_000_000
    assert plan_engine(options, available_bytes=None).pool_bytes <= 2 * 1024**3


def test_a_pool_that_does_not_fit_the_memory_is_refused_with_both_sizes(source: Path, tmp_path: Path) -> None:
    options = EngineOptions(model=str(source), cache_dir=tmp_path, num_blocks=10_000)
    with pytest.raises(ValueError, match=r"--num-blocks\) needs \d+ MiB of memory, 10 MiB are available"):
        plan_engine(options, available_bytes=10 * 2**20)


def test_a_context_that_the_model_lacks_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit of 256"):
        plan_engine(EngineOptions(model=str(source), cache_dir=tmp_path, max_context_tokens=257), available_bytes=None)


def test_the_door_knows_the_smaller_of_context_and_pool(source: Path, tmp_path: Path) -> None:
    options = EngineOptions(model=str(source), cache_dir=tmp_path, num_blocks=3, block_size=16)
    plan = plan_engine(options, available_bytes=None)
    assert plan.limits.max_context_tokens == 48
    assert plan.facts(options)["max_context_tokens"] == 48


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "fp8_e4m3"])
def test_the_pool_has_the_dtype_that_was_asked_for(source: Path, tmp_path: Path, dtype: Any) -> None:
    options = EngineOptions(model=str(source), cache_dir=tmp_path, kv_cache_dtype=dtype)
    plan = plan_engine(options, available_bytes=1 << 24)
    assert plan.layout.dtype.value == dtype


def test_a_model_is_prepared_in_the_dtype_that_was_asked_for(source: Path, tmp_path: Path) -> None:
    options = EngineOptions(model=str(source), cache_dir=tmp_path)
    narrow = replace(options, weight_dtype="bf16")
    revisions = {plan_engine(each, available_bytes=1 << 24).layout.model_revision for each in (options, narrow)}
    assert len(revisions) == 2


@pytest.mark.parametrize(("weight_dtype", "kv_cache_dtype"), [("int8", "int8"), ("bf16", "bf16"), ("fp32", "fp8_e4m3")])
def test_an_engine_of_narrow_numbers_generates(
    source: Path, tmp_path: Path, weight_dtype: Any, kv_cache_dtype: Any
) -> None:
    options = EngineOptions(
        model=str(source), cache_dir=tmp_path, num_blocks=8, weight_dtype=weight_dtype, kv_cache_dtype=kv_cache_dtype
    )
    plan = plan_engine(options, available_bytes=None)
    running = build_engine(options, plan, memoryview(mmap.mmap(-1, plan.pool_bytes)), prefill_only=False)
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    seq = Sequence("s", list(range(3, 30)), sampling, max_context_tokens=100)
    running.add(seq)
    while running.has_work:
        schedule = running.schedule()
        running.publish(schedule, running.run(schedule))
    assert len(seq.output_token_ids) == 20


def test_the_c_kernels_get_as_many_threads_as_were_asked_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def ops(threads: int) -> Ops:
        given.append(threads)
        return best_cpu_ops(threads)

    def attention(cache: PagedCache, layers: Any, threads: int) -> AttentionBackend:
        given.append(threads)
        return best_cpu_attention(cache, layers, threads)

    monkeypatch.setattr(engine.build, "best_cpu_ops", ops)
    monkeypatch.setattr(engine.build, "best_cpu_attention", attention)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    options = EngineOptions(model=str(source), cache_dir=tmp_path, num_blocks=2, threads=3)
    plan = plan_engine(options, available_bytes=None)
    build_engine(options, plan, memoryview(mmap.mmap(-1, plan.pool_bytes)), prefill_only=False)
    assert given == [3, 3, 3]


def test_an_engine_for_cpus_that_the_machine_lacks_is_refused(source: Path, tmp_path: Path) -> None:
    options = EngineOptions(model=str(source), cache_dir=tmp_path, num_blocks=2, pin_cpus="8191")
    plan = plan_engine(options, available_bytes=None)
    with pytest.raises(ValueError, match="--pin-cpus"):
        build_engine(options, plan, memoryview(mmap.mmap(-1, plan.pool_bytes)), prefill_only=False)


@pytest.mark.parametrize(("field", "value"), [("threads", 0), ("threads", 257), ("pin_cpus", "x")])
def test_senseless_placement_is_refused_by_its_flag(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')}"):
        replace(EngineOptions(model="m"), **{field: value}).validate()


@pytest.mark.parametrize(
    ("device", "ranks", "message"),
    [
        ("gpu", 1, "cpu, cuda or cuda:N"),
        ("cuda:", 1, "cpu, cuda or cuda:N"),
        ("cuda:0", 2, "--tensor-parallel works with --device cpu only"),
    ],
)
def test_a_device_that_cannot_be_is_refused_by_its_flag(device: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(model="m", device=device, tensor_parallel=ranks).validate()


def test_a_device_that_torch_does_not_see_is_refused_before_anything_is_prepared(tmp_path: Path) -> None:
    options = EngineOptions(model=str(tmp_path / "nothing"), cache_dir=tmp_path, device="cuda:99")
    with pytest.raises(ValueError, match="--device cuda:99: torch sees"):
        plan_engine(options, available_bytes=None)


def test_the_log_says_what_computes(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_engine(EngineOptions(model=str(source), cache_dir=tmp_path, num_blocks=2), available_bytes=None)
    with caplog.at_level(logging.INFO):
        log_load("a worker", plan)
    assert "weights fp32" in caplog.text
    assert "computed by" in caplog.text
