"""Real processes and real models: the cluster's tokens are one process's and `transformers.generate`'s."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.model_prep import prepare_model
from kvferry.verify import Row, Variant, VerifyOptions, prompt_lengths, read_prompts, standard_variants, verify
from tests.support.live_cluster import TINY_REAL, models_beside

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
PROMPTS = Path(__file__).parents[1] / "data" / "prompts_short.jsonl"


def _options(model: str, directory: Path, texts: Sequence[str], max_tokens: int) -> VerifyOptions:
    """With models prepared where the clusters of the other tests have theirs."""
    prepared = asyncio.run(prepare_model(model, models_beside(directory), lambda stage, fraction: None))
    return VerifyOptions(
        model=model, model_dir=prepared.path, cache_dir=directory, texts=tuple(texts), max_tokens=max_tokens
    )


def _verify(options: VerifyOptions, variants: Sequence[Variant]) -> list[Row]:
    async def collect() -> list[Row]:
        return [row async for row in verify(options, variants, lambda line: None)]

    return asyncio.run(collect())


def test_the_demo_model_says_the_same_in_the_cluster_and_in_transformers(tmp_path: Path) -> None:
    # Its size makes this slow, so: few prompts, of one, two and many blocks. The small model has the long ones.
    options = _options("smollm2-135m-instruct", tmp_path, read_prompts(PROMPTS)[:16:5], 12)
    rows = _verify(replace(options, samplings=("greedy",)), [Variant("block 16, shm", "shm")])
    assert [(row.cache, row.reference) for row in rows] == [
        ("-", "transformers"),
        *((cache, reference) for cache in ("cold", "warm") for reference in ("transformers", "one process")),
    ]
    assert [row for row in rows if not row.good] == []


def test_every_third_prompt_says_the_same_with_other_blocks_another_transport_and_too_few_blocks(
    tmp_path: Path,
) -> None:
    options = _options(str(TINY_REAL), tmp_path, read_prompts(PROMPTS)[::3], 40)
    standard = standard_variants(prompt_lengths(options), 40)
    chosen = [v for name in ("block 32, tcp", "small pool") for v in standard if name in v.name]
    # One of the two also guesses ahead: a cluster costs more than the guesses do.
    variants = [replace(v, speculative_tokens=0 if v.must_preempt else 6) for v in chosen]
    assert len(variants) == 2
    rows = _verify(options, variants)
    assert len(rows) == 1 + 2 * (2 * 2 + 2)
    assert [row for row in rows if not row.good] == []


def test_fewer_bits_on_the_wire_are_reported_and_cost_little(tmp_path: Path) -> None:
    options = _options(str(TINY_REAL), tmp_path, read_prompts(PROMPTS)[::9], 16)
    rows = _verify(
        replace(options, with_transformers=False, samplings=("greedy",)),
        [Variant("int8 on the wire, tcp", "tcp", wire_dtype="int8")],
    )
    assert len(rows) == 2
    for row in rows:
        assert row.good, row.notes
        assert row.lossy
        assert row.equal_token_share > 0.5
        # Not zero, or nothing was lost on the wire; and small, or the scales are wrong.
        assert row.logprob_error_mean is not None
        assert 0 < row.logprob_error_mean < 0.25
