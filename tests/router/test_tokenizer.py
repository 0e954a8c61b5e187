"""Token ids and text are those of transformers, from any number of threads, and nothing runs on the event loop."""

import asyncio
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import AutoTokenizer

from kvferry_rpc.common_pb2 import ErrorCode
from router.text.tokenizer import AsyncTokenizer, Tokenizer
from runtime.errors import KvferryError
from runtime.token_pieces import DecoderKind
from tests.support.tiny_tokenizers import (
    TINY_REAL,
    sentencepiece,
    sentencepiece_backend,
    short_prompts,
    tiny_real,
    write_sentencepiece_model,
)

CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "¿Qué tal? 🚢"},
]


@cache
def reference() -> Any:
    return AutoTokenizer.from_pretrained(TINY_REAL)


def copy_model(directory: Path, *, without: tuple[str, ...] = ()) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        if name not in without:
            shutil.copyfile(TINY_REAL / name, directory / name)
    return directory


def refused(field: str) -> Any:
    return pytest.raises(KvferryError, match=f"^{field} ")


# --- the same ids and text as transformers --------------------------------------------------------------------------


def test_every_prompt_has_the_ids_and_the_text_of_transformers() -> None:
    for prompt in short_prompts():
        ids = tiny_real().encode(prompt)
        assert ids == reference()(prompt)["input_ids"]
        expected = reference().decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tiny_real().decode(ids) == expected == prompt


def test_every_prompt_as_a_chat_has_the_ids_of_transformers() -> None:
    conversations = [[{"role": "user", "content": prompt}] for prompt in short_prompts()]
    for messages in [*conversations, CHAT]:
        expected = reference().apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert tiny_real().encode_chat(messages) == expected


@given(st.lists(st.integers(0, 4031), max_size=30), st.booleans())
@settings(deadline=None, max_examples=60)
def test_any_ids_have_the_text_of_transformers(ids: list[int], skip: bool) -> None:
    expected = reference().decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert tiny_real().decode(ids, skip_special_tokens=skip) == expected


def test_a_start_token_is_added_to_plain_text_and_not_doubled_in_chats(tmp_path: Path) -> None:
    directory = write_sentencepiece_model(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    ours, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "text"}]
    assert ours.encode("text") == theirs("text")["input_ids"] == [1, *ours.encode("text", add_special_tokens=False)]
    chat = ours.encode_chat(messages)
    assert chat == theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert (chat.count(1), chat.count(2)) == (1, 1)


def test_special_token_text_in_a_message_becomes_the_special_token_as_in_transformers() -> None:
    ids = tiny_real().encode_chat([{"role": "user", "content": "a<|end|>b"}])
    assert ids.count(5) == 1
    assert reference()("a<|end|>b")["input_ids"] == tiny_real().encode("a<|end|>b")


def test_a_special_token_that_only_the_settings_name_is_added_as_in_transformers(tmp_path: Path) -> None:
    directory = copy_model(tmp_path)
    settings_path = directory / "tokenizer_config.json"
    content = json.loads(settings_path.read_text())
    content["mask_token"] = {"content": "<|mask|>", "__type": "AddedToken"}
    content["extra_special_tokens"].append("<|tool|>")
    settings_path.write_text(json.dumps(content))
    ours, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    text = "a <|mask|> b <|tool|> c"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text)) == "a  b  c"
    assert ours.vocab_size == 4034


def test_truncation_and_padding_stored_in_the_file_are_off_as_in_transformers(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(TINY_REAL / "tokenizer.json"))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64)
    backend.save(str(copy_model(tmp_path) / "tokenizer.json"))
    text = "one two three four five six seven"
    assert Tokenizer.load(tmp_path).encode(text) == reference()(text)["input_ids"]


# --- single tokens --------------------------------------------------------------------------------------------------


def test_the_bytes_of_tokens_join_to_the_bytes_of_the_text() -> None:
    for prompt in short_prompts():
        ids = tiny_real().encode(prompt)
        assert b"".join(tiny_real().token_bytes(token_id) for token_id in ids) == prompt.encode()


def test_a_part_of_a_character_shows_as_a_replacement_mark_with_its_true_bytes() -> None:
    ids = tiny_real().encode("🚢")
    assert len(ids) > 1
    assert tiny_real().token_text(ids[0]) == "\ufffd"
    assert tiny_real().token_bytes(ids[0]) == "🚢".encode()[: len(tiny_real().token_bytes(ids[0]))]


def test_tokens_show_spaces_and_special_tokens_show_their_names() -> None:
    (token_id,) = tiny_real().encode(" the")
    assert tiny_real().token_text(token_id) == " the"
    assert tiny_real().token_text(5) == "<|end|>"
    assert [sentencepiece().token_text(token_id) for token_id in sentencepiece().encode("the.")[1:]][:1] == [" "]
    assert sentencepiece().token_bytes(3 + 0xE2) == b"\xe2"


@pytest.mark.parametrize("token_id", [-1, 4032, 10**9, 2**40])
def test_an_id_without_a_token_has_no_text(token_id: int) -> None:
    assert tiny_real().token_bytes(token_id) == b""
    assert tiny_real().token_text(token_id) == ""


def test_what_cannot_be_a_token_id_is_refused_by_decode() -> None:
    assert tiny_real().decode([4032, 10**9]) == ""
    with refused("tokens"):
        tiny_real().decode([-1])
    with refused("tokens"):
        tiny_real().decode([2**40])


# --- what is refused ------------------------------------------------------------------------------------------------


def test_invalid_text_is_refused_by_name() -> None:
    with refused("prompt"):
        tiny_real().encode("\ud800")
    with refused("suffix"):
        tiny_real().encode("x\udc80", field="suffix")
    with refused(r"messages\[0\]\.content"):
        tiny_real().encode_chat([{"role": "user", "content": "\ud800"}])


def test_a_model_without_a_template_refuses_chats_only() -> None:
    assert not sentencepiece().has_chat_template
    assert sentencepiece().encode("text")
    with refused("messages"):
        sentencepiece().encode_chat(CHAT)


# --- loading --------------------------------------------------------------------------------------------------------


def test_the_limits_come_from_the_model_files() -> None:
    tokenizer = tiny_real()
    assert tokenizer.eos_token_ids == {5}
    assert tokenizer.max_context_tokens == 4096
    assert tokenizer.vocab_size == 4032
    assert tokenizer.has_chat_template
    assert tokenizer.pieces.kind is DecoderKind.BYTE_LEVEL


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, {3, 4}),
        ({}, {"eos_token_id": 5}, {5}),
        ({"eos_token_id": None}, {"eos_token_id": [6]}, {6}),
        ({}, {}, set()),
    ],
)
def test_the_generation_config_names_the_end_of_text_before_the_config(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], expected: set[int]
) -> None:
    copy_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == expected
    assert tokenizer.max_context_tokens is None


@pytest.mark.parametrize("as_list", [False, True])
def test_a_template_in_the_settings_is_used_when_there_is_no_file(tmp_path: Path, as_list: bool) -> None:
    copy_model(tmp_path, without=("chat_template.jinja",))
    template = "{{ messages[0].content }}!"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named if as_list else template}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode_chat(CHAT[:1]) == tokenizer.encode("Hello!")


def test_a_tokenizer_file_alone_is_enough(tmp_path: Path) -> None:
    shutil.copyfile(TINY_REAL / "tokenizer.json", tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("hello") == tiny_real().encode("hello")
    assert not tokenizer.has_chat_template


def test_missing_and_malformed_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
    copy_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="does not compile"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json does not hold"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", left=1)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", left=0, right=1)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip("x", left=1)]),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("▁+"), " "), decoders.Fuse()]),
    ],
)
def test_a_decoder_that_cannot_stream_exactly_is_refused_at_load(decoder: Any) -> None:
    backend = sentencepiece_backend()
    if decoder is None:
        backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    else:
        backend.decoder = decoder
    with pytest.raises(ValueError, match="decoder"):
        Tokenizer(backend)


# --- threads and the event loop -------------------------------------------------------------------------------------


def test_sixteen_threads_get_the_results_of_one() -> None:
    tokenizer = Tokenizer.load(TINY_REAL)
    prompts = short_prompts()
    expected = [(tokenizer.encode(p), tokenizer.encode_chat([{"role": "user", "content": p}])) for p in prompts]

    def work(start: int) -> int:
        calls = 0
        for i in range(120):
            index = (start * 7 + i) % len(prompts)
            ids, chat = expected[index]
            # Different lengths at the same time are what trips a tokenizer that changes itself on each call.
            cut = prompts[index][: 1 + i % 40]
            assert tokenizer.encode(prompts[index]) == ids
            assert tokenizer.encode_chat([{"role": "user", "content": prompts[index]}]) == chat
            assert tokenizer.decode(ids) == prompts[index]
            assert tokenizer.decode(tokenizer.encode(cut)) == cut
            calls += 5
        return calls

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(work, range(16))) == 16 * 600


class Gate:
    """A tokenizer whose calls wait until they are let through, and tell which thread they run on."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.open = threading.Event()
        self.threads: set[str] = set()

    def encode(self, text: str, **options: Any) -> list[int]:
        self.threads.add(threading.current_thread().name)
        self.started.set()
        assert self.open.wait(20)
        return tiny_real().encode(text, **options)


async def test_the_async_tokenizer_gives_the_results_of_the_plain_one() -> None:
    facade = AsyncTokenizer(tiny_real())
    for text in ("Hello, wörld", "Hello, wörld " * 1000):
        ids = await facade.encode(text)
        assert ids == tiny_real().encode(text)
        assert await facade.decode(ids) == text
        chat = [{"role": "user", "content": text}]
        assert await facade.encode_chat(chat) == tiny_real().encode_chat(chat)
    assert await facade.encode_chat(CHAT) == tiny_real().encode_chat(CHAT)
    assert facade.tokenizer is tiny_real()
    with refused("suffix"):
        await facade.encode("\ud800", field="suffix")
    facade.close()


async def test_more_calls_than_the_bound_are_refused_at_once_and_slots_come_back() -> None:
    gate = Gate()
    facade = AsyncTokenizer(gate, num_threads=1, max_pending=3, short_chars=0)  # type: ignore[arg-type]
    running = [asyncio.create_task(facade.encode("a")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(KvferryError) as caught:
        await facade.encode("a")
    assert caught.value.code == ErrorCode.OVERLOADED
    assert caught.value.retry_after_ms > 0
    gate.open.set()
    assert await asyncio.gather(*running) == [tiny_real().encode("a")] * 3
    assert await facade.encode("b") == tiny_real().encode("b")
    assert all(name.startswith("tokenizer") for name in gate.threads)
    facade.close()


async def test_a_cancelled_caller_gives_its_slot_back_once_the_work_is_over() -> None:
    gate = Gate()
    facade = AsyncTokenizer(gate, num_threads=1, max_pending=2, short_chars=0)  # type: ignore[arg-type]
    running, waiting = asyncio.create_task(facade.encode("a")), asyncio.create_task(facade.encode("a"))
    await asyncio.to_thread(gate.started.wait, 20)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open.set()
    assert await running == await facade.encode("a")
    facade.close()


async def test_a_short_text_is_encoded_where_it_is_asked_for_and_a_longer_one_by_a_thread() -> None:
    gate = Gate()
    gate.open.set()
    facade = AsyncTokenizer(gate, short_chars=3)  # type: ignore[arg-type]
    await facade.encode("abc")
    assert gate.threads == {threading.current_thread().name}
    await facade.encode("abcd")
    assert len(gate.threads) == 2
    facade.close()


async def longest_pause_share() -> float:
    """While a long text is encoded: the longest pause of the event loop, as a share of the whole time."""
    facade = AsyncTokenizer(tiny_real())
    started = last = time.perf_counter()
    task = asyncio.create_task(facade.encode("some words in a row 12345 " * 12_000))
    longest = 0.0
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert len(await task) > 12_000
    facade.close()
    return longest / (last - started)


async def test_the_event_loop_runs_on_while_a_long_text_is_encoded() -> None:
    # A native call that kept the GIL would stop the loop for nearly all of the time. A busy machine may stop it too,
    # but hardly three times in a row.
    shares = [await longest_pause_share() for _ in range(3)]
    assert min(shares) < 0.5


async def test_a_closed_async_tokenizer_is_unavailable() -> None:
    facade = AsyncTokenizer(tiny_real())
    facade.close()
    facade.close()
    for text in ("a", "a" * 10_000):
        with pytest.raises(KvferryError) as caught:
            await facade.encode(text)
        assert caught.value.code == ErrorCode.UNAVAILABLE
