"""Between the messages of the wire and the engine's own types; the check at each worker's door."""

import logging
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from engine.engine import EngineLoad
from engine.prompt_logprobs import PromptToken
from engine.sequence import FinishReason, SamplingParams, Sequence, TokenConstraint, TokenSample
from kv_cache.block_manager import BlockManager, Resync
from kvferry_rpc import common_pb2, internal_pb2
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError, invalid
from runtime.kv_event_log import KVEventLog
from runtime.limits import MAX_CACHE_SALT_BYTES, check_sampling, check_token_ids
from runtime.telemetry import describe_defect

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """What the model and this worker's pool allow. `eos_token_ids` end a text."""

    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]


class SequenceMessage(Protocol):
    """The fields that `PrefillRequest` and `Admit` have in common."""

    @property
    def request_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def prompt_token_ids(self) -> SequenceOf[int]: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def sampling(self) -> common_pb2.SamplingParams: ...
    @property
    def cache_salt(self) -> bytes: ...


def build_sequence(message: SequenceMessage, limits: DoorLimits, seq_id: str) -> Sequence:
    """A sequence from a message of a router, every field checked again: a worker trusts no caller.

    `seq_id` names it on this worker; it must be one that no other caller can come to use. Raises KvferryError
    (INVALID_REQUEST, CONTEXT_LENGTH_EXCEEDED).
    """
    if not message.request_id or len(message.request_id) > 128 or not message.attempt:
        raise invalid("request_id", "must have 1 to 128 characters, with an attempt of at least 1")
    if len(message.cache_salt) > MAX_CACHE_SALT_BYTES:
        raise invalid("cache_salt", f"is longer than {MAX_CACHE_SALT_BYTES} bytes")
    token_ids = list(message.prompt_token_ids)
    if len(token_ids) >= limits.max_context_tokens:
        raise KvferryError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {len(token_ids)} tokens, which leaves no room in the context of "
            f"{limits.max_context_tokens}",
            field="prompt",
        )
    check_token_ids("prompt", token_ids, vocab_size=limits.vocab_size, max_tokens=limits.max_context_tokens)
    check_sampling(message.sampling, vocab_size=limits.vocab_size, max_context_tokens=limits.max_context_tokens)
    if not message.num_output_tokens < min(len(token_ids), message.sampling.max_tokens):
        raise invalid("num_output_tokens", "leaves no prompt or nothing to generate")
    return Sequence(
        seq_id,
        token_ids,
        SamplingParams.from_proto(message.sampling),
        max_context_tokens=limits.max_context_tokens,
        num_output_tokens=message.num_output_tokens,
        eos_token_ids=limits.eos_token_ids,
        cache_salt=message.cache_salt,
    )


def has_grammar(message: SequenceMessage) -> bool:
    """Whether the answer must keep to a grammar: `build_constraint` then makes what its sequence needs."""
    return message.sampling.HasField("grammar")


class Grammars(Protocol):
    """What a worker's door needs of `engine.grammar.GrammarCompiler`."""

    async def constraint(
        self, grammar: common_pb2.Grammar, output_token_ids: SequenceOf[int] = ()
    ) -> TokenConstraint: ...


async def build_constraint(message: SequenceMessage, grammars: Grammars) -> TokenConstraint | KvferryError:
    """The constraint of a message that `build_sequence` took and that `has_grammar`, or why there is none.

    Compiling may take seconds, off this thread.
    """
    num_prompt_tokens = len(message.prompt_token_ids) - message.num_output_tokens
    try:
        return await grammars.constraint(message.sampling.grammar, message.prompt_token_ids[num_prompt_tokens:])
    except KvferryError as error:
        return error
    except Exception as error:
        # Not in its own words, which may be those of the grammar.
        places = describe_defect(error)
        _log.error("%s: its grammar could not be prepared for a reason of our own: %s", message.request_id, places)
        return KvferryError(ErrorCode.INTERNAL, "the grammar could not be prepared")


def token_output(index: int, sample: TokenSample) -> common_pb2.TokenOutput:
    """A sampled token as it travels; `index` counts the generated tokens of the request from 0."""
    message = common_pb2.TokenOutput(index=index, token_id=sample.token_id)
    if sample.logprob is not None:
        message.logprob = sample.logprob
        for token_id, logprob in sample.top_logprobs:
            message.top_logprobs.add(token_id=token_id, logprob=logprob)
    return message


def token_sample(message: common_pb2.TokenOutput) -> TokenSample:
    """The reverse of `token_output`."""
    return TokenSample(
        message.token_id,
        message.logprob if message.HasField("logprob") else None,
        tuple((entry.token_id, entry.logprob) for entry in message.top_logprobs),
    )


_MAX_PROMPT_POSITIONS = 256


def prompt_logprobs(tokens: SequenceOf[PromptToken]) -> Iterator[internal_pb2.PromptLogprobs]:
    """Log probabilities of a prompt as they travel, in messages of bounded size; none for none."""
    for first in range(0, len(tokens), _MAX_PROMPT_POSITIONS):
        message = internal_pb2.PromptLogprobs()
        for token in tokens[first : first + _MAX_PROMPT_POSITIONS]:
            entry = message.tokens.add(
                position=token.position, token_id=token.token_id, logprob=token.logprob, rank=token.rank
            )
            for token_id, logprob in token.top_logprobs:
                entry.top_logprobs.add(token_id=token_id, logprob=logprob)
        yield message


_FINISH = {FinishReason.STOP: common_pb2.STOP, FinishReason.LENGTH: common_pb2.LENGTH}


def finish_reason(reason: FinishReason) -> "common_pb2.FinishReason.ValueType":
    """The public name of an ending with text. Raises KeyError for CANCELLED and FAILED, which end in an error."""
    return _FINISH[reason]


def publish_cache_changes(manager: BlockManager, log: KVEventLog) -> None:
    """Move what changed in the prefix cache since the last call to the log that routers are told from."""
    changes = manager.take_events()
    if isinstance(changes, Resync):
        log.replace(manager.snapshot_hashes())
    else:
        log.publish((change.hash, change.removed) for change in changes)


def load_report(load: EngineLoad, stalled_ms: int) -> internal_pb2.LoadReport:
    """The engine's share of the heartbeat to the routers."""
    return internal_pb2.LoadReport(
        blocks_free=load.blocks.free,
        blocks_cached=load.blocks.cached,
        blocks_used=load.blocks.used,
        blocks_quarantined=load.blocks.quarantined,
        sequences_running=load.num_running,
        sequences_waiting=load.num_waiting,
        sequences_receiving=load.num_receiving,
        tokens_waiting=load.tokens_waiting,
        steps=load.steps,
        preemptions=load.preemptions,
        engine_stalled_ms=stalled_ms,
        prompt_tokens_computed=load.prompt_tokens_computed,
        tokens_generated=load.tokens_generated,
        drafted_tokens=load.drafted_tokens,
        accepted_tokens=load.accepted_tokens,
    )
