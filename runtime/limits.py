"""Bounds on what a client may ask, checked at the router's door and again at each worker's."""

import math

from kvferry_rpc.common_pb2 import SamplingParams
from runtime.errors import invalid
from runtime.grammar_limits import check_grammar

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_PROMPT_CHARS = 4 * 1024 * 1024
MAX_CHOICES = 16  # `n`, and `n` times the prompts of a list
MAX_PROMPTS = MAX_CHOICES
MAX_MESSAGES = 2048
MAX_TOOLS = 128  # of a request, and calls of a message
MAX_TOOL_BYTES = 256 * 1024  # of all tools of a request, as JSON
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_CACHE_SALT_BYTES = 64
MAX_CACHE_SALT_CHARS = 64  # of what a client may name; workers get a digest
MAX_PRIORITY = 100  # and as far below 0
DEFAULT_REQUEST_TIMEOUT_S = 600.0


def check_sampling(params: SamplingParams, *, vocab_size: int, max_context_tokens: int) -> None:
    """Refuse parameters that a sampler must never see.

    Raises KvferryError (INVALID_REQUEST) naming the field. Comparisons are written so that NaN fails them.
    """
    _check_range("max_tokens", params.max_tokens, 1, max_context_tokens)
    _check_range("min_tokens", params.min_tokens, 0, params.max_tokens)
    if params.HasField("temperature"):
        _check_range("temperature", params.temperature, 0.0, 2.0)
    _check_range("top_k", params.top_k, 0, 2**31 - 1)
    if params.HasField("top_p"):
        _check_range("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _check_range("min_p", params.min_p, 0.0, 1.0)
    if params.HasField("repetition_penalty"):
        _check_range("repetition_penalty", params.repetition_penalty, 0.0, 2.0, open_low=True)
    _check_range("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if params.HasField("num_logprobs"):
        _check_range("top_logprobs", params.num_logprobs, 0, MAX_TOP_LOGPROBS)
    if params.HasField("prompt_logprobs"):
        _check_range("prompt_logprobs", params.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
    _check_token_fields(params, vocab_size)
    if params.HasField("grammar"):
        check_grammar(params.grammar)
        # Either could leave no token possible where the grammar allows nothing but the end.
        if params.min_tokens:
            raise invalid("min_tokens", "must be 0 where a grammar says when the answer may end")
        if params.ignore_eos:
            raise invalid("ignore_eos", "must be false where a grammar says when the answer may end")


def check_token_ids(field: str, token_ids: list[int], *, vocab_size: int, max_tokens: int) -> None:
    """Refuse an empty, over-long or out-of-vocabulary list. Raises KvferryError naming `field`."""
    if not token_ids:
        raise invalid(field, "must not be empty")
    if len(token_ids) > max_tokens:
        raise invalid(field, f"has {len(token_ids)} tokens, more than the limit of {max_tokens}")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise invalid(field, f"has a token id outside the vocabulary of {vocab_size}")


def _check_token_fields(params: SamplingParams, vocab_size: int) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"has more than {MAX_LOGIT_BIAS} entries")
    seen: set[int] = set()
    for entry in params.logit_bias:
        if entry.token_id >= vocab_size:
            raise invalid("logit_bias", f"names token {entry.token_id}, outside the vocabulary of {vocab_size}")
        if entry.token_id in seen:
            raise invalid("logit_bias", f"names token {entry.token_id} twice")
        seen.add(entry.token_id)
        _check_range("logit_bias", entry.bias, -100.0, 100.0)
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"has more than {MAX_STOP_TOKENS} entries")
    if any(token >= vocab_size for token in params.stop_token_ids):
        raise invalid("stop_token_ids", f"has a token outside the vocabulary of {vocab_size}")


def _check_range(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high and math.isfinite(value)
    if not inside:
        bracket = "(" if open_low else "["
        raise invalid(field, f"must be in {bracket}{low:g}, {high:g}], not {value:g}")
