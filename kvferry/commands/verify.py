"""`kvferry verify`: is the cluster's text the same as one process's and as `transformers.generate`'s?"""

import argparse
import asyncio
from dataclasses import asdict
from pathlib import Path

from kvferry.commands.base import Command, absolute_path
from kvferry.commands.up import ProgressLines
from kvferry.console import Console
from kvferry.model_prep import DEFAULT_CACHE_DIR, prepare_model
from kvferry.references import run_in_process, split_sizes
from kvferry.verify import Row, Variant, VerifyOptions, prompt_lengths, read_prompts, standard_variants, verify

_HEADER = ("cluster", "sampling", "cache", "equal to", "answers", "")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="A directory, a .gguf file, or smollm2-135m-instruct.")
    parser.add_argument("--prompts", required=True, type=absolute_path, metavar="FILE", help="JSON lines, each with a `text`.")  # fmt: skip # noqa: E501
    parser.add_argument("--limit", type=int, metavar="N", help="Use the first N prompts only.")
    parser.add_argument("--max-tokens", type=int, default=24, help="Tokens to compare a prompt. Default: %(default)s.")
    parser.add_argument("--concurrency", type=int, default=8, help="Requests at once. Default: %(default)s.")
    parser.add_argument("--variant", action="append", metavar="TEXT", help="Only variants whose name contains TEXT; repeatable.")  # fmt: skip # noqa: E501
    parser.add_argument("--no-transformers", action="store_true", help="Compare with one process only.")
    parser.add_argument(
        "--cache-dir", type=absolute_path, default=DEFAULT_CACHE_DIR, help="Prepared models. Default: %(default)s."
    )


def _run(arguments: argparse.Namespace, console: Console) -> int:
    return asyncio.run(_verify(arguments, console))


async def _verify(arguments: argparse.Namespace, console: Console) -> int:
    """Returns 0 when every answer that must be equal was, and every receipt proved its hand-off."""
    texts = _prompts(arguments.prompts, arguments.limit)
    model = await prepare_model(arguments.model, arguments.cache_dir, ProgressLines(console).show)
    options = VerifyOptions(
        model=arguments.model,
        model_dir=model.path,
        cache_dir=arguments.cache_dir,
        texts=texts,
        max_tokens=arguments.max_tokens,
        concurrency=arguments.concurrency,
        with_transformers=not arguments.no_transformers,
    )
    sizes = await asyncio.wrap_future(run_in_process(split_sizes, str(model.path)))
    variants = _chosen(standard_variants(prompt_lengths(options), options.max_tokens, sizes), arguments.variant)
    rows: list[Row] = []
    async for row in verify(options, variants, console.complain):
        rows.append(row)
        console.emit({**asdict(row), "good": row.good})
        console.complain("  ".join(_cells(row)))
    console.table([_HEADER, *map(_cells, rows)])
    good = all(row.good for row in rows)
    console.say(
        f"\n{'all equal that must be' if good else 'NOT all equal'}: {len(texts)} prompts, {len(rows)} comparisons"
    )
    return 0 if good else 1


def _prompts(path: Path, limit: int | None) -> tuple[str, ...]:
    try:
        texts = read_prompts(path, limit)
    except OSError as error:
        raise ValueError(f"--prompts: cannot read {path}: {error.strerror}") from error
    if not texts:
        raise ValueError(f"--prompts: {path} holds no prompts")
    return texts


def _chosen(variants: tuple[Variant, ...], wanted: list[str] | None) -> tuple[Variant, ...]:
    chosen = tuple(v for v in variants if not wanted or any(text in v.name for text in wanted))
    if not chosen:
        raise ValueError(f"--variant: there are {', '.join(repr(v.name) for v in variants)}")
    return chosen


def _cells(row: Row) -> tuple[str, ...]:
    return (row.variant, row.sampling, row.cache, row.reference, f"{row.equal}/{row.total}", _verdict(row))


def _verdict(row: Row) -> str:
    parts = list(row.notes)
    if row.lossy:
        parts.append(f"{row.equal_token_share:.1%} of the tokens equal")
        if row.logprob_error_mean is not None:
            parts.append(f"log-probability error mean {row.logprob_error_mean:.2g}, max {row.logprob_error_max:.2g}")
    elif row.equal != row.total:
        parts.append("DIFFERENT")
    return "; ".join(parts)


COMMAND = Command("verify", "Compare the cluster's text with one process's and transformers'.", _add_arguments, _run)
