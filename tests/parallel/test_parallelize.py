"""Every knob of a plan, on ranks: each test fails if the knob does nothing."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Replicate, Shard

import omnitrain as ot
from omnitrain.parallel.layout import LayoutTable, reduce_replicas
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.recipe.parallel import Section
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import PLAIN, counted, full, gradients, laid_out, pack, samples, total


def placed_by_component() -> dict[str, Any]:
    plans = {
        "image_encoder": {"mode": "hsdp", "dp_replicate": 2},
        "audio_encoder": {"mode": "replicate"},
        "audio_decoder": {"dp_replicate": 4},
    }
    model = laid_out(components=plans)
    found = {}
    for name, component in ot.parallel.layout_of(model).components.items():
        trained = [p for p in model.components[name].values() if p.requires_grad]
        found[name] = (
            component.plan.mode,
            component.plan.dp_replicate,
            component.plan.dp_shard,
            {(tuple(p.device_mesh.shape), p.placements) for p in trained},
            {p.to_local().size(0) / p.size(0) for p in trained if p.size(0) % 4 == 0},
        )
    return found


def test_each_component_lies_on_a_mesh_of_its_own(ranks: RankPool) -> None:
    found = ranks.run(placed_by_component, timeout_s=60)[0]
    copies = (Replicate(), Shard(0))
    assert found["foundation"] == ("fsdp2", 1, 4, {((4,), (Shard(0),))}, {1 / 4})
    assert found["image_encoder"] == ("hsdp", 2, 2, {((2, 2), copies)}, {1 / 2})
    assert found["audio_encoder"] == ("replicate", 4, 1, {((4, 1), copies)}, {1.0})
    assert found["audio_decoder"][:4] == ("replicate", 4, 1, {((4, 1), copies)})
    assert found["image_decoder"][:3] == ("fsdp2", 1, 4)


def frozen_component() -> dict[str, Any]:
    model = laid_out(components={"image_encoder": {"freeze": True}})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    total(model(pack())).backward()
    optimizer.step()
    return {
        name: {not torch.equal(before[path], full(p.detach())) for path, p in own.items() if "tokenizer" not in path}
        for name, own in model.components.items()
    }


def test_freeze_keeps_a_component_from_training_and_no_other(ranks: RankPool) -> None:
    changed = ranks.run(frozen_component, timeout_s=60, world=2)[0]
    assert changed["image_encoder"] == {False}
    assert all(True in found for name, found in changed.items() if name != "image_encoder")


def precision_of(fields: dict[str, str] | None, mixed: bool | None) -> dict[str, Any]:
    plan = {} if fields is None else {"foundation": {"precision": fields}}
    model = laid_out(components=plan, enable_mixed_precision=mixed)
    seen: dict[str, torch.dtype] = {}

    def note(module: Any, args: Any, output: Any) -> None:
        seen["compute"] = module.weight.dtype
        seen["output"] = output.dtype

    model.foundation.model.layers[0].mlp.down_proj.register_forward_hook(note)
    output = model(pack())
    total(output).backward()
    own = model.components["foundation"].values()
    return {
        **seen,
        "param": {p.dtype for p in own},
        "grad": {p.grad.dtype for p in own},
        "loss": output.losses["text"].sum.item(),
        "gradient": gradients(model)["foundation.model.norm.weight"].float(),
        "tokenizers": {p.dtype for n, p in model.named_parameters() if ".tokenizer." in n},
        "codes": model.image_decoder.lm_encode(*_features("image_decoder"))[1],
        "rows": [parameter for row in ot.parallel.layout_of(model).table(model) if (parameter := row.dtypes)],
    }


def _features(name: str) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:
    (group,) = pack("text_to_image").targets[name].groups
    return group.features, group.num_tokens


def precisions() -> dict[str, dict[str, Any]]:
    return {
        "exact": precision_of(None, False),
        "mixed": precision_of(None, True),
        "named": precision_of({"compute": "bfloat16"}, None),
        "low": precision_of({"param": "bfloat16", "compute": "bfloat16"}, True),
        "sums": precision_of({"reduce": "bfloat16"}, False),
    }


@pytest.fixture(scope="module")
def by_precision(ranks: RankPool) -> dict[str, dict[str, Any]]:
    return ranks.run(precisions, timeout_s=120, world=2)[0]


def test_precision_sets_the_dtypes_of_parameters_computation_and_sums(by_precision: dict[str, dict[str, Any]]) -> None:
    exact, mixed, named, low, sums = (by_precision[name] for name in ("exact", "mixed", "named", "low", "sums"))
    assert exact["param"] == {torch.float32} and exact["compute"] == exact["output"] == torch.float32
    assert mixed["param"] == {torch.float32} and mixed["grad"] == {torch.float32}
    assert mixed["compute"] == mixed["output"] == torch.bfloat16
    assert 0 < abs(mixed["loss"] / exact["loss"] - 1) < 0.02
    assert named["rows"] == [mixed["rows"][0], *exact["rows"][1:]]
    assert named["compute"] == torch.bfloat16 and 0 < abs(named["loss"] / exact["loss"] - 1) < 0.02
    assert low["param"] == {torch.bfloat16}
    rounded = (sums["gradient"] - exact["gradient"]).abs().max() / exact["gradient"].abs().max()
    assert sums["loss"] == exact["loss"] and 1e-4 < rounded < 1e-2
    assert mixed["rows"][0] == "float32 / bfloat16 / float32"


def test_a_media_tokenizer_stays_fp32_and_makes_the_same_codes_at_any_precision(
    by_precision: dict[str, dict[str, Any]],
) -> None:
    for name in ("mixed", "low"):
        assert by_precision[name]["tokenizers"] == {torch.float32}
        assert torch.equal(by_precision[name]["codes"], by_precision["exact"]["codes"])


def ops_of_backward(recompute: dict[str, Any]) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    components = {"foundation": recompute} if recompute else {}
    model = laid_out(components=components)
    loss = total(model(pack("text")))
    with counted() as counts:
        loss.backward()
    return dict(counts), gradients(model)


def ops_by_recompute() -> list[tuple[dict[str, int], dict[str, torch.Tensor]]]:
    selective = {"memory": {"recompute": "selective"}}
    plans = (
        {},
        {"memory": {"recompute": "full"}},
        selective,
        {"memory": {"recompute": {"keep": ["aten.silu"]}}},
    )
    return [ops_of_backward(plan) for plan in plans]


def test_recompute_runs_the_blocks_again_and_selective_all_but_the_saved_ops(ranks: RankPool) -> None:
    found = ranks.run(ops_by_recompute, timeout_s=120, world=2)[0]
    (none, plain), (every, _), (some, _), (named, _) = found
    layers, products = 2, 2 * 6  # q, k, v, o, gate, up; what the last one makes no backward asks for
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert (none.get(attention, 0), every[attention], some.get(attention, 0)) == (0, layers, 0)
    assert every["aten.mm"] - none["aten.mm"] == products and some["aten.mm"] == none["aten.mm"]
    assert none.get("aten.silu", 0) == named.get("aten.silu", 0) == 0
    assert every["aten.silu"] == some["aten.silu"] == layers
    assert named["aten.mm"] == every["aten.mm"]
    for _, again in found[1:]:
        assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())


def ops_by_flag() -> list[int]:
    found = []
    for flag in (False, True):
        loss = total(laid_out(enable_gradient_checkpointing=flag)(pack("image_to_text")))
        with counted() as counts:
            loss.backward()
        found.append(counts["aten.native_layer_norm"])
    return found


def test_the_gradient_checkpointing_flag_recomputes_all_components(ranks: RankPool) -> None:
    assert ranks.run(ops_by_flag, timeout_s=60, world=2)[0] == [0, 2]  # two norms in the image tower's only layer


def kept_activations(components: dict[str, dict[str, Any]]) -> dict[str, Any]:
    model = laid_out(components=components)
    outputs: dict[str, weakref.ref[torch.Tensor]] = {}

    def watch(name: str) -> None:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda module, args, output: outputs.update({name: weakref.ref(output)}))

    watched = ("foundation.model.layers.0.mlp.gate_proj", "image_encoder.tower.encoder.layers.0.mlp.fc1")
    for name in watched:
        watch(name)
    loss = total(model(pack()))
    alive = [outputs[name]() is not None for name in watched]
    loss.backward()
    offloads = {name: c.activations for name, c in ot.parallel.layout_of(model).components.items() if c.activations}
    return {
        "alive": alive,
        "bytes": {name: offload.num_bytes for name, offload in offloads.items()},
        "gradients": gradients(model),
    }


def activations_by_plan() -> list[dict[str, Any]]:
    offload = {"offload": ["activations"]}
    memories = ({}, offload, offload | {"recompute": "full"})
    return [kept_activations({"foundation": {"memory": memory}}) for memory in memories]


def test_activation_offload_frees_what_the_blocks_of_a_component_saved(ranks: RankPool) -> None:
    plain, offloaded, recomputed = ranks.run(activations_by_plan, timeout_s=60, world=2)[0]
    assert plain["alive"] == [True, True] and plain["bytes"] == {}
    assert offloaded["alive"] == [False, True]
    assert offloaded["bytes"]["foundation"] > recomputed["bytes"]["foundation"] > 0  # only the blocks' inputs
    for other in (offloaded, recomputed):
        assert all(torch.equal(other["gradients"][name], value) for name, value in plain["gradients"].items())


def offloaded_parameters() -> dict[str, bool]:
    model = laid_out(components={"foundation": {"memory": {"offload": ["parameters", "optimizer"]}}})
    layout = ot.parallel.layout_of(model)
    assert {id(p) for p in layout.offloaded(model)} == {id(p) for p in model.components["foundation"].values()}
    return {
        unit: isinstance(group.offload_policy, CPUOffloadPolicy)
        for component in layout.components.values()
        for unit in component.units
        for group in parameter_groups(model.get_submodule(unit)._get_fsdp_state())
    }


def parameter_groups(state: Any) -> list[Any]:
    """Of one FSDP unit; torch 2.11 has one at most."""
    return state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]


def test_parameter_offload_is_of_the_component_that_asks_for_it(ranks: RankPool) -> None:
    found = ranks.run(offloaded_parameters, timeout_s=60, world=2)[0]
    assert {unit for unit, is_offloaded in found.items() if is_offloaded} == {
        "foundation",
        "foundation.model.layers.0",
        "foundation.model.layers.1",
    }


def images_encoded(place: str) -> int:
    """By this rank; the first one has drawn two images, the second one text alone."""
    model, rank = laid_out(components={"image_encoder": {"place": place}}), torch.distributed.get_rank()
    batch = ot.step_planner(model)([pack("text" if rank else "images_to_text")])
    return sum(len(call.items) for call in batch.plan.calls_of(rank, "image_encoder", 0))


@pytest.mark.parametrize(("place", "shares"), [("local", [2, 0]), ("world", [1, 1])])
def test_a_plan_says_who_encodes(ranks: RankPool, place: str, shares: list[int]) -> None:
    assert ranks.run(images_encoded, place, timeout_s=60, world=2) == shares


def place_of_inputs() -> tuple[str, str]:
    another = torch.device("cpu", 0)  # as if it were one
    with patch("omnitrain.parallel.fsdp.shard.device_of", lambda mesh: another):
        model = laid_out({"memory": {"offload": ["parameters"]}})
    return str(next(model.parameters()).device), str(model.device)


def test_a_model_whose_parameters_wait_in_host_memory_takes_its_inputs_where_it_computes(ranks: RankPool) -> None:
    assert ranks.run(place_of_inputs, timeout_s=60, world=2) == [("cpu", "cpu:0")] * 2


def gathers() -> list[int]:
    found = []
    for full_shard in (True, False):
        model = laid_out(enable_full_shard=full_shard)
        with counted() as counts:
            total(model(pack())).backward()
        found.append(counts["c10d._allgather_base_"])
    return found


def test_without_full_shard_the_backward_gathers_nothing_again(ranks: RankPool) -> None:
    sharded, kept = ranks.run(gathers, timeout_s=60, world=2)[0]
    units_of_blocks = 4  # two of the foundation, one of each tower
    assert sharded - kept >= units_of_blocks


def divisions_of_a_backward(model: ot.OmniModel) -> int:
    loss = total(model(pack("text")))
    with counted() as ops:
        loss.backward()
    return ops["aten.div"]


def divisions_laid_out() -> int:
    return divisions_of_a_backward(laid_out())


def test_a_rank_alone_copies_no_gradients_to_divide_them_by_one(ranks: RankPool) -> None:
    assert ranks.run(divisions_laid_out, timeout_s=60, world=1) == [divisions_of_a_backward(any_to_any().train())]


def all_reduces() -> dict[str, Any]:
    """Three micro-batches on 2 x 2; the last one has text alone on every rank."""
    model = laid_out(state={"dp_replicate_size": 2})
    tasks = ("image_to_text", "image_to_text", "text")
    last = {"foundation": 2, "image_encoder": 1}
    with counted() as counts:
        for index, task in enumerate(tasks):
            reduce_replicas(model, {name: index == final for name, final in last.items()})
            total(model(pack(task))).backward()
    return {"counts": dict(counts), "gradients": gradients(model)}


def test_replicas_reduce_once_per_step_in_the_last_micro_batch_that_runs_the_component(ranks: RankPool) -> None:
    found = ranks.run(all_reduces, timeout_s=60)[0]
    units = {"foundation": 3, "image_encoder": 2}
    assert found["counts"]["c10d.allreduce_"] == sum(units.values())
    expected = gradients_of_one_process(("image_to_text", "image_to_text", "text"))
    assert expected.keys() == found["gradients"].keys()
    for name, gradient in expected.items():
        error = (found["gradients"][name] - 4 * gradient).abs().max() / (4 * gradient).abs().max().clamp(min=1e-30)
        assert error < 1e-5, name


def gradients_of_one_process(tasks: tuple[str | None, ...]) -> dict[str, torch.Tensor]:
    model = any_to_any().train()
    for task in tasks:
        total(model(pack(task))).backward()
    return gradients(model)


def mixed_layout() -> Any:
    return ot.ParallelPlan(
        default=ot.ComponentPlan(memory={"recompute": "selective"}),
        components={
            "image_encoder": ot.ComponentPlan(mode="hsdp", dp_replicate=2),
            "audio_encoder": ot.ComponentPlan(mode="replicate", memory={"offload": ["activations"]}),
            "image_decoder": ot.ComponentPlan(dp_replicate=4, memory={"offload": ["optimizer"]}),
        },
    )


@pytest.mark.second
def test_components_on_different_meshes_train_as_one_process_does(ranks: RankPool) -> None:
    report = ot.verify(
        "tests.parallel.factories:any_to_any", samples() * 2, [mixed_layout()], pool=ranks, timeout_s=120
    )
    assert [row.status for row in report.rows] == ["equal"], str(report)


def test_a_frozen_foundation_never_hangs_on_ranks_without_media(ranks: RankPool) -> None:
    """Only the image tower trains: on a rank with text alone nothing before the loss has a gradient."""
    every = ("foundation", "audio_encoder", "image_decoder", "audio_decoder")
    plan = ot.ParallelPlan(components={name: ot.ComponentPlan(freeze=True) for name in every})
    batch = [*samples("image_to_text"), *samples("text")]
    factory = "tests.parallel.factories:any_to_any"
    report = ot.verify(factory, batch, [plan.model_copy(update={"default": ot.ComponentPlan(dp_shard=2)})], pool=ranks)
    assert [row.status for row in report.rows] == ["equal"], str(report)


def built_with_other_seeds() -> str:
    torch.manual_seed(torch.distributed.get_rank())
    from omnitrain.models.omni.build import build_omni_model
    from tests.tiny import MODEL

    with pytest.raises(ot.errors.UserError, match="differ between ranks") as caught:
        laid_out(model=build_omni_model(**MODEL))
    return str(caught.value)


def test_weights_that_differ_between_ranks_are_refused(ranks: RankPool) -> None:
    messages = ranks.run(built_with_other_seeds, timeout_s=60, world=2)
    assert "with the same seed" in messages[0] and messages[0] == messages[1]


def shown() -> LayoutTable:
    components = {
        "image_encoder": {"freeze": True, "mode": "replicate"},
        "foundation": {"memory": {"recompute": "full"}},
    }
    model = laid_out(components=components)
    return ot.parallel.layout_of(model).table(model)


def test_the_table_says_what_was_applied_where(ranks: RankPool) -> None:
    table = ranks.run(shown, timeout_s=60, world=2)[0]
    rows = {row.name: row for row in table}
    foundation, image = rows["foundation"], rows["image_encoder"]
    assert (foundation.mode, foundation.mesh, foundation.units, foundation.recompute) == (
        "fsdp2",
        "1 x 2",
        3,
        "full",
    )
    assert (image.mode, image.mesh, image.trainable) == ("replicate", "2 x 1", 0) and image.parameters == 7008
    assert rows["audio_decoder"].offload == "none" and foundation.dtypes == "float32 / float32 / float32"
    (line,) = (line for line in str(table).splitlines() if "image_encoder" in line)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells[:6] == ["image_encoder", "replicate", "2 x 1", "2", "7,008", "frozen"]


def shown_with_a_section() -> LayoutTable:
    plan = ot.ParallelPlan(sections={"vision": Section(components=["image_encoder"], ranks=2)})
    model = ot.build_parallelize_model(any_to_any(), parallel_state=init_state_of(plan), parallel_plan=plan, **PLAIN)
    return ot.parallel.layout_of(model).table(model)


def test_the_table_of_each_rank_has_the_section_of_a_component_and_the_units_of_its_ranks(ranks: RankPool) -> None:
    tables = ranks.run(shown_with_a_section, timeout_s=60, world=4)
    assert len({str(table) for table in tables}) == 1
    rows = {row.name: row for row in tables[0]}
    assert (rows["image_encoder"].section, rows["image_encoder"].units) == ("vision, ranks 2 to 3", 2)
    assert (rows["foundation"].section, rows["foundation"].mesh) == ("main, ranks 0 to 1", "1 x 2")
    assert "section" in str(tables[0]) and "section" not in str(LayoutTable([replace(rows["foundation"], section="")]))


def compiled(run: bool, memory: dict[str, str]) -> dict[str, Any]:
    model = laid_out(components={"foundation": {"compile": True, "memory": memory}})
    layers = model.foundation.model.layers
    found = {"layers": [layer._compiled_call_impl is not None for layer in layers]}
    component = ot.parallel.layout_of(model).components["foundation"]
    if run:
        total(model(pack())).backward()
        found |= {"compilations": len(component.compiled.compilations), "gradients": gradients(model)}
    return found | {"tower": model.image_encoder.tower.encoder.layers[0]._compiled_call_impl is not None}


def test_compile_is_of_the_blocks_of_the_foundation(ranks: RankPool) -> None:
    assert ranks.run(compiled, False, {}, timeout_s=60, world=2)[0] == {"layers": [True, True], "tower": False}


@pytest.mark.slow
@pytest.mark.parametrize("memory", [{}, {"recompute": "full"}], ids=["kept", "recomputed"])
def test_compiled_blocks_on_ranks_have_the_gradients_of_one_process(ranks: RankPool, memory: dict[str, str]) -> None:
    found = ranks.run(compiled, True, memory, timeout_s=300, world=2)[0]
    assert found["compilations"] > 0
    for name, gradient in gradients_of_one_process((None,)).items():
        if "k_proj.bias" not in name:  # zero but for rounding
            assert (found["gradients"][name] - 2 * gradient).abs().max() < 1e-4 * gradient.abs().max(), name
