"""Which modules are sharded as units."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import omnitrain as ot
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.fsdp.units import ComponentUnits, find_units, ignored_params
from tests.families import FAMILIES
from tests.parallel.factories import any_to_any


def omni(name: str) -> ot.OmniModel:
    config = FAMILIES[name]()
    return build_omni_model(foundation=foundation_class(config)(config))


def test_attached_components_are_units_with_their_blocks_and_the_foundation_is_one() -> None:
    units = find_units(any_to_any())
    layers = ("foundation.model.layers.0", "foundation.model.layers.1")
    assert units["foundation"] == ComponentUnits(blocks=layers, rest=("foundation",))
    assert units["audio_encoder"] == ComponentUnits(blocks=("audio_encoder.tower.layers.0",), rest=("audio_encoder",))
    assert units["image_decoder"] == ComponentUnits(rest=("image_decoder",))


def test_native_components_are_the_largest_modules_that_have_nothing_of_another() -> None:
    rest = find_units(omni("gemma3"))["image_encoder"].rest
    assert rest == ("foundation.model.vision_tower", "foundation.model.multi_modal_projector")


def test_a_tower_with_a_parameter_that_no_call_reads_is_taken_apart() -> None:
    units = find_units(omni("qwen2_5_omni_thinker"))["audio_encoder"]
    tower = "foundation.model.audio_tower"
    assert units.blocks == (f"{tower}.layers.0", f"{tower}.layers.1")
    assert units.rest == tuple(f"{tower}.{name}" for name in ("conv1", "conv2", "ln_post", "proj"))


def test_a_bare_parameter_of_a_tower_beside_the_modules_of_the_foundation_is_the_roots() -> None:
    model = omni("llava_next")
    assert "foundation.model.image_newline" in model.components["image_encoder"]
    assert find_units(model)["foundation"].rest == ()


def test_frozen_media_tokenizers_are_in_no_unit() -> None:
    model = any_to_any()
    names = {name for name, p in model.named_parameters() if p in ignored_params(model)}
    assert names == {name for name, _ in model.named_parameters() if ".tokenizer." in name}


def test_a_block_that_shares_a_weight_with_another_is_no_unit() -> None:
    model = any_to_any()
    layers = model.foundation.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    assert find_units(model)["foundation"] == ComponentUnits(rest=("foundation",))


def test_modules_that_stay_fp32_and_train_are_units_of_their_own() -> None:
    model = any_to_any()
    model._keep_in_fp32_modules_strict = {"tokenizer", "input_layernorm"}
    units = find_units(model)["foundation"]
    assert units.fp32 == tuple(f"foundation.model.layers.{i}.input_layernorm" for i in range(2))
    assert units == replace(units, blocks=("foundation.model.layers.0", "foundation.model.layers.1"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_units_of_every_family_cover_each_parameter_once(name: str) -> None:
    model = omni(name)
    units = find_units(model)
    covered: dict[torch.nn.Parameter, str] = {}
    for component, found in sorted(units.items(), key=lambda item: item[0] == "foundation"):
        for unit in found.all:
            for parameter in model.get_submodule(unit).parameters():
                assert covered.setdefault(parameter, component) == component or unit == "foundation"
    left = {path for path, p in model.named_parameters() if p not in covered}
    assert not left or units["foundation"].rest == ()


def test_a_module_that_stays_fp32_is_a_unit_behind_its_blocks() -> None:
    model = omni("llava")
    model._keep_in_fp32_modules_strict = ["vision_tower"]
    tower = "foundation.model.vision_tower"
    units = find_units(model)["image_encoder"]
    assert units.fp32[-1] == tower
    assert {f"{tower}.encoder.layers.0", f"{tower}.encoder.layers.1"} == set(units.fp32[:-1])
    assert units.blocks == ()


def test_a_module_whose_parameters_are_read_while_it_does_not_run_is_no_unit() -> None:
    model = omni("gemma3")
    contract = replace(model.runner.contract, read_outside=("model.vision_tower",))
    model.runner.contract = contract
    assert "foundation.model.vision_tower" not in find_units(model)["image_encoder"].rest
