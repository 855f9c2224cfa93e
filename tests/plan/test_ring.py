import itertools

import numpy as np
import pytest

from omnitrain.plan.ring import CAUSAL, FULL, Block, SlicePart, block_between, parts_of_slice, seen_before_and_after
from omnitrain.plan.sequence import split_sequence


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("offsets", [(0, 24), (0, 3, 4, 11, 24), (0, 6, 12, 18, 24), tuple(range(25))])
def test_parts_are_the_tokens_of_a_rank_and_cut_only_what_other_ranks_have_a_part_of(
    cp: int, offsets: tuple[int, ...]
) -> None:
    split = split_sequence(24, sp=1, cp=cp)
    for cp_rank, rows in enumerate(split.positions):
        parts = parts_of_slice(split.chunks(cp_rank), offsets)
        assert [token for part in parts for token in range(part.start, part.stop)] == rows.tolist()
        for part in parts:
            if part.segment is None:
                assert {part.start, part.stop} <= set(offsets)
            else:
                start, stop = offsets[part.segment : part.segment + 2]
                assert start <= part.start < part.stop <= stop
                assert not set(range(start, stop)) <= set(rows.tolist())


def test_one_rank_and_short_samples_need_no_ring() -> None:
    assert parts_of_slice([(0, 24)], (0, 3, 24)) == (SlicePart(0, 24, None),)
    assert parts_of_slice([(0, 6), (18, 24)], (0, 3, 6, 18, 21, 24)) == (SlicePart(0, 6, None), SlicePart(18, 24, None))


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 1), (True, 3)])
def test_a_block_is_what_two_runs_see_of_each_other(causal: bool, window: int | None) -> None:
    runs = [(start, stop) for start in range(6) for stop in range(start + 1, 7)]
    for queries, keys in itertools.product(runs, runs):
        distance = np.arange(*queries)[:, None] - np.arange(*keys)
        seen = (distance >= 0) | (not causal)
        if window is not None:
            seen &= distance < window
        block = block_between(queries, keys, causal=causal, window=window)
        assert (block is not None) == seen.any()
        if block is None:
            continue
        rows = slice(block.queries[0] - queries[0], block.queries[1] - queries[0])
        columns = slice(block.keys[0] - keys[0], block.keys[1] - keys[0])
        assert seen[rows, columns].sum() == seen.sum()
        inside = distance[rows, columns]
        assert (block.kind == FULL) == seen[rows, columns].all() or block.kind == CAUSAL
        if block.kind == CAUSAL:
            assert block.queries == block.keys
            assert (seen[rows, columns] == (inside >= 0)).all()
        assert (_seen_by_a_kernel(block, window) == seen[rows, columns]).all()


def _seen_by_a_kernel(block: Block, window: int | None) -> np.ndarray:
    """The last query and the last key have the same position."""
    distance = np.arange(*block.queries)[:, None] - block.queries[1] - (np.arange(*block.keys) - block.keys[1])
    before, after = seen_before_and_after(block, window)
    return ((distance <= before) | (before < 0)) & ((distance >= -after) | (after < 0))
