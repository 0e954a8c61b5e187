"""One process of kvferry's engine against other engines on the same CPU: prefill, decoding, serving, start and memory.

Same checkpoint, fp32 weights and KV, the same cores and threads, the same prompts in turn. kvferry with weights stored
in bf16 (arithmetic and KV still fp32) is a variant of its own. Each peer runs in an environment of its own, kept in
.peers/NAME or given by --peer-env:

    python3.11 -m venv .peers/llama.cpp && .peers/llama.cpp/bin/pip install xllamacpp
    python3.11 -m venv .peers/transformers && .peers/transformers/bin/pip install torch transformers accelerate psutil

transformers falls back to the interpreter of the benchmark; vLLM takes more, see docs/benchmarks.md. A peer that
cannot be started is reported as missing, and the run goes on without it.
"""

import argparse
import compileall
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenizers import Tokenizer

from bench.common.exported_model import export
from bench.common.harness import (
    MIN_PAIRS,
    BenchmarkError,
    Better,
    Options,
    Pair,
    Report,
    Result,
    bootstrap_interval,
    pair_ratio,
    summarise,
)
from bench.common.origin import ROOT
from bench.common.peer_loads import Load, LoadKind, equal_shares, geomean_vs_best, long_loads, normal_loads, quick_loads
from bench.common.peer_process import PeerError, PeerProcess
from bench.peers.protocol import Setup
from engine.options import DEFAULT_CACHE_DIR
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel
from engine.weight_dtypes import WeightDtype

ADAPTERS = ROOT / "bench" / "peers"
# What kvferry's adapter imports of this tree.
PACKAGES = ("bench", "engine", "kv_cache", "kvferry", "proto", "runtime")
PEERS = {"vllm": "vllm_peer.py", "llama.cpp": "llama_cpp_peer.py", "transformers": "transformers_peer.py"}
TINY_MODEL = str(ROOT / "tests" / "data" / "tiny-real")
MODEL = "smollm2-135m-instruct"
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a ferry that carried",
    "def fibonacci(n):\n    if n < 2:",
    "Water boils at a temperature of",
)
TEXT_TOKENS = 24
# Less than this share of equal tokens is no near tie: it computes another model.
LEAST_EQUAL_SHARE = 0.3
_SETTLE_S = 0.25  # For the threads of the engine before to fall asleep.


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine that takes part: how to start it and what to load. `suffix` tells variants of kvferry apart."""

    name: str
    command: tuple[str, ...]
    setup: Setup
    suffix: str = ""


class Contest:
    """kvferry (its fp32 form first) and the peers that run. One thread."""

    def __init__(
        self,
        ours: list[Contender],
        peers: list[Contender],
        report: Report,
        options: Options,
        settle_s: float = _SETTLE_S,
    ) -> None:
        """`settle_s`: pause before each sample."""
        self._ours = ours
        self._peers = peers
        self._report = report
        self._options = options
        self._settle_s = settle_s
        self._running: dict[str, PeerProcess] = {}
        self._rows: dict[str, list[dict[str, list[float]]]] = {one.name: [] for one in ours}

    def start(self, num_rounds: int, timeout_s: float) -> None:
        """Start everything `num_rounds` times, the last time for good; lines for the start and the memory."""
        starts: dict[str, list[float]] = {}
        memory: dict[str, list[float]] = {}
        for number in range(num_rounds):
            for one in (*self._ours, *self._peers):
                try:
                    process = self._start_one(one, timeout_s, starts, memory)
                except PeerError as error:
                    self._lose(one.name, error)
                    continue
                if number == num_rounds - 1:
                    self._running[one.name] = process
                else:
                    process.close()
        self._add("startup_s", "first-token", "s", Better.LOWER, starts)
        self._add("rss_mb", "idle", "MB", Better.LOWER, memory)

    def compare_outputs(self, prompts: list[list[int]]) -> None:
        """Greedy texts of all against kvferry's; one that gives quite other ones computes something else and is out."""
        texts: dict[str, list[list[int]]] = {}
        for name in list(self._running):
            try:
                texts[name] = self._running[name].generate(prompts, TEXT_TOKENS).tokens
            except PeerError as error:
                self._lose(name, error)
        reference = texts.pop(self._ours[0].name)
        for name, tokens in texts.items():
            shares = equal_shares(reference, tokens)
            share = sum(shares) / len(shares)
            self._report.add(
                Result(
                    metric="equal_token_share",
                    variant=f"{len(prompts)}x{TEXT_TOKENS}",
                    value=share,
                    unit="share",
                    baseline=name,
                    baseline_value=1.0,
                    ratio=share,
                    n=len(shares),
                    ci95=bootstrap_interval(shares, self._options.seed),
                )
            )
            if share < LEAST_EQUAL_SHARE:
                self._lose(name, PeerError(f"it computes something else: {share:.0%} of its tokens are equal"))

    def measure(self, load: Load, vocab_size: int, num_rounds: int) -> None:
        """Samples of all in turn, and a line for each peer and form of kvferry."""
        samples: dict[str, list[float]] = {}
        for number in range(num_rounds):
            prompts = load.prompts(vocab_size, self._options.seed, number)
            for name in list(self._running):
                try:
                    samples.setdefault(name, []).append(self._sample(name, load, prompts))
                except PeerError as error:
                    self._lose(name, error)
                except BenchmarkError as error:
                    self._report.note(f"{load.variant}: no number for {name}: {error}")
        self._add(load.kind.value, load.variant, "tok/s", Better.HIGHER, samples)

    def conclude(self) -> None:
        """The last lines, the one of the fp32 form at the very end."""
        for one in reversed(self._ours):
            rows = self._rows[one.name]
            if not rows:
                self._report.note(f"{one.name}: no peer to compare with")
                continue
            mean, ci95 = geomean_vs_best(rows, self._options.seed)
            variant = f"{len(rows)}rows{one.suffix}"
            self._report.add(
                Result("geomean_vs_best_peer", variant, mean, "ratio", "best peer", 1.0, mean, len(rows), ci95)
            )

    def close(self) -> None:
        """End all processes."""
        for process in self._running.values():
            process.close()
        self._running.clear()

    def _start_one(
        self, one: Contender, timeout_s: float, starts: dict[str, list[float]], memory: dict[str, list[float]]
    ) -> PeerProcess:
        process = PeerProcess(one.name, one.command, one.setup.threads, timeout_s)
        try:
            version = process.load(one.setup)
            starts.setdefault(one.name, []).append(process.first_token_s())
            memory.setdefault(one.name, []).append(process.memory_mb())
        except BaseException:
            process.close()
            raise
        self._report.note(f"{one.name} {version} is up after {starts[one.name][-1]:.1f} s")
        return process

    def _sample(self, name: str, load: Load, prompts: list[list[int]]) -> float:
        process = self._running[name]
        if load.kind is LoadKind.DECODE:
            process.generate(prompts, 1)
        time.sleep(self._settle_s)
        return load.rate(process.generate(prompts, load.max_tokens))

    def _lose(self, name: str, error: PeerError) -> None:
        """A peer is out from now on. kvferry must not fail: raises BenchmarkError if it does."""
        process = self._running.pop(name, None)
        if process is not None:
            process.close()
        if name in self._rows:
            raise BenchmarkError(f"{name} failed: {error}") from error
        self._peers = [peer for peer in self._peers if peer.name != name]
        self._report.missing(name, str(error))

    def _add(self, metric: str, variant: str, unit: str, better: Better, samples: dict[str, list[float]]) -> None:
        for one in self._ours:
            mine = samples.get(one.name, [])
            ratios: dict[str, list[float]] = {}
            for peer in (peer.name for peer in self._peers):
                if not 0 < len(samples.get(peer, ())) == len(mine):
                    continue  # A sample is missing, so there are no pairs.
                pairs = [Pair(a, b) for a, b in zip(mine, samples[peer], strict=True)]
                self._report.add(summarise(metric, variant + one.suffix, unit, better, peer, pairs, self._options.seed))
                ratios[peer] = [pair_ratio(pair, better) for pair in pairs]
            if ratios:
                self._rows[one.name].append(ratios)


def interpreters(given: list[str], wanted: list[str]) -> dict[str, str]:
    """The interpreter for each peer that has one. Raises ValueError for a --peer-env that is not NAME=PYTHON."""
    found = {name: str(path) for name in PEERS if (path := ROOT / ".peers" / name / "bin" / "python").exists()}
    found = {"transformers": sys.executable, **found}
    for entry in given:
        name, equals, python = entry.partition("=")
        if name not in PEERS or not equals or not python:
            raise ValueError(f"--peer-env takes NAME=PYTHON with a NAME of {', '.join(PEERS)}, not {entry}")
        found[name] = python
    return {name: python for name, python in found.items() if name in wanted}


def setups(loads: list[Load], model: PreparedModel, threads: int) -> Setup:
    """What is the same for all; `model` is kvferry's form of it."""
    context = max(TEXT_TOKENS * 4, *(load.context_tokens for load in loads))
    return Setup(
        model=str(model.path),
        threads=threads,
        max_seqs=max(load.requests for load in loads),
        max_context=min(context, model.config.max_context_tokens),
        pool_tokens=max(load.pool_tokens for load in loads),
    )


def compile_packages() -> None:
    """To byte code, as pip does with what it installs, the peers among it. Without, a start would compile this tree,
    each time where Python is told to leave no byte code behind."""
    for name in PACKAGES:
        compileall.compile_dir(ROOT / name, quiet=2)


def parse(argv: list[str] | None) -> tuple[Options, argparse.Namespace]:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"a Llama; default: {MODEL}, with --quick one of a few layers")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="where prepared models are kept")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each, on as many CPUs")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="which take part")
    parser.add_argument("--peer-env", action="append", default=[], metavar="NAME=PYTHON", help="may be repeated")
    parser.add_argument("--no-bf16", action="store_true", help="leave out kvferry with weights stored in bf16")
    parser.add_argument("--rounds", type=int, default=MIN_PAIRS, help="pairs a row")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose 'metric variant' it finds")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="longest wait for one answer of an engine")
    options, given = Options.parse(parser, argv)
    if given.rounds < MIN_PAIRS:
        parser.error(f"--rounds must be at least {MIN_PAIRS}")
    try:
        given.interpreters = interpreters(given.peer_env, given.peers)
    except ValueError as error:
        parser.error(str(error))
    return options, given


def contenders(given: argparse.Namespace, loads: list[Load], source: str) -> tuple[list[Contender], list[Contender]]:
    """kvferry's forms, and the peers that have an interpreter. Prepares and exports the model, once."""
    cache_dir = given.cache_dir.expanduser()
    dtypes = [WeightDtype.FP32] if given.no_bf16 else [WeightDtype.FP32, WeightDtype.BF16]
    models = [prepare_model(source, cache_dir, lambda stage, fraction: None, dtype) for dtype in dtypes]
    exported = export(models[0], cache_dir)
    ours = [
        Contender(
            f"kvferry-{model.weight_dtype.value}",
            (sys.executable, str(ADAPTERS / "kvferry_peer.py")),
            setups(loads, model, given.threads),
            "" if model is models[0] else f":{model.weight_dtype.value}-weights",
        )
        for model in models
    ]
    peers = [
        Contender(
            name,
            (python, str(ADAPTERS / PEERS[name])),
            Setup.from_json(
                {
                    **ours[0].setup.to_json(),
                    "model": str(exported.gguf if name == "llama.cpp" else exported.hugging_face),
                }
            ),
        )
        for name, python in given.interpreters.items()
    ]
    return ours, peers


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when kvferry itself fails."""
    options, given = parse(argv)
    compile_packages()
    cpus = sorted(os.sched_getaffinity(0))
    loads = options.pick(quick_loads(), normal_loads(), long_loads())
    wanted = [load for load in loads if re.search(given.rows, f"{load.kind.value} {load.variant}")]
    source = given.model or options.pick(TINY_MODEL, MODEL, MODEL)
    ours, peers = contenders(given, wanted or loads[:1], source)
    model = prepare_model(ours[0].setup.model, given.cache_dir.expanduser(), lambda stage, fraction: None)
    tokenizer = Tokenizer.from_file(str(model.tokenizer_path))
    # Inherited by all that is started from here on.
    os.sched_setaffinity(0, cpus[: given.threads])
    with Report(options) as report:
        contest = Contest(ours, peers, report, options)
        for name in given.peers:
            if name not in given.interpreters:
                report.missing(name, f"it has no environment: --peer-env {name}=PYTHON, or .peers/{name}")
        try:
            contest.start(options.pick(1, 1, MIN_PAIRS), given.timeout_s)
            contest.compare_outputs([tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS])
            for load in wanted:
                contest.measure(load, model.config.vocab_size, given.rounds)
        finally:
            contest.close()
        contest.conclude()


if __name__ == "__main__":
    main()
