"""Sliding windows over a hand-off: models all of whose layers look back a few tokens only, and such beside others.

A hand-off moves the KV of every token, whatever a layer looks at, so both workers have the same blocks for all layers.
"""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.support.pair_checks import TOKENS, TOLERANCE, greedy, largest_difference
from tests.support.tiny_checkpoints import make_model, save_checkpoint
from tests.support.worker_pair import WorkerPair

WINDOW = 13


@pytest.fixture(scope="module", params=["mistral", "gemma3", "qwen3_windows"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = make_model(request.param, seed=3)
    assert model.config.sliding_window == WINDOW
    return model


@pytest.fixture(scope="module")
def checkpoint(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), model)


def test_prompts_around_the_window_have_the_log_probabilities_of_transformers_with_and_without_a_hand_off(
    model: PreTrainedModel, checkpoint: Path, cache: Path
) -> None:
    with WorkerPair(checkpoint, cache) as pair:
        for length in (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW):
            # Each begins with a token of its own, so that none finds another one's blocks.
            prompt = [length, *TOKENS[1:length]]
            moved = pair.run(prompt, greedy())
            assert largest_difference(model, prompt, moved) < TOLERANCE
            assert moved.decode_done is not None
            assert moved.decode_done.checksum_verified
            assert moved.decode_done.tokens_recomputed == 0
            alone = pair.run(prompt, greedy(), local_prefill=True)
            assert alone.token_ids == moved.token_ids


def test_a_prefix_longer_than_the_window_is_found_and_only_the_rest_is_moved(
    model: PreTrainedModel, checkpoint: Path, cache: Path
) -> None:
    prompt = TOKENS[: 3 * WINDOW]
    with WorkerPair(checkpoint, cache) as pair:
        pair.run(prompt, greedy())
        longer = [*prompt, *TOKENS[40:50]]
        again = pair.run(longer, greedy())
    assert again.prefill_done is not None
    assert again.prefill_done.cached_tokens == 32
    assert again.prefill_done.blocks_sent == 3
    assert largest_difference(model, longer, again) < TOLERANCE
