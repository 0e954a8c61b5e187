"""The whole engine with real model code, on a pool and a budget that are too small, against transformers."""

import mmap
from pathlib import Path

import pytest
import torch

from engine.build import build_engine, plan_engine
from engine.options import EngineOptions
from engine.sequence import SamplingParams, Sequence
from tests.support.tiny_checkpoints import make_model, save_checkpoint

_PROMPT = [int(token) for token in torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(9))]
_MARGIN = 1e-3  # tokens this close in logits may be told apart by rounding


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("variant", ["llama_gqa", "qwen2", "qwen3"])
def test_preempted_chunked_and_shared_sequences_have_the_text_of_transformers(
    tmp_path: Path, variant: str, block_size: int
) -> None:
    model = make_model(variant)
    source = save_checkpoint(tmp_path / "source", model)
    options = EngineOptions(
        model=str(source),
        cache_dir=tmp_path / "cache",
        block_size=block_size,
        num_blocks=128 // block_size,
        token_budget=13,
        max_num_seqs=5,
    )
    plan = plan_engine(options, available_bytes=None)
    engine = build_engine(options, plan, memoryview(mmap.mmap(-1, plan.pool_bytes)), prefill_only=False)
    lengths = [block_size - 1, block_size, block_size + 1, 2 * block_size, 1, 29, 29]
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    seqs = [Sequence(str(i), _PROMPT[:n], sampling, max_context_tokens=100) for i, n in enumerate(lengths)]
    for seq in seqs:
        engine.add(seq)
    for _ in range(2000):
        if engine.is_idle:
            break
        schedule = engine.schedule()
        engine.publish(schedule, engine.run(schedule))
        engine.check_integrity()
    assert engine.is_idle
    assert engine.load().preemptions > 0
    for seq, length in zip(seqs, lengths, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([seq.token_ids[:-1]])).logits[0, length - 1 :]
        chosen = logits.gather(1, torch.tensor(seq.output_token_ids)[:, None]).squeeze(1)
        assert len(chosen) == 30
        assert torch.all(chosen >= logits.amax(dim=1) - _MARGIN)
