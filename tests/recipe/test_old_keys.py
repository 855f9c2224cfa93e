"""Keys of older versions are refused, with the key and the value that a recipe has in their place."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import omnitrain as ot
from omnitrain.errors import RecipeError
from omnitrain.recipe import Recipe
from omnitrain.recipe.other_names import OLD_KEYS

PLAN = "parallel.components.image_encoder"
# Old key and value -> what the refusal names.
ANSWERS = {
    "train.micro_batches=4": "train.packs_per_step=4",
    "train.save_every=null": "train.save.every=null",
    "train.async_save=false": "train.save.background=false",
    "train.keep_last=3": "train.save.keep_last=3",
    "train.keep_every=100": "train.save.keep_every=100",
    "train.keep_best=heldout.loss": "train.save.keep_best=heldout.loss",
    "parallel.default.recompute=full": "parallel.default.memory.recompute=full",
    f"{PLAN}.saved_ops=[aten.mm, aten.bmm]": f"{PLAN}.memory.recompute={{keep: [aten.mm, aten.bmm]}}",
    f"{PLAN}.recomputed_parts=[attention]": f"{PLAN}.memory.recompute={{parts: [attention]}}",
    f"{PLAN}.offloaded_tensors=[mlp_input]": f"{PLAN}.memory.offload=[mlp_input]",
    f"{PLAN}.activation_offload=true": f"{PLAN}.memory.offload=[activations]",
    f"{PLAN}.parameter_offload=true": f"{PLAN}.memory.offload=[parameters]",
    f"{PLAN}.optimizer_offload=false": f"{PLAN}.memory.offload=[]",
    f"{PLAN}.window=step": f"{PLAN}.encode.window=step",
    f"{PLAN}.features_on=cpu": f"{PLAN}.encode.features_on=cpu",
    f"{PLAN}.feature_bytes=9": f"{PLAN}.encode.feature_bytes=9",
    f"{PLAN}.call_elements=9": f"{PLAN}.encode.call_elements=9",
    f"{PLAN}.expert_rows=8": f"{PLAN}.experts.rows=8",
    f"{PLAN}.expert_chunks=auto": f"{PLAN}.experts.chunks=auto",
    f"{PLAN}.expert_dispatcher=deepep": f"{PLAN}.experts.dispatcher=deepep",
    f"{PLAN}.delay_wgrad=true": f"{PLAN}.experts.delay_wgrad=true",
}


def test_every_old_key_is_answered_with_the_new_one() -> None:
    assert [old.split("=")[0].rpartition(".")[2] for old in ANSWERS] == [key for of in OLD_KEYS.values() for key in of]
    for old, new in ANSWERS.items():
        with pytest.raises(RecipeError) as refused:
            Recipe.load("quickstart", [old])
        assert str(refused.value).splitlines()[1:] == [f"  {old.split('=')[0]}: an old key; use `{new}`"]


def test_a_plan_in_python_is_refused_alike() -> None:
    with pytest.raises(ValidationError, match=r"recompute\n\s+an old key; use `memory.recompute=full`"):
        ot.ComponentPlan(recompute="full")
