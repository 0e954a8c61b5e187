"""Same text for every family with native code: `kvferry verify` over tiny random checkpoints made by transformers.

One line a family: `equal_answer_share`, over the clusters that `kvferry verify` compares (transports, block sizes,
chunks, several processes a worker, guesses ahead), cold and warm, greedy and sampled, against one process and
`transformers.generate`. No time is measured. Anything but 1 ends with exit status 1. Needs the extra `test`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common.harness import BenchmarkError, Options, Report, Result
from tests.support.tiny_checkpoints import make_model
from tests.support.tiny_tokenizers import DATA, TINY_REAL

# One variant for each piece of native code: plain, biases, normed heads, windows, scaled rotation, experts.
FAMILIES = ("llama_gqa", "qwen2", "qwen2_windows", "qwen3", "mistral", "gemma3", "qwen3_moe", "qwen3_moe_mixed")
# All that `kvferry verify` has but its small pool: models this small are done before a pool can be too full.
_VARIANTS = ["block 16", "block 32", "chunks", "tensor parallel"]
# Where random weights give texts that repeat themselves, so that guesses come true.
_REPEATING = ("gemma3", "qwen3_moe")
_TIMEOUT_S = 900.0
_NUM_PROMPTS = 16
_MAX_TOKENS = 48


def main(argv: list[str] | None = None) -> int:
    """Returns 1 when an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this one; repeatable")
    parser.add_argument("--variant", action="append", default=[], help="as of `kvferry verify`; repeatable")
    options, given = Options.parse(parser, argv)
    good = True
    with Report(options) as report, tempfile.TemporaryDirectory() as scratch:
        for family in given.family or options.pick(("gemma3",), FAMILIES, FAMILIES):
            variants = given.variant or options.pick(["block 16, shm"], _VARIANTS, _VARIANTS)
            if family in _REPEATING and not given.variant:
                variants = [*variants, "speculation"]
            equal, total = compare(family, Path(scratch) / family, variants)
            good = good and equal == total
            share = equal / total
            reference = "one process and transformers"
            report.add(
                Result("equal_answer_share", family, share, "share", reference, 1.0, share, total, (share, share))
            )
    return 0 if good else 1


def compare(family: str, directory: Path, variants: list[str]) -> tuple[int, int]:
    """Equal and all answers of the comparisons in which none may differ. Raises BenchmarkError when there are none."""
    model = directory / "model"
    # The prompts go far beyond the windows, which are 13 tokens long.
    tokens = json.loads((TINY_REAL / "config.json").read_text())
    shape = {name: tokens[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    make_model(family, **shape, max_position_embeddings=1024).save_pretrained(model)
    for path in TINY_REAL.glob("tokenizer*"):
        shutil.copy(path, model)
    command = [sys.executable, "-m", "kvferry", "verify", "--json", "--model", str(model)]
    command += ["--prompts", str(DATA / "prompts_short.jsonl"), "--limit", str(_NUM_PROMPTS)]
    command += ["--max-tokens", str(_MAX_TOKENS), "--cache-dir", str(directory / "cache")]
    command += [word for variant in variants for word in ("--variant", variant)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"variant"')]
    exact = [row for row in rows if not row["lossy"]]
    if not exact:
        raise BenchmarkError(f"{family}: kvferry verify compared nothing (exit status {done.returncode})")
    if done.returncode and all(row["good"] for row in exact):
        raise BenchmarkError(f"{family}: kvferry verify broke off (exit status {done.returncode})")
    for row in exact:
        if row["notes"]:
            raise BenchmarkError(f"{family}, {row['variant']}: {'; '.join(row['notes'])}")
    return sum(row["equal"] for row in exact), sum(row["total"] for row in exact)


if __name__ == "__main__":
    sys.exit(main())
