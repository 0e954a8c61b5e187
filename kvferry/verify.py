"""Same text, three ways: the cluster, one process, and `transformers.generate`, token for token.

1. Prompts are read and tokenised as the router does.
2. The two references run, once, each in a process of its own.
3. For each variant of the cluster (block sizes, transport, chunking, a pool small enough to preempt, workers of several
   processes, guesses ahead, fewer bits on the wire) a fresh cluster answers all prompts, for each way of sampling
   twice: with a cold and with a warm prefix cache. Each way has a cache salt of its own, so what the first one left
   in the caches is nothing to the next.
4. Every answer is compared with its reference, and every receipt must prove its hand-off. Where the wire loses bits the
   text may differ: then the share of equal tokens and the error of their log probabilities are the result.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kv_transfer.end_facts import INSTALL, has_library
from kv_transfer.options import WireDtype
from kvferry.cluster_spec import ClusterSpec
from kvferry.launchers.launcher import ClusterEvent
from kvferry.launchers.local import LocalCluster
from kvferry.references import (
    SAMPLED_TEMPERATURE,
    SAMPLED_TOP_P,
    ReferenceAnswer,
    ReferenceCase,
    one_process,
    run_in_process,
    transformers_greedy,
)
from kvferry.run_dir import RunDir
from kvferry_rpc import common_pb2, public_pb2, public_pb2_grpc
from router.text.tokenizer import Tokenizer
from runtime.grpc_life import channel

_REQUEST_TIMEOUT_S = 600.0
_FIRST_SEED = 1234


@dataclass(frozen=True, slots=True)
class Variant:
    """One shape of the cluster. `num_blocks` None = a pool in which everything fits; `decode_block_size` None = that of
    the prefill worker; `wire_dtype` "" = the KV travels as it is."""

    name: str
    transport: str
    block_size: int = 16
    token_budget: int = 512
    num_blocks: int | None = None
    must_preempt: bool = False
    decode_block_size: int | None = None
    wire_dtype: WireDtype = ""
    tensor_parallel: int = 1
    speculative_tokens: int = 0


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to compare. `model` is what the user named, `model_dir` its prepared directory; `samplings` are `greedy` and
    `sampled`."""

    model: str
    model_dir: Path
    cache_dir: Path
    texts: tuple[str, ...]
    max_tokens: int = 16
    concurrency: int = 8
    with_transformers: bool = True
    samplings: tuple[str, ...] = ("greedy", "sampled")


@dataclass(slots=True)
class Row:
    """One line of the table: answers of one pass over the prompts, against one reference."""

    variant: str
    sampling: str
    cache: str
    reference: str
    equal: int = 0
    total: int = 0
    notes: list[str] = field(default_factory=list)
    lossy: bool = False
    equal_token_share: float = 1.0
    logprob_error_mean: float | None = None
    logprob_error_max: float | None = None

    @property
    def good(self) -> bool:
        """Whether every answer that must be equal was, and every receipt proved its hand-off."""
        return (self.lossy or self.equal == self.total) and not self.notes


@dataclass(frozen=True, slots=True)
class _Answer:
    given: ReferenceAnswer
    receipt: common_pb2.KVReceipt


def read_prompts(path: Path, limit: int | None = None) -> tuple[str, ...]:
    """Texts of a JSON-lines file with a `text` in each object. Raises ValueError naming the line."""
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a JSON object with a text") from error
        texts.append(str(text))
    return tuple(texts[:limit])


def prompt_lengths(options: VerifyOptions) -> list[int]:
    """Tokens of each prompt, as the router counts them."""
    tokenizer = Tokenizer.load(options.model_dir)
    return [len(tokenizer.encode(text)) for text in options.texts]


def standard_variants(
    prompt_tokens: Sequence[int], max_tokens: int, split_sizes: Sequence[int] = (1,)
) -> tuple[Variant, ...]:
    """Block sizes, equal and unequal, over the transports that are installed; small chunks; a pool that cannot hold
    what runs at once; workers of several processes, the fewest of `split_sizes` beyond 1; decode workers that
    guess ahead; and fewer bits on the wire.
    """
    # The longest prompt must fit alone, and two running sequences together with it must not.
    longest = max(prompt_tokens) + max_tokens
    tight = -(-longest // 16) + 1
    installed = [name for name in INSTALL if has_library(name)]
    return (
        Variant("block 16, shm", "shm"),
        Variant("block 32, shm", "shm", block_size=32),
        Variant("block 16, tcp", "tcp"),
        Variant("block 32, tcp", "tcp", block_size=32),
        *(Variant(f"block 16, {name}", name) for name in installed),
        Variant("block 16 to 32, shm", "shm", decode_block_size=32),
        Variant("block 32 to 16, tcp", "tcp", block_size=32, decode_block_size=16),
        Variant("chunks of 64, shm", "shm", token_budget=64),
        Variant("small pool, shm", "shm", num_blocks=tight, must_preempt=True),
        *(Variant(f"tensor parallel {size}, shm", "shm", tensor_parallel=size) for size in split_sizes[1:2]),
        Variant("speculation, shm", "shm", speculative_tokens=6),
        Variant("int8 on the wire, tcp", "tcp", wire_dtype="int8"),
        Variant("fp8 on the wire, tcp", "tcp", wire_dtype="fp8_e4m3"),
    )


async def verify(options: VerifyOptions, variants: Sequence[Variant], say: Callable[[str], None]) -> AsyncIterator[Row]:
    """Yield the rows as they are known. Raises whatever stops a cluster from starting or a reference from running."""
    tokenizer = Tokenizer.load(options.model_dir)
    prompts = [tuple(tokenizer.encode(text)) for text in options.texts]
    greedy = [ReferenceCase(ids, options.max_tokens) for ids in prompts]
    sampled = [ReferenceCase(ids, options.max_tokens, _FIRST_SEED + i) for i, ids in enumerate(prompts)]
    say(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens; references run first")
    alone = run_in_process(one_process, str(options.model_dir), options.cache_dir, [*greedy, *sampled])
    references: dict[str, list[ReferenceAnswer]] = {}
    if options.with_transformers:
        library = run_in_process(transformers_greedy, options.model, greedy)
        references["transformers"] = await asyncio.wrap_future(library)
    answers = await asyncio.wrap_future(alone)
    references["one process"] = answers[: len(prompts)]
    references["one process, sampled"] = answers[len(prompts) :]
    if options.with_transformers:
        yield _compare(
            Row("no cluster", "greedy", "-", "transformers"), references["one process"], references["transformers"]
        )
    for variant in variants:
        async for row in _verify_variant(options, variant, greedy, sampled, references, say):
            yield row


async def _verify_variant(
    options: VerifyOptions,
    variant: Variant,
    greedy: Sequence[ReferenceCase],
    sampled: Sequence[ReferenceCase],
    references: dict[str, list[ReferenceAnswer]],
    say: Callable[[str], None],
) -> AsyncIterator[Row]:
    async with _cluster(options, variant, say) as address:
        for sampling in options.samplings:
            cases = sampled if sampling == "sampled" else greedy
            for cache in ("cold", "warm"):
                answers, workers = await _ask_all(address, options, cases, cache_salt=sampling)
                notes = _check_receipts(answers, variant)
                # Who meets whom in the pool is a matter of timing, so this is asked of the variant as a whole.
                if (sampling, cache) == (options.samplings[-1], "warm"):
                    if variant.must_preempt and not any(worker.preemptions for worker in workers):
                        notes.append("nothing was preempted in any pass")
                    if variant.speculative_tokens and not any(worker.accepted_tokens for worker in workers):
                        notes.append("no guess was right in any pass")
                names = ["one process, sampled"] if sampling == "sampled" else ["one process"]
                if sampling == "greedy" and options.with_transformers:
                    names.insert(0, "transformers")
                for name in names:
                    row = Row(variant.name, sampling, cache, name.removesuffix(", sampled"), notes=list(notes))
                    row.lossy = bool(variant.wire_dtype)
                    yield _compare(row, [answer.given for answer in answers], references[name])


@asynccontextmanager
async def _cluster(options: VerifyOptions, variant: Variant, say: Callable[[str], None]) -> AsyncIterator[str]:
    """A fresh local cluster of the variant; gives the address of its gRPC service."""
    spec = ClusterSpec(
        model_dir=options.model_dir,
        served_model_name="verified",
        transports=(variant.transport,),
        block_size=variant.block_size,
        decode_block_size=variant.decode_block_size,
        kv_wire_dtype=variant.wire_dtype,
        token_budget=variant.token_budget,
        num_blocks=variant.num_blocks,
        tensor_parallel=variant.tensor_parallel,
        speculative_tokens=variant.speculative_tokens,
        restart=False,
    )

    def on_event(event: ClusterEvent) -> None:
        if event.kind in ("died", "killed"):
            say(f"{variant.name}: {event.name} {event.kind}: {event.text}")

    cluster = LocalCluster(spec, RunDir.create(), on_event)
    await cluster.start()
    try:
        yield cluster.grpc_address
    finally:
        await cluster.stop()


async def _ask_all(
    address: str, options: VerifyOptions, cases: Sequence[ReferenceCase], cache_salt: str
) -> tuple[list[_Answer], Sequence[public_pb2.WorkerState]]:
    """Answers in order, and the workers after the last of them."""
    async with channel(address) as connection:
        stub = public_pb2_grpc.KvferryStub(connection)
        gate = asyncio.Semaphore(options.concurrency)

        async def ask(text: str, case: ReferenceCase) -> _Answer:
            async with gate:
                return await _ask(stub, text, case, cache_salt)

        answers = await asyncio.gather(*(ask(text, case) for text, case in zip(options.texts, cases, strict=True)))
        # Load reports are a quarter of a second apart: the state must be newer than the last answer.
        await asyncio.sleep(1.0)
        state = await stub.ClusterState(public_pb2.ClusterStateRequest(), timeout=10)
        return list(answers), state.workers


async def _ask(stub: "public_pb2_grpc.KvferryAsyncStub", text: str, case: ReferenceCase, cache_salt: str) -> _Answer:
    sampling = common_pb2.SamplingParams(max_tokens=case.max_tokens, temperature=0.0, num_logprobs=0)
    if case.seed is not None:
        sampling.temperature = SAMPLED_TEMPERATURE
        sampling.top_p = SAMPLED_TOP_P
        sampling.seed = case.seed
    request = public_pb2.GenerateRequest(
        model="verified",
        text=text,
        sampling=sampling,
        has_seed=case.seed is not None,
        with_receipt=True,
        cache_salt=cache_salt,
    )
    given = ReferenceAnswer([], [])
    receipt = common_pb2.KVReceipt()
    async for message in stub.Generate(request, timeout=_REQUEST_TIMEOUT_S):
        given.token_ids.extend(token.token_id for token in message.tokens)
        given.logprobs.extend(token.logprob for token in message.tokens)
        if message.HasField("finish"):
            receipt = message.finish.receipt
    return _Answer(given, receipt)


def _check_receipts(answers: Sequence[_Answer], variant: Variant) -> list[str]:
    notes = []
    for label, bad in (
        ("recomputed tokens", [a for a in answers if a.receipt.tokens_recomputed]),
        ("did not verify checksums", [a for a in answers if not a.receipt.checksum_verified]),
        (f"did not use {variant.transport}", [a for a in answers if a.receipt.transport != variant.transport]),
        ("needed a second attempt", [a for a in answers if _real_failures(a.receipt)]),
    ):
        if bad:
            notes.append(f"{len(bad)} {label}")
    return notes


def _real_failures(receipt: common_pb2.KVReceipt) -> list[str]:
    """Earlier attempts that failed for another reason than want of room, which a small pool is expected to give."""
    return [line for line in receipt.earlier_failures if ": overloaded: " not in line]


def _compare(row: Row, answers: Sequence[ReferenceAnswer], reference: Sequence[ReferenceAnswer]) -> Row:
    """Fill in the counts. A token is equal when it and all before it are; errors are of those, where both are known."""
    row.total = len(reference)
    row.equal = sum(a.token_ids == b.token_ids for a, b in zip(answers, reference, strict=True))
    equal_tokens, errors = 0, []
    for answer, other in zip(answers, reference, strict=True):
        pairs = zip(answer.token_ids, other.token_ids, strict=False)
        common = next((index for index, (a, b) in enumerate(pairs) if a != b), len(answer.token_ids))
        equal_tokens += min(common, len(other.token_ids))
        known = zip(answer.logprobs[:common], other.logprobs[:common], strict=False)
        errors += [abs(a - b) for a, b in known]
    row.equal_token_share = equal_tokens / max(1, sum(len(other.token_ids) for other in reference))
    if errors:
        row.logprob_error_mean, row.logprob_error_max = sum(errors) / len(errors), max(errors)
    return row
