"""Allocators never give a slot twice; what is counted as waste is; lengths are those of the traces."""

import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.common.harness import BenchmarkError, Options, Report
from bench.common.lengths import TRACES, Lengths, TraceError, read_lengths
from bench.common.reservations import Allocator, Buddies, Contiguous, FirstFit, Piece
from bench.kv_waste import Paged, Workload, measure, usage

POOL = 64
TASKS = st.lists(st.tuples(st.booleans(), st.integers(1, POOL), st.integers(0, 20)), max_size=40)


def exercise(allocator: Allocator, tasks: list[tuple[bool, int, int]]) -> list[Piece]:
    """Take and give back at random. What is held at the end never overlapped on the way."""
    held: list[Piece] = []
    for takes, size, which in tasks:
        if takes:
            piece = allocator.take(size)
            if piece is not None:
                assert piece.size >= size
                taken = {slot for each in held for slot in range(each.start, each.start + each.size)}
                assert not taken & set(range(piece.start, piece.start + piece.size))
                assert 0 <= piece.start <= POOL - piece.size
                held.append(piece)
        elif held:
            allocator.give_back(held.pop(which % len(held)))
    return held


@settings(deadline=None, max_examples=60)
@given(TASKS)
def test_first_fit_gives_no_slot_twice_and_gaps_grow_together(tasks: list[tuple[bool, int, int]]) -> None:
    allocator = FirstFit(POOL)
    for piece in exercise(allocator, tasks):
        allocator.give_back(piece)
    assert allocator.take(POOL) == Piece(0, POOL)


@settings(deadline=None, max_examples=60)
@given(TASKS)
def test_buddies_give_no_slot_twice_and_halves_become_one(tasks: list[tuple[bool, int, int]]) -> None:
    allocator = Buddies(POOL)
    for piece in exercise(allocator, tasks):
        assert piece.size & (piece.size - 1) == 0
        assert piece.start % piece.size == 0
        allocator.give_back(piece)
    assert allocator.take(POOL) == Piece(0, POOL)


def test_a_gap_that_is_too_short_is_passed_over() -> None:
    allocator = FirstFit(10)
    first, second = allocator.take(3), allocator.take(3)
    assert (first, second) == (Piece(0, 3), Piece(3, 3))
    allocator.give_back(Piece(0, 3))
    assert allocator.take(4) == Piece(6, 4)
    assert allocator.take(4) is None
    assert allocator.take(2) == Piece(0, 2)


def test_a_reservation_of_the_longest_length_wastes_the_rest() -> None:
    server = Contiguous(itertools.repeat(Lengths(10, 100)), FirstFit(300), reserved_tokens=100)
    assert server.step() == (3, 30, 300)
    assert server.step() == (3, 33, 300)


def test_a_sequence_leaves_with_its_last_token_and_the_next_takes_its_place() -> None:
    server = Contiguous(iter([Lengths(4, 3), *[Lengths(8, 9)] * 9]), FirstFit(16), reserved_output=3)
    assert [server.step().num_tokens for _ in range(3)] == [4, 5, 8]


def test_a_buddy_moves_to_twice_the_room_and_the_youngest_makes_way() -> None:
    server = Contiguous(itertools.repeat(Lengths(8, 100)), Buddies(32))
    assert server.step() == (4, 32, 32)
    # The oldest needs 16: it gets the room of the two youngest, then the other one left has no room and goes too.
    moment = server.step()
    assert moment.num_slots <= 32
    assert moment.num_sequences < 4
    assert moment.num_tokens >= 9


def test_a_paged_pool_wastes_only_the_ends_of_last_blocks() -> None:
    paged = Paged(itertools.repeat(Lengths(40, 50)), 1024)
    seen = usage(paged, 60, 40)
    paged.check()
    # Three or more blocks a sequence, and less than one of them empty.
    assert 0 < seen.waste < 1 / 3
    assert 1024 / 96 <= seen.num_sequences <= 1024 / 48


def test_a_block_that_leaked_is_noticed() -> None:
    paged = Paged(itertools.repeat(Lengths(40, 50)), 1024)
    paged.step()
    paged._manager.allocate("stray", 16, (), ())
    with pytest.raises(BenchmarkError, match="block tables"):
        paged.check()


def test_all_ways_serve_the_same_requests_and_give_their_lines() -> None:
    out, options = io.StringIO(), Options(quick=True)
    workload = Workload("small", [Lengths(30, 6), Lengths(5, 12), Lengths(60, 3)], Lengths(60, 12))
    with Report(options, out=out, err=io.StringIO()) as report:
        measure(workload, report, options)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["metric"], line["variant"], line["baseline"]) for line in lines] == [
        ("waste_share", "small:contiguous", "contiguous"),
        ("waste_share", "small:buddy", "buddy"),
        ("concurrency_vs_contiguous", "small", "contiguous"),
        ("concurrency_vs_contiguous", "small:known_prompt", "contiguous_prompt"),
        ("concurrency_vs_buddy", "small", "buddy"),
    ]
    assert lines[2]["ratio"] > 1


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("azure_conv", 1154.7, 211.1), ("azure_code", 2047.8, 27.9), ("mooncake_conversation", 12035.1, 342.6)],
)
def test_drawn_lengths_have_the_means_of_the_trace(name: str, prompt: float, output: float) -> None:
    drawn = TRACES[name].draw(20000, np.random.default_rng(1))
    assert np.mean([each.prompt for each in drawn]) == pytest.approx(prompt, rel=0.05)
    assert np.mean([each.output for each in drawn]) == pytest.approx(output, rel=0.2)
    longest = TRACES[name].longest
    assert all(each.prompt <= longest.prompt and each.output <= longest.output for each in drawn)


def test_both_forms_of_trace_files_are_read(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44")
    mooncake.write_text('{"timestamp": 0, "input_length": 6755, "output_length": 0, "hash_ids": [0]}\n')
    assert read_lengths(azure) == [Lengths(374, 44)]
    assert read_lengths(mooncake) == [Lengths(6755, 1)]


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", "x,y\n1,2\n"), ("b.jsonl", "no\n"), ("c.jsonl", "[1]\n"), ("d.csv", "")]
)
def test_another_file_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError):
        read_lengths(tmp_path / name)
