"""From the text of an answer to the events of a chat: reasoning first, then content and tool calls."""

import hashlib
from dataclasses import dataclass
from typing import Final

from router.text.chat_events import ChatEvent, ContentDelta, ReasoningDelta
from router.text.chat_format import TOOL_PARSERS
from router.text.reasoning import CLOSE, OPEN, ReasoningSplitter
from router.text.tool_parsers import ArrayParser, MistralParser, ToolCallParser

_NOTHING: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class ChatSyntax:
    """What to look for in the answers of one request.

    `tools` names a format of TOOL_PARSERS, None where no call may come; `names` are those that can be called.
    `forced`: a grammar makes the answer an array of calls. `single`: the answer ends with its first call.
    `reasoning`: there may be a `<think>` block; `think_open`: the prompt opened it already.
    """

    tools: str | None = None
    names: frozenset[str] = frozenset()
    forced: bool = False
    single: bool = False
    reasoning: bool = False
    think_open: bool = False

    @property
    def shown_tokens(self) -> frozenset[str]:
        """Special tokens that have to become text for the reader, while others are dropped."""
        if self.tools is None and not self.reasoning:
            return _NOTHING
        shown = frozenset([OPEN, CLOSE]) if self.reasoning else frozenset[str]()
        return shown if self.tools is None or self.forced else shown | TOOL_PARSERS[self.tools].special_tokens


class ChatReader:
    """One answer. One thread at a time; microseconds a token, linear in the text, so it may run on the event loop."""

    def __init__(self, syntax: ChatSyntax, request_id: str) -> None:
        """`request_id` makes the ids of calls: the same answer has the same ids wherever it is read."""
        self._reasoning = ReasoningSplitter(is_open=syntax.think_open) if syntax.reasoning else None
        self._calls = _call_parser(syntax, request_id)

    @property
    def made_calls(self) -> bool:
        """Whether a call has begun."""
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def is_done(self) -> bool:
        """Whether the answer is over although the model may go on: nothing more is read."""
        return self._calls is not None and self._calls.is_done

    def push(self, text: str) -> list[ChatEvent]:
        """The events that this piece of the text makes final."""
        if self._reasoning is None:
            return self._answer(text)
        reasoning, answer = self._reasoning.push(text)
        return [*_reasoning(reasoning), *self._answer(answer)]

    def finish(self) -> list[ChatEvent]:
        """What was held back, once no text follows."""
        reasoning, answer = ("", "") if self._reasoning is None else self._reasoning.finish()
        rest = [] if self._calls is None else self._calls.finish()
        return [*_reasoning(reasoning), *self._answer(answer), *rest]

    def _answer(self, text: str) -> list[ChatEvent]:
        if not text:
            return []
        return [ContentDelta(text)] if self._calls is None else self._calls.push(text)


def _call_parser(syntax: ChatSyntax, request_id: str) -> ToolCallParser | None:
    if syntax.tools is None:
        return None
    kind = TOOL_PARSERS[syntax.tools]
    # Mistral's templates refuse a conversation whose ids are not of nine letters and digits.
    prefix, num_digits = ("", 9) if kind is MistralParser else ("call_", 24)

    def call_id(index: int) -> str:
        digest = hashlib.blake2b(f"{request_id}/{index}".encode(), digest_size=12).hexdigest()
        return prefix + digest[:num_digits]

    return (ArrayParser if syntax.forced else kind)(syntax.names, call_id, single=syntax.single)


def _reasoning(text: str) -> list[ChatEvent]:
    return [ReasoningDelta(text)] if text else []
