from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

import omnitrain as ot
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.tensor.plan import tensor_plan
from omnitrain.parallel.tensor.styles import STYLES
from tests.in_forward import qwen2_audio_model
from tests.parallel import factories


@pytest.fixture(scope="module")
def any_to_any() -> ot.OmniModel:
    return factories.any_to_any()


@pytest.fixture(scope="module")
def qwen3_vl() -> ot.OmniModel:
    return build_omni_model(foundation=factories.qwen3_vl())


def planned(model: ot.OmniModel, tp: int = 2, **plan: dict[str, str]) -> dict[str, str]:
    found = tensor_plan(model, ot.ParallelPlan(**plan), {"main": tp})
    assert not found.problems, found.problems
    return dict(found.styles)


def problems(model: ot.OmniModel, tp: int = 2, **plan: dict[str, str]) -> str:
    return "\n".join(tensor_plan(model, ot.ParallelPlan(**plan), {"main": tp}).problems)


def test_heads_that_differ_by_layer_are_counted_layer_by_layer() -> None:
    model = build_omni_model(foundation=factories.gemma4_moe())
    assert not problems(model)
    assert "does not divide the 2 key-value heads of model.language_model.layers.*.self_attn" in problems(model, tp=4)


def test_a_model_is_cut_by_its_own_plan(any_to_any: ot.OmniModel) -> None:
    styles = planned(any_to_any)
    assert styles["foundation.model.layers.1.self_attn.q_proj"] == "colwise"
    assert styles["foundation.lm_head"] == "colwise_gather_output"
    assert styles["foundation.model.embed_tokens"] == "embedding_rowwise"
    assert not any("norm" in name for name in styles)


def test_a_model_without_a_plan_needs_globs(qwen3_vl: ot.OmniModel) -> None:
    assert "Qwen3VLForConditionalGeneration has no tensor parallel plan" in problems(qwen3_vl)


def test_a_glob_that_fits_the_foundation_leaves_its_tower_alone(qwen3_vl: ot.OmniModel) -> None:
    styles = planned(qwen3_vl, tp_plan={"mlp.*_proj": "colwise_gather_output", "mlp.linear_fc1": "colwise_rep"})
    assert {name.split(".")[2] for name, style in styles.items() if style == "colwise_gather_output"} == {
        "language_model"
    }
    assert {name.split(".")[2] for name, style in styles.items() if style == "colwise_rep"} == {"visual"}


def test_what_only_samples_reach_on_which_no_plan_can_be_tried_stays_whole() -> None:
    model = build_omni_model(foundation=qwen2_audio_model())
    model.foundation._tp_plan = {"model.audio_tower.layers.*.fc1": "colwise", **model.foundation.tp_plan}
    assert {name.split(".")[2] for name in planned(model) if "layers" in name} == {"language_model"}
    both = {"layers.*.self_attn.q_proj": "colwise_gather_output"}
    assert {name.split(".")[2] for name in planned(model, tp_plan=both)} == {"language_model"}
    assert "audio_tower.layers.*.fc1: only samples that the foundation's own forward reads reach it" in problems(
        model, tp_plan={"audio_tower.layers.*.fc1": "colwise"}
    )


def test_a_weight_that_is_tied_to_a_cut_one_is_cut_with_it() -> None:
    model = build_omni_model(foundation=factories.gemma3())
    assert model.foundation.lm_head.weight is model.foundation.model.language_model.embed_tokens.weight
    styles = planned(model, tp_plan={"lm_head": "colwise_gather_output"})
    assert styles["foundation.model.language_model.embed_tokens"] == "embedding_rowwise"


def test_a_model_with_adapters_is_planned_by_the_names_that_it_has_without_them() -> None:
    bare, adapted = build_omni_model(foundation=factories.qwen3_moe()), factories.qwen3_moe_with_adapters()
    assert planned(adapted) == planned(bare)
    by_parameter = {"q_proj.weight": "colwise", "o_proj.*": "rowwise"}
    assert planned(adapted, tp_plan=by_parameter) == planned(bare, tp_plan=by_parameter) != {}


def test_experts_stay_whole_and_shared_ones_are_cut() -> None:
    styles = planned(build_omni_model(foundation=factories.deepseek_v3()))
    assert not any(".experts" in name for name in styles)
    assert styles["foundation.model.layers.1.mlp.shared_experts.down_proj"] == "rowwise"


@pytest.mark.parametrize(
    ("tp", "globs", "message"),
    [
        (4, None, "tp: found 4, which does not divide the 2 key-value heads of model.layers.*.self_attn; use 1, 2"),
        (5, None, "does not divide the"),
        (2, {"mlp.up_proj": "colwize"}, "tp_plan: unknown style 'colwize'; did you mean `colwise`?"),
        (2, {"mlp": "colwise"}, "colwise is for linear layers, found Qwen3MLP"),
        (2, {"mlp.up_proj": "embedding_rowwise"}, "embedding_rowwise is for embeddings, found Linear"),
        (2, {"mlp.up_proj": "packed_colwise"}, "keeps the order of its columns, and rowwise_split_input"),
        (2, {"q_norm.weight": "colwise_gather_output"}, "colwise_gather_output is for modules, found a parameter"),
        (
            2,
            {"mlp.up_proj": "colwise", "layers.0.mlp.*": "rowwise"},
            "`mlp.up_proj` says colwise, `layers.0.mlp.*` says rowwise",
        ),
        (1, {"mlp.up_proj": "colwise"}, "tp_plan: found with tp 1, where it does nothing"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_can(
    any_to_any: ot.OmniModel, tp: int, globs: dict[str, str] | None, message: str
) -> None:
    assert message in problems(any_to_any, tp, **({"tp_plan": globs} if globs else {}))


def test_a_tower_is_cut_only_if_something_says_how(qwen3_vl: ot.OmniModel) -> None:
    asked = {"image_encoder": ot.ComponentPlan(tp=2)}
    globs = {"layers.*.mlp.down_proj": "rowwise_split_input"}
    found = tensor_plan(qwen3_vl, ot.ParallelPlan(components=asked, tp_plan=globs), {"main": 2})
    assert "components.image_encoder.tp: found 2, but transformers has no tensor parallel plan" in found.problems[0]
    assert tensor_plan(qwen3_vl, ot.ParallelPlan(tp_plan=globs), {"main": 2}).degrees == {"foundation": 2}
    globs |= {"blocks.*.mlp.linear_fc1": "colwise", "blocks.*.mlp.linear_fc2": "rowwise"}
    both = tensor_plan(qwen3_vl, ot.ParallelPlan(components=asked, tp_plan=globs), {"main": 2})
    assert not both.problems and both.degrees == {"foundation": 2, "image_encoder": 2}


def test_the_page_lists_every_style_and_its_recipe_cuts_the_model_that_it_is_for(qwen3_vl: ot.OmniModel) -> None:
    page = (Path(__file__).parents[3] / "docs" / "parallel.md").read_text().split("## Tensor parallelism")[1]
    listed = [name for line in page.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])]
    assert sorted(set(listed) & STYLES.keys()) == sorted(STYLES)
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    plan = ot.ParallelPlan(**yaml.safe_load(recipe)["parallel"])
    styles = planned(qwen3_vl, tp_plan=plan.tp_plan)
    assert plan.of("foundation").tp == 2 and Counter(styles.values()) == {
        "colwise": 10,
        "rowwise": 4,
        "embedding_rowwise": 1,
        "colwise_gather_output": 1,
    }
