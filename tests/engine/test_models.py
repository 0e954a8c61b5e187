"""Logits of the native decoder against transformers, on tiny random checkpoints of every supported variant."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from engine.attention.torch_paged import TorchAttention
from engine.batch import BatchRow, build_batch
from engine.model_config import RopeConfig
from engine.model_runner import Model
from engine.models import load_model
from engine.models.rotary import RotaryTable
from engine.ops.torch_ops import TorchOps
from engine.paged_cache import PagedCache
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel
from kv_cache.layout import KVCacheLayout, KVDtype
from tests.support.tiny_checkpoints import VARIANTS, make_model, randomise, save_checkpoint, write_tokenizer

_BLOCK_SIZE = 8
_TOKENS = [int(token) for token in torch.randint(3, 96, (61,), generator=torch.Generator().manual_seed(5))]
_TABLE = [7, 2, 9, 4, 1, 8, 3, 6]  # blocks of one sequence, in no order


class _Session:
    """A model with a small pool, in which several sequences can be computed piece by piece."""

    def __init__(self, prepared: PreparedModel) -> None:
        config = prepared.config
        layout = KVCacheLayout(
            model_id=prepared.name,
            model_revision=prepared.revision,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=_BLOCK_SIZE,
            dtype=KVDtype.FP32,
        )
        self.model: Model = load_model(prepared, TorchOps())
        self.attention = TorchAttention(PagedCache(layout, num_blocks=24), prepared.config.attention)
        self.layers_announced: list[int] = []

    @torch.inference_mode()
    def step(self, *rows: BatchRow) -> Tensor:
        """Logits of all tokens of the step, in the order of the given rows."""
        batch = build_batch(rows, _BLOCK_SIZE)
        logits = self.model.logits(self.model.forward(batch, self.attention, self.layers_announced.append))
        pieces = dict(zip(batch.row_order, logits.split(list(batch.query_lens)), strict=True))
        return torch.cat([pieces[index] for index in range(len(rows))])


def _prepare(tmp_path: Path, variant: str) -> tuple[Tensor, PreparedModel]:
    model = make_model(variant)
    prepared = prepare_model(save_checkpoint(tmp_path / variant, model), tmp_path / "cache", lambda *_: None)
    with torch.inference_mode():
        expected = model(torch.tensor([_TOKENS])).logits[0]
    return expected, prepared


def _assert_equal_logits(actual: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.3, "logits this flat would prove nothing"
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(tmp_path: Path, variant: str) -> None:
    expected, prepared = _prepare(tmp_path, variant)
    in_one_piece = _Session(prepared).step(BatchRow(_TOKENS, 0, _TABLE))
    _assert_equal_logits(in_one_piece, expected)

    session = _Session(prepared)
    chunks = [_TOKENS[:13], _TOKENS[13:30]]
    pieces = [session.step(BatchRow(chunk, start, _TABLE)) for chunk, start in zip(chunks, (0, 13), strict=True)]
    pieces += [session.step(BatchRow([_TOKENS[at]], at, _TABLE)) for at in range(30, len(_TOKENS))]
    _assert_equal_logits(torch.cat(pieces), expected)


def test_the_text_part_of_a_gemma_3_that_also_sees_images_is_found_inside_its_checkpoint(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=make_model("gemma3").config.to_dict(), vision_config={**vision, "image_size": 14, "patch_size": 14}
    )
    config.text_config.vocab_size = 96
    model = randomise(Gemma3ForConditionalGeneration(config))
    source = tmp_path / "m"
    model.save_pretrained(source)
    write_tokenizer(source, 96)
    prepared = prepare_model(source, tmp_path / "cache", lambda *_: None)
    assert (prepared.config.family, len(prepared.tensor_forms())) == ("gemma3", 2 + 3 * 10)
    with torch.inference_mode():
        expected = model(torch.tensor([_TOKENS])).logits[0]
    _assert_equal_logits(_Session(prepared).step(BatchRow(_TOKENS, 0, _TABLE)), expected)


def test_a_token_gets_the_same_experts_and_sum_whatever_else_is_in_the_batch(tmp_path: Path) -> None:
    _, prepared = _prepare(tmp_path, "qwen3_moe")
    alone = _Session(prepared).step(BatchRow(_TOKENS[:9], 0, [1, 2]))
    others = [BatchRow(_TOKENS[at : at + 5], 0, [3 + at // 5]) for at in range(10, 40, 5)]
    beside = _Session(prepared).step(BatchRow(_TOKENS[:9], 0, [1, 2]), *others)[:9]
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=0)


def test_sequences_in_one_batch_do_not_see_each_other(tmp_path: Path) -> None:
    model = make_model("llama_gqa")
    prepared = prepare_model(save_checkpoint(tmp_path / "m", model), tmp_path / "cache", lambda *_: None)
    prompts: Sequence[list[int]] = (_TOKENS[:20], _TOKENS[30:37], _TOKENS[11:14])
    tables = ([1, 2, 3], [4], [5])
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]

    session = _Session(prepared)
    session.step(BatchRow(prompts[0][:19], 0, tables[0]))
    mixed = session.step(
        BatchRow(prompts[0][19:], 19, tables[0]), BatchRow(prompts[1], 0, tables[1]), BatchRow(prompts[2], 0, tables[2])
    )
    _assert_equal_logits(mixed, torch.cat((expected[0][19:], expected[1], expected[2])))


def test_each_layer_is_announced_once_after_its_kv_is_stored(tmp_path: Path) -> None:
    _, prepared = _prepare(tmp_path, "llama_gqa")
    session = _Session(prepared)
    calls: list[str] = []

    class Recorder:
        def store(self, layer: int, k: Tensor, v: Tensor, batch: object) -> None:
            raise AssertionError("nothing rotates k")

        def rotate_and_store(self, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, batch: object) -> None:
            calls.append(f"store {layer}")
            assert (qk.shape, v.shape, rotation.shape) == ((5, 8, 8), (5, 2, 8), (5, 8))

        def attend(self, layer: int, q: Tensor, batch: object) -> Tensor:
            calls.append(f"attend {layer}")
            assert q.shape == (5, 6, 8)
            return torch.zeros(5, 48)

    batch = build_batch([BatchRow(_TOKENS[:5], 0, [1])], _BLOCK_SIZE)
    hidden = session.model.forward(batch, Recorder(), lambda layer: calls.append(f"announce {layer}"))
    assert calls == [f"{call} {layer}" for layer in (0, 1) for call in ("store", "announce", "attend")]
    assert hidden.shape == (5, 48)
    assert session.model.logits(hidden[:2]).dtype == torch.float32


def test_the_norm_is_the_root_mean_square_norm_also_for_tiny_and_huge_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, generator=generator)
    for scale in (0.0, 1e-6, 1.0, 1e6):
        x = scale * torch.randn(7, 48, generator=generator)
        expected = torch.nn.functional.rms_norm(x.double(), (48,), weight.double(), 1e-5).float()
        torch.testing.assert_close(TorchOps().rms_norm(x, weight, 1e-5), expected, atol=1e-6, rtol=2e-6)


def test_a_position_turns_by_the_same_numbers_however_the_table_grew() -> None:
    far_first, step_by_step = RotaryTable(RopeConfig(), 16), RotaryTable(RopeConfig(), 16)
    far = far_first.rows(torch.tensor([5000, 3]), 5001)
    assert step_by_step.rows(torch.tensor([3]), 4).shape == (1, 16)
    step_by_step.rows(torch.tensor([2500]), 2501)
    near = step_by_step.rows(torch.tensor([5000, 3]), 5001)
    assert torch.equal(far, near)
