"""Items of an answer of the Responses API, whole and as the events of a stream.

reasoning, text:  output_item.added, content_part.added, ...delta, ...done, content_part.done, output_item.done
calls:            output_item.added, ...delta, ...done, output_item.done
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from router.http.answer_parts import AnswerPart, PartKind

_ID_PREFIXES: Final[Mapping[PartKind, str]] = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}
# What the types of events about the content begin with.
_CONTENT: Final[Mapping[PartKind, str]] = {
    PartKind.REASONING: "response.reasoning_text",
    PartKind.TEXT: "response.output_text",
    PartKind.CALL: "response.function_call_arguments",
}

Fields = dict[str, Any]
Logprobs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ItemShape:
    """Dresses the parts of one answer. `answer_id` is that of the request without its prefix."""

    answer_id: str

    def item(self, part: AnswerPart, status: str, logprobs: Logprobs = ()) -> Fields:
        """A part as an item of the output; `status` is completed or incomplete."""
        return self._item(part, status, part.text, [_content(part.kind, part.text, logprobs)])

    def opened(self, part: AnswerPart) -> list[Fields]:
        """The events with which a part begins."""
        item = self._item(part, "in_progress", "", [])
        events: list[Fields] = [{"type": "response.output_item.added", "output_index": part.index, "item": item}]
        if part.kind is not PartKind.CALL:
            content = {"type": "response.content_part.added", "part": _content(part.kind, "", ())}
            events.append(content | self._place(part))
        return events

    def grew(self, part: AnswerPart, piece: str, logprobs: Logprobs = ()) -> list[Fields]:
        """The event of a piece more."""
        event = {"type": f"{_CONTENT[part.kind]}.delta", "delta": piece, **self._place(part)}
        return [event | ({"logprobs": logprobs} if part.kind is PartKind.TEXT else {})]

    def closed(self, part: AnswerPart, status: str, logprobs: Logprobs = ()) -> list[Fields]:
        """The events with which a part ends; `logprobs` are those of the whole part."""
        done = {"type": f"{_CONTENT[part.kind]}.done", **self._place(part)}
        item = {
            "type": "response.output_item.done",
            "output_index": part.index,
            "item": self.item(part, status, logprobs),
        }
        if part.kind is PartKind.CALL:
            return [done | {"arguments": part.text, "name": part.name}, item]
        done |= {"text": part.text} | ({"logprobs": logprobs} if part.kind is PartKind.TEXT else {})
        content = {"type": "response.content_part.done", "part": _content(part.kind, part.text, logprobs)}
        return [done, content | self._place(part), item]

    def _item(self, part: AnswerPart, status: str, text: str, content: list[Fields]) -> Fields:
        head = {"id": self._id(part), "status": status}
        match part.kind:
            case PartKind.REASONING:
                return {"type": "reasoning", **head, "summary": [], "content": content}
            case PartKind.TEXT:
                return {"type": "message", **head, "role": "assistant", "content": content}
            case PartKind.CALL:
                call = {"call_id": part.call_id, "name": part.name, "arguments": text}
                return {"type": "function_call", **head, **call}

    def _place(self, part: AnswerPart) -> Fields:
        place = {"item_id": self._id(part), "output_index": part.index}
        return place if part.kind is PartKind.CALL else place | {"content_index": 0}

    def _id(self, part: AnswerPart) -> str:
        return f"{_ID_PREFIXES[part.kind]}_{self.answer_id}{part.index:02x}"


def _content(kind: PartKind, text: str, logprobs: Logprobs) -> Fields:
    if kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
