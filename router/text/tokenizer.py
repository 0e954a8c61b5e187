"""Text to token ids and back, exactly as transformers does it for the same model directory.

Reads tokenizer.json with the `tokenizers` library alone: no transformers, no torch.
"""

import asyncio
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, TypeVar

import tokenizers

from kvferry_rpc.common_pb2 import ErrorCode
from router.text.chat_template import ChatTemplate, check_text
from router.text.token_sizes import text_bound
from runtime.errors import KvferryError, invalid
from runtime.token_pieces import TokenPieces, build_pieces

T = TypeVar("T")

SHORT_CHARS = 2048
"""Encoding so much takes a fraction of a millisecond."""
# What a template writes around one.
_CHARS_PER_MESSAGE = 32


class Tokenizer:
    """One model's tokenizer, chat template and the limits its files state.

    Thread-safe without a lock: the native object raises "Already borrowed" only when one thread *changes* it
    (truncation, padding, added tokens) while another encodes, and nothing here changes it once it is loaded.
    A megabyte of text takes a second of CPU to encode: use AsyncTokenizer on an event loop. `token_bytes` and
    `token_text` are cheap.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        max_context_tokens: int | None = None,
    ) -> None:
        """Takes `backend` over: nobody may change it afterwards. Raises ValueError for an unsupported decoder."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self.eos_token_ids = eos_token_ids
        self.max_context_tokens = max_context_tokens
        description = json.loads(backend.to_str())
        self.pieces = _checked_pieces(backend, description["decoder"])
        self.vocab_size = len(self.pieces.pieces)
        self._bound = text_bound(description, self.pieces)
        self._pieces_showing: dict[frozenset[str], TokenPieces] = {frozenset(): self.pieces}

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read tokenizer.json and, where present, tokenizer_config.json, chat_template.jinja, config.json and
        generation_config.json. Raises ValueError naming the file when one is missing, malformed or unsupported."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} does not exist; kvferry needs a model directory with a tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the native library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        settings = _read_json(model_dir / "tokenizer_config.json")
        special_tokens = _named_special_tokens(settings)
        _add_missing_tokens(backend, settings, special_tokens)
        config = _read_json(model_dir / "config.json")
        template = _template_source(model_dir / "chat_template.jinja", settings)
        try:
            return cls(
                backend,
                chat_template=None if template is None else ChatTemplate(template, special_tokens),
                eos_token_ids=_eos_token_ids(_read_json(model_dir / "generation_config.json"), config),
                max_context_tokens=config.get("max_position_embeddings"),
            )
        except ValueError as error:
            raise ValueError(f"{model_dir}: {error}") from error

    @property
    def chat_template_source(self) -> str:
        """The text of the chat template; "" without one."""
        return "" if self._chat_template is None else self._chat_template.source

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return self._chat_template is not None

    def encode(
        self, text: str, *, field: str = "prompt", add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of `text`, with the special tokens that transformers' `tokenizer(text)` adds. May be empty.

        Special-token text inside `text` becomes that special token, as in transformers. `max_tokens`: more are of no
        use to the caller, who has to count them all the same. Raises KvferryError naming `field`: INVALID_REQUEST for
        text that is not valid Unicode or too long, CONTEXT_LENGTH_EXCEEDED, before the work, for text so long that it
        clearly has more than `max_tokens`.
        """
        return self._encode(check_text(field, text), add_special_tokens, field, max_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation up to the header of the answer: transformers'
        `apply_chat_template(messages, tools=tools, tokenize=True, add_generation_prompt=True)`.

        The template alone writes special tokens; none is added here, so none is doubled. Special-token text inside
        a message becomes that special token too, as in transformers: a user can write `<|im_end|>`. An application
        that puts untrusted text into messages has to filter it. `max_tokens` and errors as in `encode`.
        """
        if self._chat_template is None:
            raise invalid("messages", "cannot be used: this model has no chat template; use a plain prompt")
        return self._encode(self._chat_template.render(messages, tools), False, "messages", max_tokens)

    def pieces_showing(self, shown: frozenset[str]) -> TokenPieces:
        """`pieces` in which special tokens of these names are visible. Made once for each set, of which there are few:
        a parser's markers. Any thread."""
        pieces = self._pieces_showing.get(shown)
        if pieces is None:
            names = {name.encode() for name in shown}
            both = zip(self.pieces.pieces, self.pieces.visible, strict=True)
            visible = tuple(piece if piece in names else usual for piece, usual in both)
            pieces = self._pieces_showing[shown] = replace(self.pieces, visible=visible)
        return pieces

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a token list; transformers' `decode` with `clean_up_tokenization_spaces=False`.

        Ids beyond the vocabulary add nothing. Raises KvferryError (INVALID_REQUEST) for what cannot be an id.
        """
        try:
            texts: list[str] = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise invalid("tokens", "must be token ids") from error
        return texts[0]

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text: whole characters or a part of one. Special tokens give their name; an id
        without a token gives b""."""
        inside = 0 <= token_id < self.vocab_size
        return (self.pieces.pieces[token_id] or b"") if inside else b""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD where it is only a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _encode(self, text: str, add_special_tokens: bool, field: str, max_tokens: int | None) -> list[int]:
        if max_tokens is not None and self._bound is not None:
            least = self._bound.least_tokens(text, max_tokens)
            if least > max_tokens:
                message = f"The prompt has at least {least} tokens, and {max_tokens} are the most that leave room."
                raise KvferryError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, field=field)
        if len(text) <= SHORT_CHARS:
            # Not in a batch: that would go through other threads, and one of a few words would wait for them.
            short: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return short
        # Of the native calls only the batched ones let go of the GIL, without which a thread pool helps nobody.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


class AsyncTokenizer:
    """A Tokenizer for an event loop: encoding runs on a few threads, behind a bounded queue.

    What is short is encoded at once, where it is called: that takes less time than handing it to a thread and back,
    and a thread that runs Python would hold up the event loop for longer each time it wants its turn back.
    `tokenizer` is the plain one, for its cheap methods.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, num_threads: int = 2, max_pending: int = 256, short_chars: int = SHORT_CHARS
    ) -> None:
        """`max_pending` counts calls running and waiting; one more is refused. Texts of up to `short_chars` characters
        are short."""
        self.tokenizer = tokenizer
        self._short_chars = short_chars
        self._closed = False
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._slots = BoundedSemaphore(max_pending)

    async def encode(
        self, text: str, *, field: str = "prompt", add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """`Tokenizer.encode` off the loop. Raises what it raises, and KvferryError (OVERLOADED) when full."""
        call = functools.partial(
            self.tokenizer.encode, text, field=field, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )
        if len(text) <= self._short_chars:
            self._check_open()
            return call()
        return await self._run(call)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """`Tokenizer.encode_chat` off the loop. Raises what it raises, and KvferryError (OVERLOADED) when full."""
        if not tools and _num_chars(messages) <= self._short_chars:
            self._check_open()
            return self.tokenizer.encode_chat(messages, max_tokens=max_tokens)
        return await self._run(lambda: self.tokenizer.encode_chat(messages, tools, max_tokens=max_tokens))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """`Tokenizer.decode` off the loop, for long lists such as an echoed prompt."""
        return await self._run(lambda: self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def close(self) -> None:
        """Drop what is still waiting and let the threads end. Idempotent; does not block."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_open(self) -> None:
        if self._closed:
            raise KvferryError(ErrorCode.UNAVAILABLE, "the tokenizer is shut down")

    async def _run(self, call: Callable[[], T]) -> T:
        self._check_open()
        if not self._slots.acquire(blocking=False):
            raise KvferryError(ErrorCode.OVERLOADED, "too many prompts are waiting to be tokenised", retry_after_ms=500)
        future = self._pool.submit(call)
        # The slot belongs to the work, not to the caller: a cancelled caller may leave work running.
        future.add_done_callback(self._release)
        return await asyncio.wrap_future(future)

    def _release(self, _: Future[Any]) -> None:
        self._slots.release()


def _num_chars(messages: Sequence[Mapping[str, Any]]) -> float:
    """Of plain messages; infinite when there is more to one than a role and a text."""
    num_chars = 0
    for message in messages:
        content = message.get("content")
        if len(message) > 2 or not isinstance(content, str):
            return math.inf
        num_chars += len(content) + _CHARS_PER_MESSAGE
    return num_chars


def _checked_pieces(backend: tokenizers.Tokenizer, decoder: Mapping[str, Any] | None) -> TokenPieces:
    """The pieces of the vocabulary, compared once with the native decoder so that the two cannot drift apart."""
    special = [token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special]
    pieces = build_pieces(decoder, backend.get_vocab(with_added_tokens=True), special)
    everything = range(len(pieces.pieces))
    for skip in (False, True):
        if pieces.decode(everything, skip_special_tokens=skip) != backend.decode(everything, skip_special_tokens=skip):
            raise ValueError("the tokenizer decodes its vocabulary in an unsupported way")
    return pieces


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def _token_content(value: Any) -> str | None:
    """tokenizer_config.json writes a token as its text or as an object with options."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _named_special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like: variables of the chat template."""
    named = {key: _token_content(value) for key, value in settings.items() if key.endswith("_token")}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update({key: _token_content(value) for key, value in extra.items()})
    return {key: content for key, content in named.items() if content is not None}


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Make special what tokenizer_config.json calls so, and add what tokenizer.json lacks, as transformers does."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    listed = [_token_content(value) for value in extra] if isinstance(extra, list) else []
    names = [*special_tokens.values(), *(content for content in listed if content is not None)]
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])


def _template_source(path: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja goes before tokenizer_config.json, which holds one template or a list of named ones."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _eos_token_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
    """Those of generation_config.json if it names any, else those of config.json: also the engine's rule."""
    value = generation_config.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    return frozenset([] if value is None else value if isinstance(value, list) else [value])
