"""LoRA on one process: what adapters are, and their files."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from omnitrain.errors import UserError, WeightsError
from omnitrain.models.adapters.files import load_adapters, save_adapters, split_weights
from omnitrain.models.adapters.lora import adapters_of, add_lora, find_adapters, merge_lora
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.named_parameters import freeze
from omnitrain.models.omni.save import save_whole
from omnitrain.ops.experts.install import use_omnitrain_experts
from omnitrain.peers import SINGLE_PROCESS
from omnitrain.recipe.plan_groups import Lora
from tests.parallel import factories

LORA = Lora(targets=["o_proj", "experts.*"], rank=3, alpha=6)
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
IDS = torch.arange(3, 20).unsqueeze(0)


def omni(family: str = "qwen3_moe") -> OmniModel:
    model = build_omni_model(foundation=getattr(factories, family)()).eval()
    use_omnitrain_experts(model)
    return model


def adapted(family: str = "qwen3_moe", lora: Lora = LORA, std: float = 0.1) -> OmniModel:
    """With adapters that change much, or with new ones where ``std`` is 0."""
    model = omni(family)
    add_lora(model, {"foundation": find_adapters(model, "foundation", lora)})
    for name in sorted(model.adapter_names) if std else ():
        model.get_parameter(name).data.normal_(std=std, generator=torch.Generator().manual_seed(0))
    return model


@torch.no_grad()
def logits(model: OmniModel) -> torch.Tensor:
    return model.foundation(input_ids=IDS).logits


def saved(model: OmniModel, folder: Path) -> Path:
    save_adapters(model, folder, split_weights(model, model.state_dict())[1])
    return folder / "adapters" / "foundation"


@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapters_leave_the_model_as_it_is_bit_for_bit(family: str) -> None:
    assert torch.equal(logits(adapted(family, std=0)), logits(omni(family)))


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen3_moe", {"targets": LORA.targets}),
        ("qwen3_moe", {"targets": LORA.targets, "rslora": True}),
        ("qwen3_moe", {"dropout": 0.5}),  # all linear layers
        ("gpt_oss", {"targets": LORA.targets}),
        ("deepseek_v3", {"targets": ["experts.*", "mlp.*_proj", "o_proj"]}),
    ],
)
def test_saved_adapters_load_in_plain_peft_and_give_the_same_logits(
    family: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    model = adapted(family, Lora(rank=3, **lora)).eval()
    plain = peft.PeftModel.from_pretrained(getattr(factories, family)().eval(), str(saved(model, tmp_path)))
    with torch.no_grad():
        theirs = plain(input_ids=IDS).logits
    assert (logits(model) - logits(omni(family))).abs().max() > 1
    torch.testing.assert_close(logits(model), theirs, rtol=1e-5, atol=1e-5)


def test_adapters_are_fp32_and_all_that_trains_beside_a_base_of_bf16() -> None:
    model = build_omni_model(foundation=factories.qwen3_moe().bfloat16())
    add_lora(model, {"foundation": find_adapters(model, "foundation", LORA)})
    model.foundation(input_ids=IDS).logits.sum().backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained.keys() == model.adapter_names and len(trained) == 2 * (2 + 4)
    assert all(p.grad is not None and p.dtype == p.grad.dtype == torch.float32 for p in trained.values())
    freeze(model, ["foundation"])
    assert all(parameter.requires_grad for parameter in trained.values())


def test_gradients_of_expert_adapters_are_those_of_the_merged_matrices() -> None:
    model, merged = adapted(), omni()
    experts = "foundation.model.layers.0.mlp.experts"
    a, b = (model.get_parameter(f"{experts}.down_proj_lora_{matrix}") for matrix in "AB")
    for path in adapters_of(model)["foundation"].experts:
        factors = (model.get_parameter(f"{path}_lora_{matrix}").detach() for matrix in "AB")
        merged.get_parameter(path).data += 2 * torch.einsum("eri,eor->eoi", *factors)
    for name in adapters_of(model)["foundation"].linears:
        first, second = (model.get_submodule(f"{name}.lora_{matrix}.default").weight.detach() for matrix in "AB")
        merged.get_submodule(name).weight.data += 2 * second @ first
    for one in (model, merged):
        one.foundation(input_ids=IDS).logits.square().mean().backward()
    whole = merged.get_parameter(f"{experts}.down_proj").grad
    torch.testing.assert_close(a.grad, 2 * torch.einsum("eor,eoi->eri", b, whole), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(b.grad, 2 * torch.einsum("eri,eoi->eor", a, whole), rtol=1e-4, atol=1e-5)


def test_loaded_adapters_are_the_saved_ones(tmp_path: Path) -> None:
    model, other = adapted(), omni()
    saved(model, tmp_path)
    load_adapters(other, tmp_path)
    assert adapters_of(other) == adapters_of(model) and torch.equal(logits(other), logits(model))


def test_adapters_of_another_model_do_not_stay_beside_new_weights(tmp_path: Path) -> None:
    adapted().save_pretrained(tmp_path)
    model = omni()
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    assert not OmniModel.from_pretrained(str(tmp_path)).adapter_names


@pytest.mark.parametrize(
    ("save", "writer"),
    [
        (OmniModel.save_pretrained, "transformers.modeling_utils.safe_save_file"),
        (partial(save_whole, peers=SINGLE_PROCESS), "omnitrain.checkpoint.model_files._write_weights"),
    ],
)
def test_a_model_saved_by_half_is_not_taken_for_one_without_adapters(tmp_path: Path, save: Any, writer: str) -> None:
    with patch(writer, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        save(adapted(), tmp_path)
    assert (tmp_path / "adapters" / "foundation" / "adapter_model.safetensors").is_file()
    with pytest.raises(UserError, match=r"no file named model\.safetensors"):
        OmniModel.from_pretrained(str(tmp_path))


def test_a_tower_and_a_language_model_have_ranks_of_their_own_in_one_file(tmp_path: Path) -> None:
    model, other = (build_omni_model(foundation=factories.qwen3_vl()).eval() for _ in range(2))
    wanted = {"foundation": Lora(targets=["q_proj"], rank=2), "image_encoder": Lora(targets=["attn.qkv"], rank=5)}
    add_lora(model, {name: find_adapters(model, name, lora) for name, lora in wanted.items()})
    saved(model, tmp_path)
    load_adapters(other, tmp_path)
    assert adapters_of(other) == adapters_of(model)
    ranks = {name: {p.size(0) for path, p in own.items() if "lora_A" in path} for name, own in other.components.items()}
    assert ranks == {"foundation": {2}, "image_encoder": {5}}


def test_a_component_whose_layers_have_different_factors_is_refused(tmp_path: Path) -> None:
    file = saved(adapted(), tmp_path) / "adapter_config.json"
    config = json.loads(file.read_text())
    changed = sorted(config["target_modules"])[0]
    file.write_text(json.dumps(config | {"alpha_pattern": {changed: 12}}))
    with pytest.raises(UserError, match="rank 3 and alpha 6, but others of foundation of rank 3 and alpha 12"):
        load_adapters(omni(), tmp_path)


def test_a_file_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(adapted(), tmp_path)
    weights = load_file(folder / "adapter_model.safetensors")
    first, second, *_ = sorted(weights)
    left = {name: tensor for name, tensor in weights.items() if name != first}
    save_file(left | {second: weights[second][:1].clone()}, folder / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match=rf"missing: {first}\n  wrong shape: {second}"):
        load_adapters(omni(), tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_or_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    file = saved(adapted(), tmp_path) / name
    whole = file.read_bytes()
    for left in (whole[:-10], b"{}", None):
        file.unlink() if left is None else file.write_bytes(left)
        with pytest.raises(UserError, match=rf"cannot read the adapters in {file} .*; copy the checkpoint again"):
            load_adapters(omni(), tmp_path)


def test_a_model_on_the_hub_comes_with_its_adapters(tmp_path: Path) -> None:
    model, repository = adapted(), tmp_path / "models--org--name"
    model.save_pretrained(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    loaded = OmniModel.from_pretrained("org/name", cache_dir=tmp_path, local_files_only=True).eval()
    assert adapters_of(loaded) == adapters_of(model) and torch.equal(logits(loaded), logits(model))


def test_a_model_in_a_subfolder_comes_with_its_adapters(tmp_path: Path) -> None:
    model = adapted()
    model.save_pretrained(tmp_path / "step" / "one")
    loaded = OmniModel.from_pretrained(str(tmp_path), subfolder="step/one").eval()
    assert torch.equal(logits(loaded), logits(model))


def test_a_model_whose_adapters_would_not_be_uploaded_is_refused_before_anything_is(tmp_path: Path) -> None:
    model = adapted()
    for upload in (partial(model.push_to_hub, "org/name"), partial(model.save_pretrained, tmp_path, push_to_hub=True)):
        with pytest.raises(UserError, match=r"found 12 tensors of LoRA adapters.* hf upload REPO FOLDER"):
            upload()
    assert not any(tmp_path.iterdir())


def test_adapters_of_layers_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = saved(adapted(), tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["model.layers.7.x"]}))
    with pytest.raises(UserError, match=r"adapters for model.layers.7.x, but the model has no such layer"):
        load_adapters(omni(), tmp_path)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("q_prj", "did you mean `q_proj`"),
        ("experts.gate_up", "did you mean `experts.gate_up_proj`"),
        ("lm_head", "matches no name"),
    ],
)
def test_targets_that_match_nothing_are_refused_with_the_nearest(target: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"`{target}` matches no name") as refused:
        find_adapters(omni(), "foundation", Lora(targets=["o_proj", target]))
    assert said in str(refused.value)


@pytest.mark.parametrize("values", [{"rank": 0}, {"rank": -4}, {"alpha": 0}, {"targets": []}])
def test_ranks_and_alphas_below_one_and_no_targets_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Lora(**({"targets": ["q_proj"]} | values))


def test_other_adapters_than_there_are_are_refused() -> None:
    model = adapted()
    add_lora(model, adapters_of(model))
    with pytest.raises(UserError, match="foundation already has other LoRA adapters"):
        add_lora(model, {"foundation": find_adapters(model, "foundation", Lora(targets=["o_proj"]))})


def test_a_missing_peft_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"LoRA needs peft .*pip install 'omnitrain\[lora\]'"):
        adapted()


def test_experts_of_other_backends_are_refused() -> None:
    model = adapted()
    use_omnitrain_experts(model, "grouped_mm")
    with pytest.raises(UserError, match="'grouped_mm' does not support LoRA adapters; use torch"):
        logits(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_adapters_are_in_the_weights_and_no_longer_beside_them(family: str) -> None:
    model, base = adapted(family), omni(family)
    expected, untrained = logits(model), logits(base)
    merge_lora(model)
    assert model.state_dict().keys() == base.state_dict().keys()
    assert adapters_of(model) == {}
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    assert (expected - untrained).abs().max() > 1e-2


def test_a_merged_matrix_is_rounded_once() -> None:
    rounded, exact = adapted(), adapted()
    merge_lora(rounded, torch.bfloat16)
    merge_lora(exact)
    for name in adapted().renamed:
        assert torch.equal(rounded.get_parameter(name), exact.get_parameter(name).to(torch.bfloat16))


def test_merging_a_plain_model_of_transformers_is_refused() -> None:
    with pytest.raises(UserError, match=r"merge_lora: found a \w+ForCausalLM; expected an OmniModel"):
        merge_lora(omni().foundation)  # type: ignore[arg-type]


def test_a_matrix_that_is_tied_to_another_one_is_not_merged() -> None:
    model = adapted()
    first, second = (layer.self_attn.o_proj for layer in model.foundation.model.layers[:2])
    second.base_layer.weight = first.base_layer.weight
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.o_proj\.weight is tied to another matrix"):
        merge_lora(model)
