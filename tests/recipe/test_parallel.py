from typing import Any

import pytest
from pydantic import ValidationError
from torch.distributed.tensor import Shard

import omnitrain as ot
from omnitrain.errors import RecipeError
from omnitrain.recipe import Recipe, save_recipe
from omnitrain.recipe.parallel import raise_problems

NAMES = {
    "foundation": ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.self_attn.q_proj"],
    "image_encoder": ["visual.blocks.0.attn.qkv"],
}


def test_a_plan_is_written_in_python_as_in_yaml(recipe_file: Any) -> None:
    plan = ot.ParallelPlan(
        components={"foundation": ot.ComponentPlan(ulysses=2, ep=4), "image_encoder": ot.ComponentPlan(place="world")},
        ep_plan={"layers.*.mlp.experts.*": Shard(0)},
        tp_plan=None,
    )
    recipe = Recipe.load(
        recipe_file,
        [
            "parallel.components={foundation: {ulysses: 2, ep: 4}, image_encoder: {place: world}}",
            "parallel.ep_plan={'layers.*.mlp.experts.*': Shard(0)}",
        ],
    )
    assert recipe.parallel == plan
    assert plan.ep_plan == {"layers.*.mlp.experts.*": 0}
    save_recipe(recipe, recipe_file.with_name("saved.yaml"))
    assert Recipe.load(recipe_file.with_name("saved.yaml")).parallel == plan


def test_what_a_component_leaves_unset_comes_from_the_default() -> None:
    plan = ot.ParallelPlan(
        default=ot.ComponentPlan(
            mode="hsdp",
            dp_replicate=2,
            dp_shard=4,
            memory={"recompute": "full"},
            precision=ot.recipe.Precision(compute="bfloat16"),
        ),
        components={
            "image_encoder": ot.ComponentPlan(mode="replicate", precision=ot.recipe.Precision(reduce="float32"))
        },
    )
    image, foundation = plan.of("image_encoder"), plan.of("foundation")
    assert (image.mode, image.dp_replicate, image.dp_shard, image.memory.recompute) == ("replicate", None, None, "full")
    assert image.precision == ot.recipe.Precision(compute="bfloat16", reduce="float32")
    assert foundation == plan.default


def test_a_default_offload_passes_over_what_is_frozen_or_not_sharded() -> None:
    default = ot.ComponentPlan(memory={"offload": ["optimizer", "parameters"]})
    assert ot.ComponentPlan(freeze=True).over(default).memory.offload == ["parameters"]
    assert ot.ComponentPlan(mode="replicate").over(default).memory.offload == ["optimizer"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "fsdp2", "dp_replicate": 2}, "use `mode: hsdp`"),
        ({"mode": "replicate", "dp_shard": 2}, "which shards nothing"),
        ({"mode": "replicate", "memory": {"offload": ["parameters"]}}, "only shards can be offloaded"),
        ({"memory": {"recompute": {"keep": ["aten.mm"], "parts": ["router"]}}}, "found both of `keep` and `parts`"),
        ({"memory": {"recompute": {}}}, "found none of `keep` and `parts`; set one"),
        ({"memory": {"offload": ["mlp_input", "activations"]}}, "activations, which include them"),
        ({"memory": {"offload": ["mlp_input"], "recompute": {"keep": ["aten.mm"]}}}, "with `recompute: selective`"),
        ({"memory": {"recompute": {"keep": ["mm"]}}}, "expected NAMESPACE.OP"),
        ({"freeze": True, "memory": {"offload": ["optimizer"]}}, "no optimizer state"),
        ({"tp": 0}, "greater than or equal to 1"),
        ({"ulyses": 2}, "Extra inputs are not permitted"),
    ],
)
def test_a_component_plan_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ot.ComponentPlan(**fields)


def test_a_recipe_names_the_place_of_a_contradiction_and_the_nearest_key(recipe_file: Any) -> None:
    overrides = ["parallel.components={foundation: {mode: fsdp2, dp_replicate: 2}}", "parallel.default={ulyses: 2}"]
    with pytest.raises(RecipeError) as refusal:
        Recipe.load(recipe_file, overrides)
    assert "parallel.default.ulyses: unknown key, found 2; did you mean `ulysses`?" in str(refusal.value)
    assert "parallel.components.foundation.dp_replicate: found 2 with `mode: fsdp2`" in str(refusal.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("memory.offload=activations", "cannot offload activations"),
        ("compile=true", "set it in one place"),
    ],
)
def test_a_plan_that_train_compile_does_not_go_with_is_refused(recipe_file: Any, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.load(recipe_file, ["train.compile=true", f"parallel.components.foundation.{override}"])


def test_everything_that_does_not_fit_the_model_is_told_at_once() -> None:
    plan = ot.ParallelPlan(
        default=ot.ComponentPlan(tp=2),
        components={
            "foundation": ot.ComponentPlan(ulysses=2),
            "imgae_encoder": ot.ComponentPlan(place="world"),
            "image_encoder": ot.ComponentPlan(memory={"offload": ["optimizer"]}, dp_shard=2),
        },
        tp_plan={"layers.*.self_attn.q_porj": "colwise"},
        ep_plan={"mlp.experts.*": 0},
    )
    with pytest.raises(RecipeError) as refusal:
        raise_problems(plan.problems(NAMES, frozen={"image_encoder"}, degrees={"tp": 1, "ulysses": 4, "dp_shard": 4}))
    lines = [line.strip() for line in str(refusal.value).splitlines()]
    assert lines == [
        "5 problems in the parallel plan:",
        "components.imgae_encoder: unknown component; did you mean `image_encoder`?",
        "components.image_encoder.memory.offload: found optimizer, but a frozen component has no optimizer state",
        "default.tp: found 2, but the parallel state has 1; call init_parallel_state(tp_size=2), or remove it here",
        "components.foundation.ulysses: found 2, but the parallel state has 4; call "
        "init_parallel_state(ulysses_size=2), or remove it here",
        "tp_plan: `layers.*.self_attn.q_porj` matches no name; did you mean `layers.*.self_attn.q_proj`?",
    ]


def test_a_plan_that_fits_passes_and_towers_may_have_degrees_of_their_own() -> None:
    plan = ot.ParallelPlan(
        components={"foundation": ot.ComponentPlan(tp=2), "image_encoder": ot.ComponentPlan(tp=1, place="world")},
        ep_plan={"layers.*.mlp.experts.*": Shard(0)},
    )
    assert plan.problems(NAMES, degrees={"tp": 2}) == []
