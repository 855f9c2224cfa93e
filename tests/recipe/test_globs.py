import pytest

from omnitrain.errors import UserError
from omnitrain.recipe import assign_globs, match_globs

NAMES = (
    "model.layers.0.mlp.experts.down_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.experts.down_proj",
    "model.layers.1.mlp.gate",
    "lm_head",
)


def test_a_star_stays_within_a_dot_and_two_go_over_it() -> None:
    found = match_globs(["layers.*.mlp.experts.*", "model.**.down_proj", "*_head", "layers.1.**"], NAMES)
    assert found == {
        "layers.*.mlp.experts.*": (NAMES[0], NAMES[2]),
        "model.**.down_proj": (NAMES[0], NAMES[2]),
        "*_head": ("lm_head",),
        "layers.1.**": (NAMES[2], NAMES[3]),
    }


def test_a_glob_begins_at_a_dot_and_ends_at_the_end() -> None:
    for glob in ("ayers.*.mlp.gate", "layers.*.mlp", "model.*.gate"):
        with pytest.raises(UserError, match="matches no name"):
            match_globs([glob], NAMES)


def test_every_glob_that_matches_nothing_is_told_with_a_near_one_that_would() -> None:
    with pytest.raises(UserError) as refusal:
        match_globs(["layers.*.mlp.expert.*", "lm_haed", "*.gate"], NAMES)
    assert str(refusal.value).splitlines() == [
        "`layers.*.mlp.expert.*` matches no name; did you mean `layers.*.mlp.experts.down_proj`?",
        "`lm_haed` matches no name; did you mean `lm_head`?",
    ]


def test_two_globs_may_not_disagree_over_a_name() -> None:
    assert assign_globs({"layers.*.mlp.*": 1, "mlp.gate": 1, "lm_head": 2}, NAMES) == {NAMES[3]: 1, "lm_head": 2}
    with pytest.raises(UserError, match=r"layers.1.mlp.gate: `layers\.\*\.mlp\.\*` says 1, `mlp.gate` says 2"):
        assign_globs({"layers.*.mlp.*": 1, "mlp.gate": 2}, NAMES)
