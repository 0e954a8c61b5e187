"""How the benchmark talks to an engine in another process: one line of JSON each way over stdin and stdout.

    {"command": "load", "setup": {...}}                                -> {"version": "1.2"}
    {"command": "generate", "prompts": [[1, 2]], "max_tokens": 2}      -> {"tokens": [[7, 8]], "times_s": [[0.1, 0.2]]}
    {"command": "leave"}, or the end of stdin                           -> the process ends

Whatever fails is answered with {"error": "..."}. Times count from when the command was read. This file is imported by
peers in environments of their own, so it needs the standard library only.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self, TextIO

# Of one request: each token, and when it came by `time.perf_counter`, in seconds.
Generated = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is made of. fp32 weights and KV; every engine gets the same, but for the form of the model."""

    model: str  # a directory or file in the form that this engine reads
    threads: int
    max_seqs: int  # requests at a time
    max_context: int  # tokens, prompt and output
    pool_tokens: int  # tokens whose KV must fit

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """As it goes over the line."""
        return asdict(self)


class LoadedEngine(Protocol):
    """What an adapter makes of an engine."""

    @property
    def version(self) -> str:
        """Of the package that computes."""
        ...

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Generated]:
        """Greedy; all prompts handed over at once; exactly `max_tokens` tokens each, whatever ends a text."""
        ...


def serve(load: Callable[[Setup], LoadedEngine]) -> None:
    """The body of an adapter. Ends the process when it is told to leave or the other end is gone."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # What a library prints must not get in between.
        serve_lines(load, sys.stdin, answers)
    # Not by returning: that would wait for whatever threads the engine has.
    sys.stderr.flush()
    os._exit(0)


def serve_lines(load: Callable[[Setup], LoadedEngine], commands: TextIO, answers: TextIO) -> None:
    """Answer each line of `commands` in turn."""
    engine: LoadedEngine | None = None
    for line in commands:
        began = time.perf_counter()
        command = json.loads(line)
        try:
            if command["command"] == "leave":
                return
            if command["command"] == "load":
                engine = load(Setup.from_json(command["setup"]))
                answer: dict[str, Any] = {"version": engine.version}
            elif engine is None:
                answer = {"error": "no model is loaded"}
            else:
                answer = _outcome(engine.generate(command["prompts"], command["max_tokens"]), began)
        except Exception as error:  # Told to the benchmark, which leaves this engine out and goes on.
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _outcome(generated: list[Generated], began: float) -> dict[str, Any]:
    return {
        "tokens": [[token for token, _ in one] for one in generated],
        "times_s": [[at - began for _, at in one] for one in generated],
    }
