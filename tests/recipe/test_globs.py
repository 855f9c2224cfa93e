import pytest

from omnitrain.recipe.globs import matches, unmatched

NAMES = (
    "model.layers.0.mlp.experts.down_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.experts.down_proj",
    "model.layers.1.mlp.gate",
    "lm_head",
)


@pytest.mark.parametrize(
    ("glob", "indices"),
    [
        ("layers.*.mlp.experts.*", [0, 2]),
        ("model.**.down_proj", [0, 2]),
        ("*_head", [4]),
        ("layers.1.**", [2, 3]),
        ("ayers.*.mlp.gate", []),
        ("layers.*.mlp", []),
        ("model.*.gate", []),
    ],
)
def test_a_star_stays_within_a_dot_two_cross_it_and_a_glob_reaches_from_a_dot_to_the_end(
    glob: str, indices: list[int]
) -> None:
    assert [name for name in NAMES if matches(glob, name)] == [NAMES[index] for index in indices]


def test_a_glob_that_matches_nothing_gets_a_near_one_that_would() -> None:
    assert [unmatched(glob, NAMES) for glob in ("layers.*.mlp.expert.*", "lm_haed")] == [
        "`layers.*.mlp.expert.*` matches no name; did you mean `layers.*.mlp.experts.down_proj`?",
        "`lm_haed` matches no name; did you mean `lm_head`?",
    ]
