from omnitrain.plan.ragged import runs_within


def test_runs_are_as_long_as_their_sum_allows_and_a_larger_item_is_alone() -> None:
    assert runs_within([3, 4, 5, 20, 1, 1, 9], 10) == [2, 1, 1, 2, 1]
    assert runs_within([3, 4, 5, 20, 1, 1, 9], 11) == [2, 1, 1, 3]
    assert runs_within([3, 4], None) == [2] and runs_within([], 5) == []
    assert runs_within([0, 0, 5, 0], 5) == [4]
