from array import array

import pytest
import torch

from engine.batch import BatchRow, build_batch


def test_single_tokens_come_first_and_every_token_has_its_slot() -> None:
    batch = build_batch(
        [
            BatchRow([10, 11, 12], start=6, block_table=[5, 9]),
            BatchRow([20], start=20, block_table=[1, 2, 3]),
            BatchRow([30], start=0, block_table=[7], wants_logits=0),
        ],
        block_size=8,
    )
    assert batch.row_order == (2, 1, 0)
    assert batch.num_single_rows == 2
    assert (batch.num_tokens, batch.num_rows) == (5, 3)
    assert batch.token_ids.tolist() == [30, 20, 10, 11, 12]
    assert batch.positions.tolist() == [0, 20, 6, 7, 8]
    assert batch.slot_mapping.tolist() == [56, 28, 46, 47, 72]
    assert batch.slot_blocks.tolist() == [7, 3, 5, 5, 9]
    assert batch.slot_offsets.tolist() == [0, 4, 6, 7, 0]
    assert batch.query_start.tolist() == [0, 1, 2, 5]
    assert batch.context_lens.tolist() == [1, 21, 9]
    assert batch.starts == (0, 20, 6)
    assert batch.query_lens == (1, 1, 3)


def test_logits_are_wanted_after_the_last_token_of_a_row() -> None:
    rows = [BatchRow([1, 2], 0, [0]), BatchRow([3], 0, [1], wants_logits=0), BatchRow([4], 3, [2])]
    batch = build_batch(rows, block_size=8)
    assert batch.logits_rows.tolist() == [1, 3]
    assert batch.logits_order == (2, 0)


def test_logits_may_be_wanted_after_several_tokens_of_a_row() -> None:
    rows = [
        BatchRow([1, 2, 3], 0, [0], wants_logits=2),
        BatchRow([4], 0, [1]),
        BatchRow([5, 6], 3, [2], wants_logits=0),
    ]
    batch = build_batch(rows, block_size=8)
    assert batch.token_ids.tolist() == [4, 1, 2, 3, 5, 6]
    assert batch.logits_rows.tolist() == [0, 2, 3]
    assert batch.logits_order == (1, 0, 0)


def test_logits_for_prompts_are_wanted_behind_positions_of_a_row() -> None:
    rows = [BatchRow([1, 2, 3, 4], 8, [0, 3], scored=range(9, 12)), BatchRow([4], 0, [1], scored=range(1))]
    batch = build_batch([*rows, BatchRow([5, 6], 3, [2], scored=range(9, 9))], block_size=8)
    assert batch.token_ids.tolist() == [4, 5, 6, 1, 2, 3, 4]
    assert batch.scored_rows.tolist() == [0, 4, 5, 6]
    with pytest.raises(ValueError, match="does not have the positions"):
        build_batch([BatchRow([1, 2], 8, [0, 3], scored=range(7, 9))], block_size=8)
    with pytest.raises(ValueError, match="does not have the positions"):
        build_batch([BatchRow([1, 2], 8, [0, 3], scored=range(8, 11))], block_size=8)


def test_tables_of_machine_numbers_are_taken_over_like_any() -> None:
    rows = [BatchRow([1], 7, [4, 5, 6]), BatchRow([1, 2, 3], 14, [7, 8, 9, 10])]
    machine = [row._replace(block_table=array("i", row.block_table)) for row in rows]
    plain, fast = build_batch(rows, 8), build_batch(machine, 8)
    assert plain.block_tables.tolist() == fast.block_tables.tolist() == [[4, 4, 4], [7, 8, 9]]
    assert plain.slot_mapping.tolist() == fast.slot_mapping.tolist()
    # A batch keeps no hold on the table: it can grow while the step runs.
    machine[0].block_table.append(11)  # type: ignore[attr-defined]


def test_block_tables_are_cut_to_the_context_and_padded_with_the_own_first_block() -> None:
    rows = [BatchRow([1], 7, [4, 5, 6]), BatchRow([1], 16, [7, 8, 9, 10])]
    batch = build_batch(rows, block_size=8)
    assert batch.block_tables.tolist() == [[4, 4, 4], [7, 8, 9]]


def test_tensors_have_the_promised_types() -> None:
    batch = build_batch([BatchRow([1], 0, [0])], block_size=8)
    for tensor in (batch.token_ids, batch.positions, batch.slot_mapping, batch.slot_blocks, batch.logits_rows):
        assert tensor.dtype == torch.int64
    for tensor in (batch.block_tables, batch.context_lens, batch.query_start):
        assert tensor.dtype == torch.int32


@pytest.mark.parametrize(
    ("start", "length", "opened"),
    [
        (0, 8, []),  # filled to the brim
        (0, 3, [40]),  # first slot written, last not
        (3, 2, []),  # opened by an earlier step
        (3, 5, []),
        (3, 6, [41]),
        (8, 1, [41]),
        (0, 17, [42]),
    ],
)
def test_opened_blocks_are_those_begun_and_not_filled(start: int, length: int, opened: list[int]) -> None:
    batch = build_batch([BatchRow([1] * length, start, [40, 41, 42])], block_size=8)
    assert batch.opened_blocks.tolist() == opened


def test_a_row_without_tokens_or_with_too_few_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        build_batch([], 8)
    with pytest.raises(ValueError, match="0 tokens"):
        build_batch([BatchRow([], 0, [1])], 8)
    with pytest.raises(ValueError, match="1 blocks"):
        build_batch([BatchRow([1, 2], 7, [1])], 8)
    for wanted in (3, -1):
        with pytest.raises(ValueError, match="logits"):
            build_batch([BatchRow([1, 2], 0, [1], wanted)], 8)
