"""Grammars are tried where they can do no harm, and one that does harm costs nobody else anything."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.grammar import GrammarCompiler
from engine.grammar_process import TrialProcess
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel
from engine.vocabulary import read_vocabulary
from kvferry_rpc.common_pb2 import ErrorCode, Grammar
from runtime.errors import KvferryError
from tests.support.tiny_tokenizers import TINY_REAL

LIMIT_S = 60.0
GOOD = Grammar(kind=Grammar.REGEX, text="[ab]{2}")
# No door lets it in: compiling takes time with the cube of the depth, here for minutes.
ENDLESS = Grammar(
    kind=Grammar.JSON_SCHEMA,
    text='{"type":"object","properties":{"a":' * 700 + "{}" + "}}" * 700,
    field="the field",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepare_model(str(TINY_REAL), tmp_path_factory.mktemp("models"), lambda stage, fraction: None)


@pytest.fixture(scope="module")
def trial(model: PreparedModel) -> Iterator[TrialProcess]:
    """One for all tests: starting it takes seconds."""
    process = TrialProcess(model)
    yield process
    process.close()


def refusal(trial: TrialProcess, grammar: Grammar, limit_s: float = LIMIT_S) -> str:
    with pytest.raises(KvferryError) as refused:
        trial.check(grammar, limit_s)
    assert refused.value.code == ErrorCode.INVALID_REQUEST
    assert refused.value.field == (grammar.field or "grammar")
    return refused.value.message


def test_a_good_grammar_passes(trial: TrialProcess) -> None:
    trial.check(GOOD, LIMIT_S)
    trial.check(Grammar(kind=Grammar.JSON_OBJECT), LIMIT_S)
    trial.check(Grammar(kind=Grammar.EBNF, text='root ::= "a" root | "b"'), LIMIT_S)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (Grammar.REGEX, "[", "Unclosed"),
        (Grammar.REGEX, r"(a)\1", "Backreference"),
        (Grammar.REGEX, "a(?=b)", "Lookahead"),
        (Grammar.EBNF, "root ::= ", "EBNF parser error"),
        (Grammar.EBNF, 'other ::= "a"', "root"),
        (Grammar.EBNF, "root ::= root", "no token"),
        (Grammar.EBNF, 'root ::= "a" x\nx ::= x', "no token"),
        (Grammar.JSON_SCHEMA, '{"$ref":"#"}', "Circular"),
        (Grammar.JSON_SCHEMA, '{"type":"string","minLength":3,"maxLength":2}', "minLength"),
        (Grammar.JSON_SCHEMA, '{"type":"string","pattern":"["}', "Unclosed"),
    ],
)
def test_what_only_the_compiler_can_tell_is_told(
    trial: TrialProcess, kind: "Grammar.Kind.ValueType", text: str, reason: str
) -> None:
    message = refusal(trial, Grammar(kind=kind, text=text))
    assert reason in message
    assert ".cc" not in message


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_passes(trial: TrialProcess) -> None:
    assert "too long" in refusal(trial, ENDLESS, 0.2)
    trial.check(GOOD, LIMIT_S)


def test_a_child_that_dies_during_a_check_is_an_error_of_ours_and_another_takes_its_place(trial: TrialProcess) -> None:
    trial.check(GOOD, LIMIT_S)
    assert trial.pid is not None
    killer = threading.Timer(0.1, os.kill, (trial.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(KvferryError) as lost:
        trial.check(ENDLESS, LIMIT_S)
    killer.join()
    assert lost.value.code == ErrorCode.INTERNAL


async def test_constraints_of_one_model(model: PreparedModel, trial: TrialProcess) -> None:
    compiler = GrammarCompiler(model, trial)
    try:
        # Several at once: the first starts and compiles for all.
        states = await asyncio.gather(*(compiler.constraint(GOOD) for _ in range(4)))
        masks = [state.allowed() for state in states]
        assert all(mask is not None and (mask == masks[0]).all() for mask in masks)
        assert len({id(mask) for mask in masks}) == 4
        with pytest.raises(KvferryError, match="cannot be compiled"):
            await compiler.constraint(Grammar(kind=Grammar.REGEX, text="["))
        # What an earlier attempt brought is replayed; what it cannot have brought is refused.
        a, b = (model_tokens(model).index(char) for char in (b"a", b"b"))
        behind = await compiler.constraint(GOOD, [a])
        states[0].advance(a)
        assert behind.allowed() is not None
        assert (behind.allowed() == states[0].allowed()).all()  # type: ignore[union-attr]
        with pytest.raises(KvferryError) as refused:
            await compiler.constraint(GOOD, [a, b, a])
        assert refused.value.field == "num_output_tokens"
        leaver = asyncio.create_task(compiler.constraint(Grammar(kind=Grammar.REGEX, text="c+")))
        await asyncio.sleep(0)
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        await compiler.constraint(GOOD)
    finally:
        compiler.close()
    with pytest.raises(KvferryError) as closed:
        await compiler.constraint(Grammar(kind=Grammar.REGEX, text="d"))
    assert closed.value.code == ErrorCode.UNAVAILABLE


async def test_without_xgrammar_a_grammar_is_refused_with_what_to_install(
    model: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    compiler = GrammarCompiler(model)
    with pytest.raises(KvferryError, match=r"kvferry\[structured\]") as refused:
        await compiler.constraint(Grammar(kind=Grammar.REGEX, text="a", field="structured_outputs.regex"))
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "structured_outputs.regex")
    compiler.close()


async def test_a_model_without_an_end_of_text_takes_no_grammar(model: PreparedModel) -> None:
    compiler = GrammarCompiler(replace(model, eos_token_ids=frozenset()))
    with pytest.raises(KvferryError, match="no end-of-text token"):
        await compiler.constraint(GOOD)
    compiler.close()


def model_tokens(model: PreparedModel) -> tuple[bytes, ...]:
    paths = model.tokenizer_path, model.tokenizer_config_path
    return read_vocabulary(*paths, vocab_size=4032, eos_token_ids=model.eos_token_ids).tokens
