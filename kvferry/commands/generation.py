"""Flags and output that `chat` and `complete` share."""

import argparse
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from kvferry.client import Client
from kvferry.console import Console
from kvferry.receipt_view import receipt_dict, receipt_rows
from kvferry_rpc.common_pb2 import FinishReason, SamplingParams
from kvferry_rpc.public_pb2 import Finish, GenerateRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `finish` is None when the person interrupted it."""

    request_id: str
    text: str
    finish: Finish | None
    reasoning: str = ""


def add_generation_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Flags of sampling and of what is shown."""
    parser.add_argument("--model", help="Name of the model. Default: the first one served.")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="Most tokens; 0 = up to the context length. Default: %(default)s.")  # fmt: skip # noqa: E501
    parser.add_argument("--temperature", type=float, help="0 = always the most likely token. Default: 1.")
    parser.add_argument("--top-p", type=float, help="Keep the smallest set of tokens with this probability.")
    parser.add_argument("--top-k", type=int, default=0, help="Keep the k most likely tokens; 0 = all.")
    parser.add_argument("--seed", type=int, help="The same seed gives the same answer.")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="Stop before this text; repeatable.")  # fmt: skip # noqa: E501
    parser.add_argument("--receipt", action="store_true", help="Show the KV receipt after the answer.")


def apply_sampling(request: GenerateRequest, arguments: argparse.Namespace) -> GenerateRequest:
    """Fill in what the flags say. Ranges are the server's business, but what a field cannot hold is refused here.

    Raises ValueError naming the flag.
    """
    sampling = SamplingParams()
    for name in ("max_tokens", "top_k"):
        value = getattr(arguments, name)
        if not 0 <= value < 2**31:
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, not {value}")
        setattr(sampling, name, value)
    if arguments.temperature is not None:
        sampling.temperature = arguments.temperature
    if arguments.top_p is not None:
        sampling.top_p = arguments.top_p
    if arguments.seed is not None:
        if not 0 <= arguments.seed < 2**64:
            raise ValueError(f"--seed must be 0 to 2**64 - 1, not {arguments.seed}")
        sampling.seed = arguments.seed
        request.has_seed = True
    request.sampling.CopyFrom(sampling)
    request.stop.extend(arguments.stop)
    return request


def stream_answer(client: Client, request: GenerateRequest, console: Console) -> Answer:
    """Generate, showing reasoning and text as they come. Ctrl-C cancels on every worker and returns what there is."""
    request_id, finish = "", None
    parts: list[str] = []
    thoughts: list[str] = []
    with closing(client.generate(request)) as stream:
        try:
            for part in stream:
                request_id = part.request_id
                apart = "\n\n" if part.text and thoughts and not any(parts) else ""
                parts.append(part.text)
                if part.reasoning:
                    thoughts.append(part.reasoning)
                console.stream(part.reasoning + apart + part.text)
                if part.HasField("finish"):
                    finish = part.finish
        except KeyboardInterrupt:
            console.stream(" [cancelled]")
    console.say()
    return Answer(request_id, "".join(parts), finish, "".join(thoughts))


def show_answer(answer: Answer, console: Console, *, receipt: bool) -> None:
    """The JSON form of an answer, or its receipt for people."""
    console.emit(answer_dict(answer, receipt=receipt))
    if receipt and answer.finish is not None:
        console.say()
        console.table(receipt_rows(answer.finish.receipt), indent="  ")


def answer_dict(answer: Answer, *, receipt: bool) -> dict[str, Any]:
    """An answer as one JSON object."""
    finish = answer.finish
    value: dict[str, Any] = {
        "request_id": answer.request_id,
        "text": answer.text,
        "finish_reason": FinishReason.Name(finish.reason).lower() if finish else "cancelled",
    }
    if answer.reasoning:
        value["reasoning"] = answer.reasoning
    if finish:
        value["prompt_tokens"] = finish.prompt_tokens
        value["completion_tokens"] = finish.completion_tokens
        value["cached_tokens"] = finish.cached_tokens
        if receipt:
            value["receipt"] = receipt_dict(finish.receipt)
    return value
