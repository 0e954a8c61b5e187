"""From a typed body to what is to be generated: the meaning of the fields, checked before any work is done.

The order is that of cost: ranges first, then the prompt's shape, then (after tokenising) the context's length.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry_rpc.common_pb2 import ErrorCode, Grammar, LogitBias, SamplingParams
from router.generation import GenerationRequest
from router.http.openai_requests import ChatBody, CompletionBody, GenerationBody, Message, TokenizeBody
from router.plans.chat_plan import chat_grammar, check_messages, requested_tools
from router.plans.completion_plan import completion_prompts, num_candidates, wants_prompt_only
from router.plans.structured_output import grammar_of
from router.text.chat_format import NO_CHAT_FORMAT, ChatFormat
from router.text.chat_reader import ChatSyntax
from router.text.tools import ToolUse, chat_syntax, tool_use
from runtime.errors import KvferryError, invalid
from runtime.limits import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    check_sampling,
)

DEFAULT_COMPLETION_TOKENS = 16  # What OpenAI's completions endpoint does when max_tokens is absent.


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt to be rendered with the model's chat template. `tools` passed `tool_use`."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


# The last is token ids.
Prompt = Conversation | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model served can take. `max_context_tokens` counts prompt and output together. `chat` is how it writes
    tool calls and reasoning."""

    model: str
    vocab_size: int
    max_context_tokens: int
    chat: ChatFormat = NO_CHAT_FORMAT


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A valid request for `len(prompts) * num_choices` sequences, before tokenising.

    `max_tokens` and `seed` are None when the client left the choice to us. `sampling.max_tokens` is an upper bound:
    the prompt's length may lower it. The `..._field` names are those to blame in errors. `cache_salt` is what the
    client named, which only splits its tenant's own. `chat` says what to look for in the answers of a chat; None for
    others. `num_logprobs` and `prompt_logprobs` are what the client sees of each, `sampling` what is computed.
    `prompt_only`: no answer is wanted. `num_returned`: so many answers of each prompt, the best, are returned; None =
    all of them.
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
    cache_salt: str = ""
    priority: int = 0
    slo: str = ""
    chat: ChatSyntax | None = None
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    num_returned: int | None = None

    @property
    def num_shown(self) -> int:
        """Answers of each prompt that are returned."""
        return self.num_choices if self.num_returned is None else self.num_returned

    @property
    def num_sequences(self) -> int:
        """Answers that are generated, of all prompts together."""
        return len(self.prompts) * self.num_choices

    @property
    def choices_field(self) -> str:
        """The field that says how many for each prompt."""
        return "n" if self.num_returned is None else "best_of"


@dataclass(frozen=True, slots=True)
class RequestScope:
    """What all sequences of one request share: its id, its deadline on the router's clock, the salt of its blocks'
    names, the tenant's name, the priority, which the tenant may ask for, the name of its class, if any, and the API and
    the trace that it belongs to."""

    request_id: str
    deadline: float
    cache_salt: bytes = b""
    tenant: str = ""
    priority: int = 0
    slo: str = ""
    endpoint: str = ""
    traceparent: str = ""


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
    check_messages(body.messages)
    tools = requested_tools(body)
    grammar = chat_grammar(body, tools)
    return _plan(
        body,
        limits,
        (Conversation(tuple(body.messages), tools.tools),),
        max_tokens=max_tokens,
        max_tokens_field=field,
        num_logprobs=num_logprobs,
        grammar=grammar,
        tools=tools,
    )


def plan_completion(body: CompletionBody, limits: ModelLimits) -> GenerationPlan:
    """Raises KvferryError naming the field at fault."""
    prompt_only, candidates = wants_prompt_only(body), num_candidates(body)
    plan = _plan(
        body,
        limits,
        completion_prompts(body.prompt, limits.vocab_size),
        # A worker always samples a token; nobody sees that one.
        max_tokens=1 if prompt_only else body.max_tokens,
        max_tokens_field="max_tokens",
        num_logprobs=body.logprobs,
        grammar=grammar_of(body),
    )
    if body.echo and body.logprobs is not None:
        plan.sampling.prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
    if candidates is not None:
        _check_choices("best_of", candidates, plan.prompts)
        # They are ranked by them.
        plan.sampling.num_logprobs = body.logprobs or 0
        plan = replace(plan, num_choices=candidates, num_returned=plan.num_choices)
    return replace(plan, echo=bool(body.echo), prompt_only=prompt_only)


def tokenize_prompt(body: TokenizeBody) -> Prompt:
    """The one prompt of a tokenise body. Raises KvferryError when there are two or none."""
    if body.messages is not None:
        if body.prompt is not None:
            raise invalid("prompt", "and messages exclude each other")
        check_messages(body.messages)
        return Conversation(tuple(body.messages), tool_use(body.tools or (), None, None, parallel=True).tools)
    if body.prompt is None:
        raise invalid("prompt", "or messages is required")
    if body.tools:
        raise invalid("tools", "needs messages")
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
                    tenant=scope.tenant,
                    priority=scope.priority,
                    slo=scope.slo,
                    endpoint=scope.endpoint,
                    traceparent=scope.traceparent,
                    shown_tokens=plan.chat.shown_tokens if plan.chat is not None else frozenset(),
                    prompt_only=plan.prompt_only,
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
    grammar: Grammar | None,
    tools: ToolUse | None = None,
) -> GenerationPlan:
    """`tools`: those of a chat."""
    check_model(body.model, limits)
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise invalid("stream_options", "needs stream to be true")
    num_choices = body.n or 1
    _check_choices("n", num_choices, prompts)
    if body.prompt_logprobs is not None and stream:
        raise invalid("prompt_logprobs", "cannot be streamed; in a stream of completions use echo and logprobs")
    is_chat = isinstance(body, ChatBody)
    default = limits.max_context_tokens if is_chat else DEFAULT_COMPLETION_TOKENS
    sampling = _sampling(body, num_logprobs, grammar)
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
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        slo=body.slo or "",
        chat=chat_syntax(tools, limits.chat, has_grammar=grammar is not None) if tools is not None else None,
        num_logprobs=num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )


def _check_choices(field_name: str, num_choices: int, prompts: Sequence[Prompt]) -> None:
    if num_choices * len(prompts) > MAX_CHOICES:
        raise invalid(field_name, f"times the number of prompts must be at most {MAX_CHOICES}")


def _sampling(body: GenerationBody, num_logprobs: int | None, grammar: Grammar | None) -> SamplingParams:
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
    if body.prompt_logprobs is not None:
        params.prompt_logprobs = body.prompt_logprobs
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
