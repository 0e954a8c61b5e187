"""What narrower KV costs and gains: tokens in a pool, perplexity of a text, and how often the next token is the same.

The text is given token by token, in chunks, through the paged pool: all K and V, those of a chunk's own tokens too, are
read as the pool has them. Weights and arithmetic are fp32 throughout; the baseline is a pool of fp32.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.common.harness import BenchmarkError, Better, Options, Pair, Report, Result, summarise
from bench.common.small_engines import (
    BLOCK_SIZE,
    add_model_flags,
    chosen_model,
    greedy,
    layout_of,
    run_to_end,
    small_engine,
)
from bench.common.teacher_forced import Foretold, foretell
from bench.common.text import excerpt, text_tokens
from engine.attention.native import best_cpu_attention
from engine.model_runner import Model
from engine.models import load_model
from engine.ops.native_ops import best_cpu_ops
from engine.paged_cache import PagedCache
from engine.prepared_model import PreparedModel
from engine.scheduler import SchedulerConfig
from kv_cache.layout import KVCacheLayout, KVDtype

DTYPES = (KVDtype.BF16, KVDtype.INT8, KVDtype.FP8_E4M3)
BASELINE = KVDtype.FP32
_CHUNK_TOKENS = 64
_POOL_BYTES = 64 << 30  # large beside a block, so that whole blocks do not blur the ratio
_MODEL_SHAPES = {"8b": (32, 8, 128)}  # layers, kv heads and head_dim of models that are not at hand


def capacity_line(name: str, layout: KVCacheLayout) -> Result:
    """Tokens in a pool of 64 GiB, against one of bf16 (and so of fp16). Exact; scales and padding included."""
    tokens, baseline = (
        _POOL_BYTES // each.block_bytes * each.block_size for each in (layout, replace(layout, dtype=KVDtype.BF16))
    )
    ratio = tokens / baseline
    variant = f"{layout.dtype.value}:{name}:block{layout.block_size}"
    return Result("capacity_ratio", variant, tokens, "tokens", "bf16", baseline, ratio, 1, (ratio, ratio))


def report_capacity(model: PreparedModel, report: Report) -> None:
    """Lines of the model and of the shapes of larger ones, at two block sizes."""
    for dtype in (KVDtype.INT8, KVDtype.FP8_E4M3):
        for block_size in (BLOCK_SIZE, 64):
            report.add(capacity_line(model.name, layout_of(model, dtype, block_size)))
            for name, (layers, heads, head_dim) in _MODEL_SHAPES.items():
                report.add(capacity_line(name, KVCacheLayout(name, "0", layers, heads, head_dim, block_size, dtype)))


def windows(model: PreparedModel, count: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Pieces of the text, spread over it evenly; the seed moves them all."""
    tokens = text_tokens(model)
    start = int(torch.randint(len(tokens), (), generator=torch.Generator().manual_seed(seed))) if seed else 0
    return [excerpt(tokens, start + len(tokens) * index // count, num_tokens) for index in range(count)]


def foretold(model: Model, prepared: PreparedModel, texts: Sequence[list[int]], dtype: KVDtype) -> list[Foretold]:
    """Each text by itself, over a pool of this dtype."""
    layout = layout_of(prepared, dtype)
    num_blocks = layout.blocks_for(max(map(len, texts)))
    attention = best_cpu_attention(PagedCache(layout, num_blocks), prepared.shape.attention)
    # Backwards, so that nothing lies where counting up would find it.
    table = range(num_blocks - 1, -1, -1)
    return [foretell(model, attention, text, table, BLOCK_SIZE, _CHUNK_TOKENS) for text in texts]


def generated(
    model: Model, prepared: PreparedModel, prompts: Sequence[list[int]], num_tokens: int, dtype: KVDtype
) -> list[list[int]]:
    """What the engine says after each prompt, greedily, over a pool of this dtype."""
    layout = layout_of(prepared, dtype)
    room = len(prompts) * (max(map(len, prompts)) + num_tokens + 2 * BLOCK_SIZE)
    config = SchedulerConfig(token_budget=256, max_num_seqs=len(prompts), max_waiting=len(prompts))
    sequences = [greedy(f"s{index}", prompt, num_tokens) for index, prompt in enumerate(prompts)]
    run_to_end(small_engine(prepared, model, layout, room, config), sequences)
    return [seq.output_token_ids for seq in sequences]


def perplexity_line(variant: str, texts: Sequence[Foretold], baseline: Sequence[Foretold], seed: int) -> Result:
    """How much the perplexity of all texts together changes. The ratio is taken text by text."""
    pairs = [Pair(ours.perplexity, other.perplexity) for ours, other in zip(texts, baseline, strict=True)]
    line = summarise("perplexity_change", variant, "share", Better.LOWER, BASELINE.value, pairs, seed)
    surprise, before = (torch.cat([each.surprise for each in side]).mean() for side in (texts, baseline))
    return replace(line, value=math.expm1(float(surprise - before)), baseline_value=0.0)


def equal_share_line(
    variant: str, found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], seed: int
) -> Result:
    """The share of places with the same token as the baseline has there. One pair a text."""
    shares = [
        sum(a == b for a, b in zip(ours, other, strict=True)) / len(other)
        for ours, other in zip(found, expected, strict=True)
    ]
    # A share can be 0, and a ratio cannot be of it: the least that counts is less than one token.
    pairs = [Pair(max(share, 1e-6), 1.0) for share in shares]
    line = summarise("equal_token_share", variant, "share", Better.HIGHER, BASELINE.value, pairs, seed)
    return replace(line, value=sum(shares) / len(shares), baseline_value=1.0)


def check_repeats(before: Sequence[Foretold], after: Sequence[Foretold]) -> None:
    """Raises BenchmarkError unless a text that is computed again gives the same."""
    if not all(torch.equal(a.surprise, b.surprise) for a, b in zip(before, after, strict=True)):
        raise BenchmarkError("the same text over the same pool gave another perplexity")


def measure(prepared: PreparedModel, report: Report, options: Options) -> None:
    """All lines that a model must compute for."""
    model = load_model(prepared, best_cpu_ops())
    num_texts, num_tokens = options.pick((5, 128), (8, 512), (16, 512))
    new_tokens = options.pick(16, 64, 128)
    texts = windows(prepared, num_texts, num_tokens, options.seed)
    prompts = [text[: num_tokens // 4] for text in texts]
    exact = foretold(model, prepared, texts, BASELINE)
    check_repeats(exact[:1], foretold(model, prepared, texts[:1], BASELINE))
    said = generated(model, prepared, prompts, new_tokens, BASELINE)
    whole = math.exp(float(torch.cat([each.surprise for each in exact]).mean()))
    report.note(
        f"{prepared.name}: perplexity {whole:.3f} with {BASELINE.value} KV over {num_texts} texts of {num_tokens} "
        f"tokens; {new_tokens} tokens generated after {num_tokens // 4} of each"
    )
    for dtype in DTYPES:
        ours = foretold(model, prepared, texts, dtype)
        variant = f"{dtype.value}:{prepared.name}"
        report.add(perplexity_line(variant, ours, exact, options.seed))
        places, right = ([each.likeliest.tolist() for each in side] for side in (ours, exact))
        report.add(equal_share_line(f"{variant}:forced", places, right, options.seed))
        free = generated(model, prepared, prompts, new_tokens, dtype)
        report.add(equal_share_line(f"{variant}:generated", free, said, options.seed))


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when the same text gives two answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_flags(parser)
    options, given = Options.parse(parser, argv)
    torch.set_num_threads(1)
    with Report(options) as report:
        prepared = chosen_model(given, report)
        report_capacity(prepared, report)
        measure(prepared, report, options)


if __name__ == "__main__":
    main()
