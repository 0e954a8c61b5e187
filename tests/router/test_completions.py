"""`/v1/completions`: prompts that come back and are scored, prompts alone, the best of several answers; and vLLM's
`prompt_logprobs` on both endpoints."""

from typing import Any

import pytest

from kvferry_rpc.common_pb2 import FinishReason
from tests.support.http_door import Door, chat_body, completion_body, events, ids_of, says, tokenizer
from tests.support.scripted_source import Finish

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "Once upon é time"
SPECIAL = "<|user|>"


def logprob(token_id: int) -> float:
    """What the scripted source says."""
    return -1 / (1 + token_id % 7)


def check_lists(logprobs: dict[str, Any], text: str, token_ids: list[int], *, alternatives: int) -> None:
    """The four lists of an echoed prompt and its answer: an entry for each token, and offsets that lie in the text."""
    assert {len(values) for values in logprobs.values()} == {len(token_ids)}
    assert logprobs["tokens"] == [tokenizer().token_text(token_id) for token_id in token_ids]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx([logprob(token_id) for token_id in token_ids[1:]])
    for name, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert name in top
        assert len(top) <= max(1, alternatives)
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "\ufffd" not in name:
            assert text[offset : offset + len(name)] == name


@pytest.mark.parametrize("prompt", [PROMPT, ids_of(PROMPT)], ids=["text", "ids"])
@pytest.mark.parametrize("alternatives", [0, 2])
async def test_an_echo_has_logprobs_of_prompt_and_answer(prompt: Any, alternatives: int) -> None:
    door = Door(says(" there was"))
    body = (await door.post(COMPLETIONS, completion_body(prompt=prompt, echo=True, logprobs=alternatives))).json()
    (choice,) = body["choices"]
    assert choice["text"] == PROMPT + " there was"
    check_lists(choice["logprobs"], choice["text"], ids_of(PROMPT) + ids_of(" there was"), alternatives=alternatives)
    (request,) = door.source.requests
    assert (request.sampling.num_logprobs, request.sampling.prompt_logprobs) == (alternatives, alternatives)
    assert "prompt_logprobs" not in choice


async def test_prompts_and_choices_each_have_their_own_echo() -> None:
    door = Door(says("!"))
    prompts = ["a b", "c"]
    body = (await door.post(COMPLETIONS, completion_body(prompt=prompts, n=2, echo=True, logprobs=1))).json()
    for choice, prompt in zip(body["choices"], ["a b", "a b", "c", "c"], strict=True):
        assert choice["text"] == prompt + "!"
        check_lists(choice["logprobs"], choice["text"], ids_of(prompt) + ids_of("!"), alternatives=1)
    assert body["usage"]["prompt_tokens"] == sum(len(ids_of(prompt)) for prompt in prompts)


async def test_a_streamed_echo_has_the_logprobs_of_the_whole_answer() -> None:
    whole = Door(says(" there was a cat"))
    fields = completion_body(prompt=PROMPT, echo=True, logprobs=2)
    (expected,) = (await whole.post(COMPLETIONS, fields)).json()["choices"]
    *chunks, done = events((await whole.post(COMPLETIONS, {**fields, "stream": True})).content)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    for name, values in expected["logprobs"].items():
        assert [value for choice in choices if choice["logprobs"] for value in choice["logprobs"][name]] == values


async def test_special_tokens_of_a_prompt_are_not_in_the_text_that_offsets_count_in() -> None:
    special = tokenizer().encode(SPECIAL)
    assert len(special) == 1
    token_ids = [*special, *ids_of("Hi"), *special, *ids_of(" you")]
    door = Door(says("!"))
    body = (await door.post(COMPLETIONS, completion_body(prompt=token_ids, echo=True, logprobs=0))).json()
    (choice,) = body["choices"]
    assert choice["text"] == "Hi you!"
    lists = choice["logprobs"]
    offsets = list(zip(lists["tokens"], lists["text_offset"], strict=True))
    assert [offset for name, offset in offsets if name == SPECIAL] == [0, 2]
    assert all(choice["text"][offset:].startswith(name) for name, offset in offsets if name != SPECIAL)
    assert offsets[-1] == ("!", 6)
    # The same as text: with logprobs the echo is what its tokens read.
    text = f"{SPECIAL}Hi{SPECIAL} you"
    body = (await door.post(COMPLETIONS, completion_body(prompt=text, echo=True, logprobs=0))).json()
    assert body["choices"][0]["text"] == "Hi you!"
    assert (await door.post(COMPLETIONS, completion_body(prompt=text, echo=True))).json()["choices"][0]["text"] == (
        text + "!"
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_no_tokens_and_an_echo_score_the_prompt_alone(stream: bool, logprobs: int | None) -> None:
    """The worker's own token is dropped, whatever it is."""
    door = Door(lambda _: [ids_of(" never"), Finish(FinishReason.STOP)])
    fields = completion_body(prompt=PROMPT, echo=True, max_tokens=0, logprobs=logprobs)
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage_chunk, _ = events((await door.post(COMPLETIONS, fields)).content)
        choices, usage = [chunk["choices"][0] for chunk in chunks], usage_chunk["usage"]
    else:
        body = (await door.post(COMPLETIONS, fields)).json()
        choices, usage = body["choices"], body["usage"]
    assert "".join(choice["text"] for choice in choices) == PROMPT
    assert choices[-1]["finish_reason"] == "length"
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, len(ids_of(PROMPT)))
    lists = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert len(lists) == (logprobs is not None)
    for found in lists:
        check_lists(found, PROMPT, ids_of(PROMPT), alternatives=1)
    assert door.source.requests[0].sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("fields", "blamed"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"max_tokens": 0, "echo": True, "best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 9, "prompt": ["a", "b"]}, "best_of"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"suffix": "x"}, "suffix"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], blamed: str) -> None:
    answer = await Door(says("!")).post(COMPLETIONS, completion_body(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, blamed)


async def test_a_chat_cannot_be_scored_alone() -> None:
    answer = await Door(says("!")).post(CHAT, chat_body(max_tokens=0))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


async def test_prompt_logprobs_come_in_the_form_of_vllm() -> None:
    door = Door(says("!"))
    prompt = ids_of("Once upon")
    (choice,) = (await door.post(COMPLETIONS, completion_body(prompt=prompt, prompt_logprobs=2))).json()["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert choice["logprobs"] is None
    for token_id, entry in zip(prompt[1:], rest, strict=True):
        # The scripted source's alternatives begin with the token itself.
        assert list(entry) == [str(token_id), str(token_id + 1)]
        assert entry[str(token_id)] == {
            "logprob": pytest.approx(logprob(token_id)),
            "rank": 1,
            "decoded_token": tokenizer().token_text(token_id),
        }
        assert entry[str(token_id + 1)]["rank"] == 2


async def test_those_of_a_chat_belong_to_the_whole_answer() -> None:
    door = Door(says("Hello"))
    body = (await door.post(CHAT, chat_body(prompt_logprobs=0, n=2))).json()
    prompt = door.source.requests[0].prompt_token_ids
    assert len(body["prompt_logprobs"]) == len(prompt)
    assert [list(entry) for entry in body["prompt_logprobs"][1:]] == [[str(token_id)] for token_id in prompt[1:]]
    assert "prompt_logprobs" not in (await door.post(CHAT, chat_body())).json()


async def test_both_forms_at_once_have_the_alternatives_that_each_asked_for() -> None:
    door = Door(says("!"))
    fields = completion_body(prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=3)
    (choice,) = (await door.post(COMPLETIONS, fields)).json()["choices"]
    assert door.source.requests[0].sampling.prompt_logprobs == 3
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {1}
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {3}


async def test_the_best_answers_are_those_whose_tokens_were_likeliest() -> None:
    """The scripted log probabilities hang on the token id alone: id % 7 == 6 is likeliest."""
    by_rank = sorted(range(300, 307), key=lambda token_id: token_id % 7)
    answers = {seed: [token_id] * 3 for seed, token_id in enumerate([by_rank[2], by_rank[6], by_rank[0], by_rank[4]])}
    door = Door(lambda request: [answers[request.sampling.seed % 10]])
    fields = completion_body(prompt="x", n=2, best_of=4, seed=0, kv_receipt=True)
    body = (await door.post(COMPLETIONS, fields)).json()
    texts = [tokenizer().decode(answers[seed]) for seed in (1, 3)]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, texts[0]), (1, texts[1])]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    # All that was generated is paid for; the receipt is that of the first answer returned.
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == len(ids_of("x"))
    assert body["kv_receipt"]["request_id"].endswith("-1")


async def test_the_best_are_chosen_for_each_prompt_with_its_echo() -> None:
    door = Door(lambda request: [[306 if request.sampling.seed % 2 else 301]])
    fields = completion_body(prompt=["a b", "c"], best_of=2, seed=0, echo=True, logprobs=0)
    body = (await door.post(COMPLETIONS, fields)).json()
    best = max((306, 301), key=lambda token_id: logprob(token_id))
    assert [choice["text"] for choice in body["choices"]] == [p + tokenizer().decode([best]) for p in ("a b", "c")]
    for choice, prompt in zip(body["choices"], ["a b", "c"], strict=True):
        check_lists(choice["logprobs"], choice["text"], [*ids_of(prompt), best], alternatives=1)


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], ["a", ""], [[]], [[1], []], [[-1]], [-1], [[1], "a"], [1.5], ["a"] * 10_000, [[1]] * 10_000],
    ids=lambda prompt: repr(prompt)[:20],
)  # fmt: skip
async def test_prompts_that_are_none_are_refused_before_anything_runs(prompt: Any) -> None:
    door = Door(says("!"))
    answer = await door.post(COMPLETIONS, completion_body(prompt=prompt))
    assert (answer.status_code, answer.json()["error"]["param"].partition("[")[0]) == (400, "prompt")
    assert not door.source.requests


async def test_two_prompts_of_token_ids_have_a_choice_each() -> None:
    body = (await Door(says("!")).post(COMPLETIONS, completion_body(prompt=[[1, 2], [3]]))).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
