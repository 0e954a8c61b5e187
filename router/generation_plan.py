"""From a typed body to what is to be generated: the meaning of the fields, checked before any work is done.

The order is that of cost: ranges first, then the prompt's shape, then (after tokenising) the context's length.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from kvferry_rpc.common_pb2 import ErrorCode, LogitBias, SamplingParams
from router.generation import GenerationRequest
from router.http.openai_requests import ChatBody, CompletionBody, GenerationBody, Message, TokenizeBody
from router.structured_output import grammar_of
from runtime.errors import KvferryError, invalid
from runtime.limits import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    check_sampling,
    check_token_ids,
)

DEFAULT_COMPLETION_TOKENS = 16  # What OpenAI's completions endpoint does when max_tokens is absent.


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt to be rendered with the model's chat template."""

    messages: tuple[Message, ...]


# The last is token ids.
Prompt = Conversation | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model served can take. `max_context_tokens` counts prompt and output together."""

    model: str
    vocab_size: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A valid request for `len(prompts) * num_choices` sequences, before tokenising.

    `max_tokens` and `seed` are None when the client left the choice to us. `sampling.max_tokens` is an upper bound:
    the prompt's length may lower it. The `..._field` names are those to blame in errors.
    """

    prompts: tuple[Prompt, ...]
    prompt_field: str
    num_choices: int
    sampling: SamplingParams
    max_tokens: int | None
    max_tokens_field: str
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    want_receipt: bool
    echo: bool = False


@dataclass(frozen=True, slots=True)
class RequestScope:
    """What all sequences of one request share: its id, its deadline on the router's clock, the tenant's salt."""

    request_id: str
    deadline: float
    cache_salt: bytes = b""


def check_model(model: str, limits: ModelLimits) -> None:
    """Raises KvferryError (UNKNOWN_MODEL) unless `model` is the one served."""
    if model != limits.model:
        raise KvferryError(ErrorCode.UNKNOWN_MODEL, f"The model {model[:200]!r} is not served here.", field="model")


def plan_chat(body: ChatBody, limits: ModelLimits) -> GenerationPlan:
    """Raises KvferryError naming the field at fault."""
    if body.store:
        raise invalid("store", "must be false: answers are not kept")
    field, max_tokens = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        if max_tokens is not None and max_tokens != body.max_completion_tokens:
            raise invalid("max_completion_tokens", "contradicts max_tokens; send one of them")
        field, max_tokens = "max_completion_tokens", body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompts = (Conversation(tuple(body.messages)),)
    return _plan(body, limits, prompts, max_tokens=max_tokens, max_tokens_field=field, num_logprobs=num_logprobs)


def plan_completion(body: CompletionBody, limits: ModelLimits) -> GenerationPlan:
    """Raises KvferryError naming the field at fault."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of", "must equal n: choosing among more answers than are returned is not supported")
    if body.echo and body.logprobs is not None:
        raise invalid("logprobs", "together with echo is not supported: prompt tokens have no logprobs here")
    plan = _plan(
        body,
        limits,
        _completion_prompts(body.prompt, limits.vocab_size),
        max_tokens=body.max_tokens,
        max_tokens_field="max_tokens",
        num_logprobs=body.logprobs,
    )
    return replace(plan, echo=bool(body.echo))


def tokenize_prompt(body: TokenizeBody) -> Prompt:
    """The one prompt of a tokenise body. Raises KvferryError when there are two or none."""
    if body.messages is not None:
        if body.prompt is not None:
            raise invalid("prompt", "and messages exclude each other")
        return Conversation(tuple(body.messages))
    if body.prompt is None:
        raise invalid("prompt", "or messages is required")
    return body.prompt


def build_requests(
    plan: GenerationPlan, prompt_ids: Sequence[Sequence[int]], limits: ModelLimits, scope: RequestScope
) -> list[GenerationRequest]:
    """One request a choice, prompt by prompt; ids are `<request id>`, then `<request id>-1` and so on.

    With a seed, choice i takes seed + i, so that choices differ and each can be had again. Raises KvferryError
    (CONTEXT_LENGTH_EXCEEDED, or INVALID_REQUEST for an empty prompt).
    """
    requests: list[GenerationRequest] = []
    for token_ids in prompt_ids:
        sampling = _fit_context(plan, token_ids, limits)
        for _ in range(plan.num_choices):
            index = len(requests)
            params = SamplingParams()
            params.CopyFrom(sampling)
            params.seed = secrets.randbits(64) if plan.seed is None else (plan.seed + index) % 2**64
            requests.append(
                GenerationRequest(
                    request_id=f"{scope.request_id}-{index}" if index else scope.request_id,
                    prompt_token_ids=tuple(token_ids),
                    sampling=params,
                    deadline=scope.deadline,
                    stop=plan.stop,
                    cache_salt=scope.cache_salt,
                )
            )
    return requests


def _fit_context(plan: GenerationPlan, token_ids: Sequence[int], limits: ModelLimits) -> SamplingParams:
    """The sampling parameters with a max_tokens that fits behind this prompt."""
    if not token_ids:
        raise invalid(plan.prompt_field, "must not be empty: this model has no token to begin with")
    room = limits.max_context_tokens - len(token_ids)
    size = f"The prompt has {len(token_ids)} tokens and the context {limits.max_context_tokens}"
    if room < 1:
        message = f"{size}, which leaves no room for an answer."
        raise KvferryError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, field=plan.prompt_field)
    if plan.max_tokens is not None and plan.max_tokens > room:
        message = f"{size}, so {plan.max_tokens_field} may be at most {room}, not {plan.max_tokens}."
        raise KvferryError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, field=plan.max_tokens_field)
    sampling = SamplingParams()
    sampling.CopyFrom(plan.sampling)
    sampling.max_tokens = min(plan.sampling.max_tokens, room)
    if sampling.min_tokens > sampling.max_tokens:
        raise invalid("min_tokens", f"must be at most {sampling.max_tokens}, the room left behind the prompt")
    return sampling


def _plan(
    body: GenerationBody,
    limits: ModelLimits,
    prompts: tuple[Prompt, ...],
    *,
    max_tokens: int | None,
    max_tokens_field: str,
    num_logprobs: int | None,
) -> GenerationPlan:
    check_model(body.model, limits)
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise invalid("stream_options", "needs stream to be true")
    num_choices = body.n or 1
    if num_choices * len(prompts) > MAX_CHOICES:
        raise invalid("n", f"times the number of prompts must be at most {MAX_CHOICES}")
    is_chat = isinstance(body, ChatBody)
    default = limits.max_context_tokens if is_chat else DEFAULT_COMPLETION_TOKENS
    sampling = _sampling(body, num_logprobs)
    sampling.max_tokens = min(max_tokens or default, limits.max_context_tokens)
    check_sampling(sampling, vocab_size=limits.vocab_size, max_context_tokens=limits.max_context_tokens)
    return GenerationPlan(
        prompts=prompts,
        prompt_field="messages" if is_chat else "prompt",
        num_choices=num_choices,
        sampling=sampling,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        seed=body.seed,
        stop=_stop_strings(body.stop),
        stream=stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        want_receipt=bool(body.kv_receipt),
    )


def _sampling(body: GenerationBody, num_logprobs: int | None) -> SamplingParams:
    params = SamplingParams(
        min_tokens=body.min_tokens or 0,
        top_k=body.top_k or 0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=body.stop_token_ids or (),
        logit_bias=_logit_bias(body.logit_bias or {}),
    )
    # Not in the constructor: there None would have to be told apart from 0.
    for field in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = getattr(body, field)
        if value is not None:
            setattr(params, field, value)
    if num_logprobs is not None:
        params.num_logprobs = num_logprobs
    grammar = grammar_of(body)
    if grammar is not None:
        params.grammar.CopyFrom(grammar)
    return params


def _logit_bias(entries: dict[str, float]) -> list[LogitBias]:
    if len(entries) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"has more than {MAX_LOGIT_BIAS} entries")
    biases = []
    for key, bias in entries.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 2**32):
            raise invalid("logit_bias", f"has the key {key[:40]!r}, which is not a token id")
        biases.append(LogitBias(token_id=int(key), bias=bias))
    return biases


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid("stop", f"has {len(strings)} strings, more than the limit of {MAX_STOP_STRINGS}")
    if any(not 1 <= len(string) <= MAX_STOP_CHARS for string in strings):
        raise invalid("stop", f"has a string that is empty or longer than {MAX_STOP_CHARS} characters")
    return strings


def _completion_prompts(prompt: str | list[int | str | list[int]], vocab_size: int) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return (_checked_ids(cast(list[int], prompt), vocab_size),)
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"has {len(prompt)} entries, more than the limit of {MAX_PROMPTS}")
    if kinds == {str}:
        return tuple(cast(list[str], prompt))
    if kinds == {list}:
        return tuple(_checked_ids(ids, vocab_size) for ids in cast(list[list[int]], prompt))
    raise invalid("prompt", "must be a string, a list of strings, a list of token ids or a list of lists of token ids")


def _checked_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    check_token_ids("prompt", ids, vocab_size=vocab_size, max_tokens=len(ids))
    return tuple(ids)
