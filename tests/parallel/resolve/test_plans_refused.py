"""Plans that contradict the model, the state, the call or themselves: refused before anything is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.distributed.tensor import Shard

import omnitrain as ot
from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import adapters_of
from omnitrain.models.components.contract import SkippedModule
from omnitrain.models.omni.build import build_omni_model
from omnitrain.ops.experts.install import backend_of, use_omnitrain_experts
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.expert.apply import bound_rows, chosen_layers, expert_layers, spread_by_transformers
from omnitrain.parallel.resolve import CallFlags, plans, resolve_plans
from omnitrain.parallel.state import ParallelState
from omnitrain.parallel.tensor.plan import tensor_plan
from omnitrain.plan.mesh import fit_mesh
from tests.parallel.factories import (
    any_to_any,
    ernie4_5_vl_moe,
    moe_of_32_experts,
    qwen2_5_vl,
    qwen3_moe_with,
    qwen3_moe_with_six_experts,
    qwen3_moe_with_two_experts,
    qwen3_vl_moe,
    qwen3_with_dropout,
)


@pytest.fixture(scope="module")
def model() -> ot.OmniModel:
    return any_to_any()


def resolve(model: ot.OmniModel, plan: ot.ParallelPlan, flags: CallFlags | None = None, **degrees: int) -> Any:
    state = ParallelState(fit_mesh(4, **degrees), 0, "cpu", "fsdp2", {})
    tensors = tensor_plan(model, plan, state.degrees("tp"))
    return resolve_plans(model, plan, state, flags or CallFlags(), tensors, adapters_of(model))[0]


def plan(component: str = "image_encoder", **fields: Any) -> ot.ParallelPlan:
    return ot.ParallelPlan(components={component: ot.ComponentPlan(**fields)})


def by_default(**fields: Any) -> ot.ParallelPlan:
    return ot.ParallelPlan(default=ot.ComponentPlan(**fields))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (plan(mode="hsdp", dp_replicate=3), r"dp_replicate=3 must divide dp; 1, 2, 4 would fit"),
        (plan(dp_replicate=2, dp_shard=4), r"must be 4: one of 4 x 1, 2 x 2, 1 x 4"),
        (plan(mode="hsdp"), r"components.image_encoder.mode: hsdp needs dp_replicate or dp_shard"),
        (plan("image_encodr"), r"components.image_encodr: unknown component; did you mean `image_encoder`"),
        (plan("image_decoder", memory={"recompute": "full"}), r"recompute: the component has no blocks"),
        (
            plan("image_decoder", memory={"offload": ["activations"]}),
            r"memory.offload: the component has no blocks",
        ),
        (plan(compile=True), r"only the foundation can be compiled"),
        (plan("foundation", compile=True, memory={"offload": ["activations"]}), r"compiled blocks cannot offload"),
        (plan("foundation", dp_replicate=2), r"found 2 x 2 .* but the parallel state has 1 x 4"),
        (
            plan(tp=2),
            r"components.image_encoder.tp: found 2, but the foundation has 1; use 1, or give image_encoder a s",
        ),
        (
            plan(tp=2).model_copy(update={"tp_plan": {"layers.*.mlp.fc1": "colwise"}}),
            r"parallel plan:\n  components.image_encoder.tp: found 2, but the foundation has 1; use 1",
        ),
        (plan(memory={"recompute": {"keep": ["aten.nothing"]}}), r"torch has no op 'aten.nothing'; expected one such"),
        (ot.ParallelPlan(tp_plan={"layers.*.mlp.dwn_proj": "rowwise"}), r"did you mean `layers.\*.mlp.down_proj`"),
        (
            plan(ulysses=2),
            r"image_encoder.ulysses: found 2, but no ranks share .*; set ulysses or cp of the",
        ),
        (plan("foundation", async_ulysses=True), r"foundation.async_ulysses: found true with ulysses 1, where it does"),
        (plan("foundation", sequence_parallel=True), r"sequence_parallel: found true with tp 1, .*; set tp above 1"),
        (plan(sequence_parallel=True), r"sequence_parallel: found true, but only the foundation supports it"),
        (
            ot.ParallelPlan(ep_plan={"layers.*.mlp.up_proj.weight": 0}),
            r"matches no weights of experts; the model has none",
        ),
        (
            plan(experts={"rows": 8}),
            r"image_encoder.experts.rows: found 8, but the component has no experts; remove it",
        ),
        (plan(ep=2), r"components.image_encoder.ep: found 2, but the component has no experts; use 1"),
        (
            by_default(experts={"chunks": 2}),
            r"default.experts.chunks: found 2, but no component has expert parallelism",
        ),
        (by_default(experts={"rows": 8}), r"default.experts.rows: found 8, but no component has experts; remove it"),
        (by_default(memory={"offload": ["mlp_input"]}), r"default.memory.offload: found .* has experts and keeps"),
        (
            by_default(memory={"recompute": {"parts": ["router"]}}),
            r"default.memory.recompute: found \['router'\], but no component has such parts; remove it",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_what_would(
    model: ot.OmniModel, refused: ot.ParallelPlan, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve(model, refused)


def test_experts_of_a_dense_model_cannot_be_spread(model: ot.OmniModel) -> None:
    with pytest.raises(UserError, match=r"foundation.ep: found 2, but no component has experts .* use 1"):
        resolve(model, plan("foundation", ep=2), ep=2)


def test_a_module_that_only_some_ranks_could_call_is_refused(
    model: ot.OmniModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SkippedModule("model.extra", "model", problem="it takes `scale`")
    monkeypatch.setattr(model.runner, "contract", replace(model.runner.contract, skipped_modules=(found,)))
    with pytest.raises(UserError, match=r"only some samples use model.extra .* it takes `scale`; use one rank"):
        resolve(model, ot.ParallelPlan())


@pytest.fixture(scope="module")
def moe() -> ot.OmniModel:
    return build_omni_model(foundation=qwen3_moe_with_six_experts())


ONE_CHUNK_TOO_MANY = {"default": {"experts": {"chunks": 4}}}
NOTHING_TO_MEASURE = {"components": {"foundation": {"experts": {"chunks": "auto"}}}}
EXPERTS = "foundation.model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("refused", "ep", "message"),
    [
        ({"default": {"ep": 4}}, 4, rf"default.ep: found 4, .* the 6 experts of {EXPERTS}; 1, 2, 3, 6 would"),
        (ONE_CHUNK_TOO_MANY, 2, r"default.experts.chunks: found 4, but a rank has 3 experts of a layer; use 1 to 3"),
        (NOTHING_TO_MEASURE, 1, r"foundation.experts.chunks: found auto with ep 1, where it does nothing; remove it"),
        (
            {"default": {"ep": 4}},
            2,
            r"default.ep: found 4, but the parallel state has 2; call init_parallel_state\(ep_size=4\)",
        ),
        ({"default": {"ep": 4}}, 1, r"1 problem in .*:\n  default.ep: found 4, .* has 1; call .*\(ep_size=4\)"),
        ({"ep_plan": {"mlp.experts.gate_up": 0}}, 2, r"matches no name; did you mean `mlp.experts.gate_up_proj`"),
        ({"ep_plan": {"experts.gate_up_proj": 0}}, 2, rf"matches only some weights of {EXPERTS}; add .*down_proj"),
        (
            {"default": {"ep": 2, "experts": {"dispatcher": "deepep"}}},
            2,
            r"default.experts.dispatcher: found deepep, but deep_ep is not installed; use torch, or auto to fall back",
        ),
        (
            {"components": {"foundation": {"experts": {"dispatcher": "auto"}}}},
            1,
            r"found auto with ep 1, where it does",
        ),
        ({"ep_plan": {"experts.*": 0}}, 1, r"ep_plan: found with ep 1, where it does nothing; set ep above 1, or"),
        ({"ep_plan": {"experts.*": 1}}, 2, r"found dimension 1 for `experts.\*`; dimension 0 of .* is the expert"),
    ],
)
def test_experts_that_cannot_be_spread_so_are_refused_with_what_would(
    moe: ot.OmniModel, refused: dict[str, Any], ep: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve(moe, ot.ParallelPlan(**refused), ep=ep)


@pytest.mark.parametrize(("experts", "allowed"), [(3, "1, 3"), (1, "1")])
def test_experts_that_ranks_cannot_share_evenly_are_refused_with_what_they_could(experts: int, allowed: str) -> None:
    model = build_omni_model(foundation=qwen3_moe_with(num_experts=experts, num_experts_per_tok=1))
    with pytest.raises(
        UserError, match=rf"default.ep: found 2, .* the {experts} experts of {EXPERTS}; {allowed} would"
    ):
        resolve(model, ot.ParallelPlan(default=ot.ComponentPlan(ep=2)), ep=2)


def test_a_named_backend_stays_under_a_plan_and_one_that_computes_all_rows_at_once_takes_no_bound() -> None:
    model = build_omni_model(foundation=qwen3_moe_with_six_experts())
    use_omnitrain_experts(model, "grouped_mm")
    bound_rows(model, expert_layers(model)["foundation"], None)
    assert {backend_of(module) for _, module in experts_in(model)} == {"grouped_mm"}
    with pytest.raises(
        UserError, match=r"default.experts.rows: found 8, but experts backend grouped_mm does not support"
    ):
        resolve(model, ot.ParallelPlan(default=ot.ComponentPlan(experts={"rows": 8})))


def test_globs_choose_the_layers_whose_experts_are_spread(moe: ot.OmniModel) -> None:
    layers = expert_layers(moe)["foundation"]
    chosen = chosen_layers(moe, layers, {"layers.1.mlp.experts.*": 0})
    assert [layer.name for layer in chosen] == ["foundation.model.layers.1.mlp.experts"]
    assert chosen_layers(moe, layers, None) == layers and len(layers) == 2
    assert resolve(moe, ot.ParallelPlan(ep_plan={"layers.1.mlp.experts.*": 0}), ep=2)["foundation"].ep == 2


def test_globs_of_projections_that_transformers_fuses_match_the_fused_weights(moe: ot.OmniModel) -> None:
    layers, experts = expert_layers(moe)["foundation"], "model.layers.*.mlp.experts"
    for of_one in ("{}.{}", "{}.*.{}.weight"):  # stacked, and expert by expert as in checkpoints
        parts = [of_one.format(experts, part) for part in ("gate_proj", "up_proj", "down_proj")]
        plan = ot.ParallelPlan(ep_plan=dict.fromkeys(parts, Shard(0)))
        assert chosen_layers(moe, layers, plan.ep_plan) == layers
        assert resolve(moe, plan, ep=2)["foundation"].ep == 2
        with pytest.raises(UserError, match=rf"matches only some weights of {EXPERTS}; add .*experts.down_proj"):
            resolve(moe, ot.ParallelPlan(ep_plan=dict.fromkeys(parts[:2], 0)), ep=2)
        with pytest.raises(UserError, match=r"matches no name"):
            resolve(moe, ot.ParallelPlan(ep_plan={of_one.format(experts, "gate_proj_"): 0}), ep=2)


def test_a_dispatcher_that_is_not_there_is_left_out_where_any_will_do(moe: ot.OmniModel) -> None:
    wanted = ot.ParallelPlan(default=ot.ComponentPlan(ep=2, experts={"dispatcher": "auto"}))
    assert resolve(moe, wanted, ep=2)["foundation"].experts.dispatcher == "torch"


def test_without_globs_the_plan_that_the_model_comes_with_chooses_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_omni_model(foundation=ernie4_5_vl_moe())
    layers = expert_layers(model)["foundation"]
    vision, text = "model.language_model.layers.*.mlp.vision_moe", "model.language_model.layers.*.mlp.text_moe.experts"
    assert set(spread_by_transformers(model)) == {layer.name for layer in layers} and len(layers) == 2
    for part in (model.foundation.model, model.foundation.model.language_model):
        monkeypatch.setattr(part, "_ep_plan", {})
    monkeypatch.setattr(model.foundation, "_ep_plan", {text: "ep_dispatch_experts"})
    assert [layer.name.split(".")[-2] for layer in chosen_layers(model, layers, None)] == ["text_moe"]
    monkeypatch.setattr(model.foundation, "_ep_plan", {vision: "ep_dispatch_experts"})
    with pytest.raises(UserError, match=r"the model's HF plan also shards .*layers.1.mlp.vision_moe, which"):
        resolve(model, ot.ParallelPlan(default=ot.ComponentPlan(ep=2)), ep=2)


def test_experts_of_another_backend_cannot_leave_gradients_for_later() -> None:
    model = build_omni_model(foundation=moe_of_32_experts())
    use_omnitrain_experts(model, "grouped_mm")
    with pytest.raises(UserError, match=r"default.experts.delay_wgrad: found true, but experts backend grouped_mm"):
        resolve(model, by_default(ep=4, experts={"delay_wgrad": True}), ep=4)


def test_chunks_are_counted_where_the_experts_can_be_spread_and_only_if_asked_for() -> None:
    model = build_omni_model(foundation=qwen3_moe_with_two_experts())
    with pytest.raises(UserError, match=r"1 problem in .*:\n.*ep: found 4, which does not divide the 2 experts"):
        resolve(model, by_default(ep=4), ep=4)
    with pytest.raises(UserError, match=r"experts.chunks: found 2, but a rank has 1 experts of a layer; use 1 to 1"):
        resolve(model, by_default(ep=2, experts={"chunks": 2}), ep=2)


def test_routers_that_a_model_does_not_declare_cannot_be_named() -> None:
    model = build_omni_model(foundation=ernie4_5_vl_moe())
    with pytest.raises(UserError, match=r"default.memory.recompute: found router, but Ernie.* declares no router of"):
        resolve(model, by_default(memory={"recompute": "parts"}))
    parts = ["attention", "expert_activation"]
    found = resolve(model, by_default(memory={"recompute": {"parts": parts}}))
    assert [found[name].memory.recomputed_parts for name in ("foundation", "image_encoder")] == [parts, ["attention"]]


def test_a_default_for_experts_gives_way_to_what_a_component_says() -> None:
    model = build_omni_model(foundation=qwen3_vl_moe())
    default = ot.ComponentPlan(memory={"offload": ["mlp_input"]})
    for own in ({"memory": {"recompute": "full"}}, {"memory": {"offload": ["activations"]}}):
        given = ot.ParallelPlan(default=default, components={"image_encoder": ot.ComponentPlan(**own)})
        found = resolve(model, given)
        assert found["foundation"].memory.offloaded_tensors and not found["image_encoder"].memory.offloaded_tensors
    with pytest.raises(
        ValidationError, match=r"components.foundation.memory.offload\s+found mlp_input with `recompute: full`"
    ):
        ot.ParallelPlan(default=ot.ComponentPlan(memory={"recompute": "full"}), components={"foundation": default})


def test_what_the_call_recomputes_is_not_offloaded() -> None:
    model = build_omni_model(foundation=moe_of_32_experts())
    with pytest.raises(UserError, match=r"default\.memory\.offload: .*, but enable_gradient_checkpointing is True"):
        resolve(model, by_default(memory={"offload": ["mlp_input"]}), CallFlags(recompute=True))


@pytest.mark.parametrize(
    ("flags", "fields", "message"),
    [
        (CallFlags(recompute=True), {"memory": {"recompute": "none"}}, "enable_gradient_checkpointing is True"),
        (CallFlags(parameter_offload=True), {"memory": {"offload": []}}, "enable_fsdp_offload is True"),
        (
            CallFlags(mixed_precision=False),
            {"precision": ot.recipe.Precision(compute="bfloat16")},
            "enable_mixed_precision is False",
        ),
    ],
)
def test_what_a_plan_and_the_call_say_differently_is_refused(
    model: ot.OmniModel, flags: CallFlags, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve(model, plan(**fields), flags)


def test_a_foundation_that_fails_in_bf16_is_refused_in_bf16_alone(
    model: ot.OmniModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "precision_problem_of", lambda *_: "it fails: RuntimeError: float")
    with pytest.raises(UserError, match=r"foundation.precision: found bfloat16, but Qwen3For.* it fails: RuntimeError"):
        resolve(model, plan("foundation", precision=ot.recipe.Precision(compute="bfloat16")))
    assert resolve(model, plan("foundation", precision=ot.recipe.Precision(compute="float32")), CallFlags())


def test_a_window_that_is_refused_is_one_problem_with_the_fields_that_need_one() -> None:
    given = plan("image_encoder", encode={"window": 2, "features_on": "cpu"}, place="local")
    with pytest.raises(UserError, match=r"^1 problem in .*\n  .*window: found 2 with `place: local`, which divides no"):
        resolve(any_to_any(), given)


def test_optimizer_offload_of_what_is_frozen_elsewhere_is_refused() -> None:
    model = any_to_any()
    model.image_encoder.requires_grad_(False)
    with pytest.raises(UserError, match=r"image_encoder.memory.offload: found optimizer, but a frozen component"):
        resolve(model, plan(memory={"offload": ["optimizer"]}))
    found = resolve(model, by_default(memory={"offload": ["optimizer"]}))
    assert found["image_encoder"].memory.offload == [] and found["audio_encoder"].memory.offload == ["optimizer"]


def foundation_plan(**fields: Any) -> ot.ParallelPlan:
    return ot.ParallelPlan(components={"foundation": ot.ComponentPlan(**fields)})


@pytest.mark.parametrize(
    ("pp", "parallel_plan", "message"),
    [
        (4, ot.ParallelPlan(), "pp: found 4: "),
        (2, foundation_plan(schedule={"split": [1, 2]}), r"split \[1, 2\] adds up to 3 blocks, but the model has 2"),
        (2, foundation_plan(schedule={"split": [2]}), r"split \[2\] has 1 numbers, but the pipeline has 2 stages"),
        (2, ot.ParallelPlan(components={"image_encoder": ot.ComponentPlan(pp=2)}), "only the foundation is cut"),
        (1, foundation_plan(schedule={"kind": "gpipe"}), "schedule: found with pp 1, where all but `overlap`"),
    ],
)
def test_stages_that_do_not_fit_are_refused(
    model: ot.OmniModel, pp: int, parallel_plan: ot.ParallelPlan, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve(model, parallel_plan, pp=pp)


@pytest.mark.parametrize(
    ("degrees", "refused", "message"),
    [
        (
            {},
            plan(place="local", encode={"window": 2}),
            r"window: found 2 with `place: local`, which divides no items here; set",
        ),
        (
            {},
            plan(place="group", encode={"window": "step"}),
            r"window: found step with `place: group`, which divides no items",
        ),
        (
            {"pp": 2},
            plan(place="local", encode={"window": 1}),
            r"window: found 1 with `place: local` and pp 2, where the forwards",
        ),
        (
            {"pp": 2, "cp": 2},
            plan(encode={"window": 2}),
            r"window: found 2 with `place: group` and pp 2, where the forwards",
        ),
        (
            {},
            plan(place="local", quadratic_cost="measured"),
            r"quadratic_cost: found measured with `place: local`, ",
        ),
        (
            {},
            plan(place="world", encode={"features_on": "cpu"}),
            r"encode.features_on: found cpu without `encode.window`: no features wait",
        ),
        (
            {},
            plan(place="world", encode={"window": 1, "features_on": "cpu"}),
            r"encode.features_on: found cpu without `encode.window`",
        ),
        (
            {"pp": 2},
            plan(place="local", encode={"features_on": "device"}),
            r"encode.features_on: found device without `encode.window`",
        ),
        (
            {"pp": 2},
            plan("image_decoder", encode={"window": 2}),
            r"image_decoder.encode.window: found 2, but it is for encoders; remove",
        ),
        (
            {},
            plan(place="world", encode={"feature_bytes": 9}),
            r"encode.feature_bytes: found 9 without `encode.window`: no features wait; set",
        ),
        (
            {"pp": 2},
            plan("image_decoder", encode={"feature_bytes": 9}),
            r"image_decoder.encode.feature_bytes: found 9, but it is for enc",
        ),
        (
            {},
            plan("image_decoder", encode={"features_on": "cpu"}),
            r"image_decoder.encode.features_on: found cpu, but it is for encoders",
        ),
        ({}, plan("foundation", place="group"), r"foundation.place: found group, but .*: use `local` \(a rank"),
        (
            {},
            plan("foundation", encode={"window": 2}),
            r"foundation.encode.window: found 2, but the foundation encodes no media; set",
        ),
        ({}, plan("foundation", quadratic_cost=0.5), r"foundation.quadratic_cost: found 0.5 without `place: world`"),
    ],
)
def test_encoders_that_cannot_wait_or_be_divided_so_are_refused_with_what_could(
    model: ot.OmniModel, degrees: dict[str, int], refused: ot.ParallelPlan, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve(model, refused, **degrees)


def test_all_problems_are_listed_at_once(model: ot.OmniModel) -> None:
    both = ot.ParallelPlan(components={"x": ot.ComponentPlan(), "image_encoder": ot.ComponentPlan(tp=2, compile=True)})
    with pytest.raises(UserError, match="3 problems"):
        resolve(model, both)


def test_a_refused_plan_leaves_the_model_as_it_was() -> None:
    model = any_to_any()
    before = {name: (p, p.requires_grad, p.dtype) for name, p in model.named_parameters()}
    refused = ot.ParallelPlan(
        default=ot.ComponentPlan(
            freeze=True, memory={"recompute": "full"}, precision=ot.recipe.Precision(param="bfloat16")
        ),
        components={"nothing": ot.ComponentPlan()},
    )
    state = ParallelState(fit_mesh(1), 0, "cpu", "fsdp2", {})
    with pytest.raises(UserError, match="unknown component"):
        ot.build_parallelize_model(model, parallel_state=state, parallel_plan=refused)
    after = {name: (p, p.requires_grad, p.dtype) for name, p in model.named_parameters()}
    assert before.keys() == after.keys() and all(before[n][0] is after[n][0] for n in before)
    assert [value[1:] for value in before.values()] == [value[1:] for value in after.values()]
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert ot.parallel.layout_of(model) is None


def test_fields_come_from_the_plan_then_the_default_then_the_state_then_the_call(model: ot.OmniModel) -> None:
    given = ot.ParallelPlan(
        default=ot.ComponentPlan(memory={"recompute": "full"}),
        components={"image_encoder": ot.ComponentPlan(memory={"recompute": "none"}, mode="replicate")},
    )
    found = resolve(model, given, CallFlags(parameter_offload=True), dp_replicate=2)
    image, audio, decoder = (found[name] for name in ("image_encoder", "audio_encoder", "image_decoder"))
    assert (image.memory.recompute, image.mode, image.dp_replicate, image.dp_shard) == ("none", "replicate", 4, 1)
    assert (audio.memory.recompute, audio.mode, audio.dp_replicate, audio.dp_shard) == ("full", "hsdp", 2, 2)
    assert decoder.memory.recompute == "none"  # nothing there that could be recomputed
    assert (image.memory.offload, audio.memory.offload) == ([], ["parameters"])
    assert found["foundation"].precision == ot.recipe.Precision(param="float32", compute="bfloat16", reduce="float32")
    assert torch.bfloat16 is getattr(torch, found["foundation"].precision.compute)


@pytest.fixture(scope="module")
def two_heads() -> ot.OmniModel:
    return build_omni_model(foundation=qwen2_5_vl())


@pytest.mark.parametrize(
    ("refused", "degrees", "message"),
    [
        (plan(ulysses=2), {"sp": 4}, r"ulysses: found 2, but 4 ranks share .*; use 1 or 4"),
        (plan(ulysses=4), {"sp": 4}, r"ulysses: found 4: 4 ranks cannot share 2 heads equally; 1, 2 can"),
        (plan(ulysses=2, place="world"), {"sp": 2}, r"found 2 with `place: world`, .* share each item; remove one"),
        (
            plan(cp=2),
            {"sp": 2},
            r"image_encoder.cp: found 2, but only the foundation supports ring attention; .*`place: group`",
        ),
    ],
)
def test_a_tower_is_shared_by_the_ranks_that_share_its_row_or_not_at_all(
    two_heads: ot.OmniModel, refused: ot.ParallelPlan, degrees: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve(two_heads, refused, **degrees)


@pytest.mark.parametrize(
    ("component", "why"),
    [
        ("image_encoder", "do not take all items as one sequence"),
        ("audio_encoder", "do not take all items as one sequence"),
        ("image_decoder", "is a decoder"),
    ],
)
def test_a_tower_that_keeps_items_apart_along_the_batch_is_refused_by_name(
    model: ot.OmniModel, component: str, why: str
) -> None:
    message = rf"{component}.ulysses: found 2, but .* an item of {component}: .*{why}.*; remove it \(`place: group`"
    with pytest.raises(UserError, match=message):
        resolve(model, plan(component, ulysses=2), sp=2)


def test_a_ring_is_refused_to_a_model_that_drops_attention_before_it_runs() -> None:
    model = build_omni_model(foundation=qwen3_with_dropout())
    with pytest.raises(
        UserError, match=r"ring attention ignores attention dropout \(attention_dropout in .*; set cp to 1"
    ):
        resolve(model, ot.ParallelPlan(), cp=2)
    resolve(model, ot.ParallelPlan(), sp=2)


def test_a_plan_or_a_model_of_another_kind_is_told_before_anything_is_done(model: ot.OmniModel) -> None:
    with pytest.raises(UserError, match="model: found a Linear; expected an OmniModel or a transformers model"):
        ot.build_parallelize_model(torch.nn.Linear(2, 2))
    for argument, found, message in (
        ("parallel_plan", {"default": {"memory": {"recompute": "full"}}}, "found a dict; expected a ParallelPlan"),
        ("parallel_state", {"tp": 1}, "found a dict; expected the state that init_parallel_state returns"),
        ("weights_path", 3, "found 3; expected a folder or a Hub id"),
        ("enable_mixed_precision", "float16", r"found 'float16'; expected True \(bf16\), False or None"),
        ("enable_gradient_checkpointing", None, "found None; expected True or False"),
        ("init_device", "gpu", "found 'gpu'; expected cpu, cuda or meta"),
    ):
        with pytest.raises(UserError, match=f"{argument}: {message}"):
            ot.build_parallelize_model(model, **{argument: found})
    with pytest.raises(UserError, match="foundation: found a int; expected a Hub id, a folder"):
        ot.build_omni_model(foundation=3)
    with pytest.raises(UserError, match="batch: found a list; expected what the model's step_planner makes"):
        ot.accumulate_gradients(model, [])
