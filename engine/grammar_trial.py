"""Tries a grammar in a process of its own before a worker touches it: `python -m engine.grammar_trial`.

Compiling cannot be interrupted, takes time and memory that no bound on the text foresees, and crashes in native code
would take the worker along. So a client's grammar is first compiled and walked through here, each in a fork of this
process, under limits that the kernel keeps. Only what passes is compiled again in the worker: the same work, known to
end.

Lines of JSON: the first on standard input names the vocabulary, each other one a grammar; each is answered by one line.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from engine.grammar_backend import GrammarBackend
from engine.vocabulary import read_vocabulary
from kvferry_rpc.common_pb2 import Grammar
from runtime.errors import KvferryError, invalid
from runtime.grammar_limits import grammar_field

MAX_COMPILED_BYTES: Final = 64 * 2**20
_MAX_EXTRA_BYTES: Final = 2**30
_PR_SET_PDEATHSIG: Final = 1
_WALK_TOKENS: Final = 128
# Of processor time, for all tokens together; usual grammars take a hundredth of it.
_MAX_WALK_S: Final = 2.0


def try_grammar(backend: GrammarBackend, grammar: Grammar) -> None:
    """Compile, and go along a way through it that is chosen at random, always the same one.

    Raises KvferryError (INVALID_REQUEST) for a grammar that does not compile, is too large, comes to a point with no
    way on, or takes so long for each token that other requests would feel it.
    """
    field = grammar_field(grammar)
    compiled = backend.compile(grammar)
    if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
        raise invalid(field, "is too large when compiled")
    rng = np.random.default_rng(0)
    matcher, mask = backend.matcher(compiled), backend.new_mask()
    spent_s = 0.0
    for _ in range(_WALK_TOKENS):
        started = time.thread_time()
        matcher.fill_next_token_bitmask(mask)
        spent_s += time.thread_time() - started
        choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[: backend.vocab_size])
        if not len(choices):
            raise invalid(field, "comes to a point where no token of this model can follow")
        started = time.thread_time()
        matcher.accept_token(int(rng.choice(choices)))
        spent_s += time.thread_time() - started
        if spent_s > _MAX_WALK_S:
            raise invalid(field, "is too ambiguous: finding out what may come next takes too long")
        if matcher.is_terminated():
            matcher.reset()


def _end_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory() -> None:
    """Whatever is mapped by now, and a gigabyte: a grammar that wants more makes this process fail, not the host."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + _MAX_EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(backend: GrammarBackend, job: dict[str, Any]) -> dict[str, str]:
    """Try the grammar in a fork of this process, which takes milliseconds, and has one thread and nothing to lose."""
    grammar = Grammar(kind=job["kind"], text=job["text"], field=job["field"])
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            # Else whoever reads this process's answers would not see it end while a fork goes on.
            os.closerange(3, writing)
            signal.setitimer(signal.ITIMER_REAL, job["limit_s"])
            _end_with_parent()
            _limit_memory()
            try_grammar(backend, grammar)
        except KvferryError as error:
            os.write(writing, error.message.encode())
        except BaseException as error:
            os.write(writing, invalid(grammar_field(grammar), f"cannot be compiled: {error!r:.200}").message.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        refusal = pipe.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == -signal.SIGALRM:
        refusal = invalid(grammar_field(grammar), "takes too long to compile").message
    elif status != 0:
        refusal = invalid(grammar_field(grammar), "cannot be compiled: the compiler failed").message
    return {"refused": refusal} if refusal else {}


def _write(answers: TextIO, answer: dict[str, str]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> int:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # The native code logs what it thinks of a grammar; nobody wants to read a stranger's text there.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    jobs = sys.stdin.buffer
    hello = json.loads(jobs.readline())
    vocabulary = read_vocabulary(
        Path(hello["tokenizer"]),
        Path(hello["settings"]),
        vocab_size=hello["vocab_size"],
        eos_token_ids=hello["eos_token_ids"],
    )
    backend = GrammarBackend(vocabulary)
    for kind, text in ((Grammar.JSON_OBJECT, ""), (Grammar.REGEX, "a")):
        # Makes what all forks share, one compiler for JSON and one for other text.
        backend.compile(Grammar(kind=kind, text=text))
    _write(answers, {})
    for line in jobs:
        _write(answers, _answer(backend, json.loads(line)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
