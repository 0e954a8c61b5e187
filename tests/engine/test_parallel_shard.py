"""What each rank has of a model: nothing is lost, nothing is there twice but what must be."""

import pytest
import torch
from torch import Tensor

from engine.attention.interface import LayerAttention
from engine.model_config import ExpertsConfig, ModelConfig, ModelShape, RopeConfig
from engine.parallel.shard import Shard, check_split, possible_sizes
from engine.tensor_map import prepared_tensors
from kv_cache.layout import KVCacheLayout, KVDtype
from runtime.errors import KvferryError

HEAD_DIM = 4


def config(q_heads: int = 8, kv_heads: int = 2, **changes: object) -> ModelConfig:
    values = {
        "family": "llama",
        "vocab_size": 21,
        "hidden_size": 12,
        "intermediate_size": 16,
        "num_layers": 2,
        "num_q_heads": q_heads,
        "num_kv_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_context_tokens": 64,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "attention": (LayerAttention(0.5),) * 2,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "qk_norm": True,
        "out_norms": True,
        **changes,
    }
    return ModelConfig(**values)  # type: ignore[arg-type]


def tensors(of: ModelConfig) -> dict[str, Tensor]:
    """Every number of a model is another one."""
    shapes = {tensor.name: tensor.shape for tensor in prepared_tensors(of)}
    counts = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = torch.arange(sum(counts), dtype=torch.float32).split(counts)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def shards(of: ModelConfig, size: int) -> list[dict[str, Tensor]]:
    return [Shard(of, rank, size).weights(tensors(of)) for rank in range(size)]


def blocks(tensor: Tensor, *rows: int) -> tuple[Tensor, ...]:
    return tensor.split(list(rows))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_all_ranks_make_the_whole(size: int, tied: bool) -> None:
    model = config(kv_heads=4, tied_embeddings=tied)
    whole, parts = tensors(model), shards(model, size)
    q, kv, inner = 8 * HEAD_DIM // size, 4 * HEAD_DIM // size, 16 // size
    for layer in ("layers.0.", "layers.1."):
        for kind in ("weight", "bias"):
            pieces = zip(*(blocks(part[f"{layer}qkv.{kind}"], q, kv, kv) for part in parts), strict=True)
            assert torch.equal(torch.cat([torch.cat(piece) for piece in pieces]), whole[f"{layer}qkv.{kind}"])
            halves = zip(*(blocks(part[f"{layer}gate_up.{kind}"], inner, inner) for part in parts), strict=True)
            assert torch.equal(torch.cat([torch.cat(half) for half in halves]), whole[f"{layer}gate_up.{kind}"])
        for name in ("attention_out", "down"):
            columns = [part[f"{layer}{name}.weight"] for part in parts]
            assert all(piece.is_contiguous() for piece in columns)
            assert torch.equal(torch.cat(columns, dim=1), whole[f"{layer}{name}.weight"])
    lm_head = whole["embed.weight" if tied else "lm_head.weight"]
    assert torch.equal(torch.cat([part["lm_head.weight"] for part in parts]), lm_head)


def test_a_bias_of_a_sum_is_added_by_one_rank() -> None:
    first, second = shards(config(), 2)
    for name in ("layers.0.attention_out.bias", "layers.1.down.bias"):
        assert torch.equal(first[name], tensors(config())[name])
        assert name not in second


def test_norms_embedding_and_lm_head_are_views_of_the_file() -> None:
    whole = tensors(config())
    part = Shard(config(), 1, 2).weights(whole)
    for name in ("embed.weight", "final_norm.weight", "layers.1.mlp_out_norm.weight", "layers.0.k_norm.weight"):
        assert part[name] is whole[name]
    assert part["lm_head.weight"].untyped_storage().data_ptr() == whole["lm_head.weight"].untyped_storage().data_ptr()


def test_ranks_beyond_the_kv_heads_share_them() -> None:
    model = config(q_heads=8, kv_heads=2)
    ranks = [Shard(model, rank, 4) for rank in range(4)]
    assert [shard.kv_heads for shard in ranks] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [shard.q_heads for shard in ranks] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert all(shard.replicates for shard in ranks)
    keys = [blocks(part["layers.0.qkv.weight"], 2 * HEAD_DIM, HEAD_DIM, HEAD_DIM)[1] for part in shards(model, 4)]
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(torch.cat((keys[0], keys[2])), tensors(model)["layers.0.qkv.weight"][32:40])
    assert not Shard(model, 0, 2).replicates


def test_int8_scales_follow_their_rows_and_stay_whole_for_columns() -> None:
    model = config()
    whole = {
        "layers.0.qkv.scales": torch.arange(12.0 * HEAD_DIM),
        "layers.0.gate_up.scales": torch.arange(32.0),
        "layers.0.down.scales": torch.arange(12.0),
        "lm_head.scales": torch.arange(21.0),
    }
    part = Shard(model, 1, 2).weights(whole)
    assert part["layers.0.qkv.scales"].tolist() == [*range(16, 32), *range(36, 40), *range(44, 48)]
    assert part["layers.0.gate_up.scales"].tolist() == [*range(8, 16), *range(24, 32)]
    assert part["layers.0.down.scales"].tolist() == list(range(12))
    assert part["lm_head.scales"].tolist() == list(range(11, 21))


def test_each_rank_has_a_share_of_every_expert_and_the_whole_router() -> None:
    experts = ExpertsConfig(3, 2, 6, True, frozenset({1}))
    model = config(experts=experts, mlp_bias=False)
    whole = tensors(model)
    parts = [Shard(model, rank, 2).weights(whole) for rank in range(2)]
    for part in parts:
        assert part["layers.1.router.weight"] is whole["layers.1.router.weight"]
        assert part["layers.1.experts.2.gate_up.weight"].shape == (6, 12)
    down = [part["layers.1.experts.2.down.weight"] for part in parts]
    assert torch.equal(torch.cat(down, dim=1), whole["layers.1.experts.2.down.weight"])
    assert possible_sizes(config(experts=experts)) == (1, 2)


def test_a_vocabulary_that_does_not_divide_leaves_the_last_rank_less() -> None:
    assert [Shard(config(), rank, 4).vocab for rank in range(4)] == [
        range(6),
        range(6, 12),
        range(12, 18),
        range(18, 21),
    ]
    assert Shard(config(vocab_size=3), 3, 4).vocab == range(3, 3)


def test_the_decoder_of_a_rank_has_its_own_shape() -> None:
    part = Shard(config(tied_embeddings=True), 1, 4).config
    assert (part.num_q_heads, part.num_kv_heads, part.intermediate_size, part.vocab_size) == (2, 1, 4, 21)
    assert not part.tied_embeddings


@pytest.mark.parametrize(
    ("heads", "sizes"), [((8, 2), (1, 2, 4, 8)), ((9, 3), (1,)), ((6, 2), (1, 2)), ((16, 1), (1, 2, 4, 8, 16))]
)
def test_a_model_splits_only_so_that_all_ranks_have_as_much(heads: tuple[int, int], sizes: tuple[int, ...]) -> None:
    assert possible_sizes(config(*heads)) == sizes


def test_a_size_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(KvferryError, match=r"8 attention heads, 2 kv heads .* 3 ranks: --tensor-parallel may be 1, 2"):
        check_split(config(), 3)


def test_a_model_without_native_code_is_not_split() -> None:
    shape = ModelShape(
        family="phi",
        vocab_size=21,
        num_layers=1,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=4,
        max_context_tokens=64,
        attention=(LayerAttention(0.5),),
    )
    assert possible_sizes(shape) == (1,)
    check_split(shape, 1)
    with pytest.raises(KvferryError, match="a phi runs through transformers and cannot be split"):
        check_split(shape, 2)


def test_a_tensor_that_nobody_knows_is_refused() -> None:
    with pytest.raises(KvferryError, match=r"cannot split layers\.0\.gadget\.weight over 2 ranks"):
        Shard(config(), 0, 2).weights({"layers.0.gadget.weight": torch.zeros(4)})


def test_a_rank_with_memory_of_its_own_has_a_layout_of_its_heads() -> None:
    whole = KVCacheLayout("m", "r", 2, 2, HEAD_DIM, 8, KVDtype.INT8)
    layouts = [Shard(config(), rank, 4).layout(whole) for rank in range(4)]
    assert [layout.shard for layout in layouts] == ["0..0", "0..0", "1..1", "1..1"]
    assert {layout.model_kv_heads for layout in layouts} == {2}
    assert layouts[0].v_offset == whole.v_offset // 2
