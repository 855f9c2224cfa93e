import numpy as np
import pytest

from omnitrain.errors import UserError
from omnitrain.plan.sequence import split_sequence

DEGREES = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (3, 2), (2, 3)]


@pytest.mark.parametrize(("sp", "cp"), DEGREES)
def test_every_token_is_on_one_rank_and_no_rank_is_empty(sp: int, cp: int) -> None:
    for num_tokens in range(sp * cp, 98):
        split = split_sequence(num_tokens, sp=sp, cp=cp)
        assert sorted(np.concatenate(split.positions).tolist()) == list(range(num_tokens))
        sizes = [len(rows) for rows in split.positions]
        assert min(sizes) >= 1
        assert len(sizes) == sp * cp
        for cp_rank in range(cp):
            of_ring = [len(rows) for rows in split.positions_of_ring(cp_rank)]
            assert max(of_ring) - min(of_ring) <= 1


@pytest.mark.parametrize(("sp", "cp"), DEGREES)
def test_rows_of_a_cp_rank_are_its_chunks_end_to_end(sp: int, cp: int) -> None:
    for num_tokens in (sp * cp, 17, 64, 97):
        split = split_sequence(num_tokens, sp=sp, cp=cp)
        for cp_rank in range(cp):
            expected = [token for start, stop in split.chunks(cp_rank) for token in range(start, stop)]
            assert np.concatenate(split.positions_of_ring(cp_rank)).tolist() == expected == sorted(expected)


def test_zigzag_gives_all_cp_ranks_the_same_causal_work() -> None:
    split = split_sequence(64, sp=1, cp=4)
    assert [int((rows + 1).sum()) for rows in split.positions] == [65 * 64 // 2 // 4] * 4


def test_small_example_of_the_docstring() -> None:
    rows = [rows.tolist() for rows in split_sequence(8, sp=2, cp=2).positions]
    assert rows == [[0, 1], [6, 7], [2, 3], [4, 5]]


def test_fewer_tokens_than_ranks_are_refused() -> None:
    with pytest.raises(UserError, match=r"3 tokens among 4 ranks \(ulysses 2 x cp 2\); expected at least 4"):
        split_sequence(3, sp=2, cp=2)
