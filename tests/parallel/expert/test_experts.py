"""Experts that are spread over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import omnitrain as ot
from omnitrain.checkpoint.optimizer import load_optimizer, save_optimizer
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.discovery import discover
from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.ops.experts.entry import bytes_sent
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.verify import verify
from tests.parallel import factories
from tests.parallel.laid_out import counted, full, laid_out, total
from tests.parallel.verify.test_verify import check, hf_samples
from tests.stored import stored
from tests.whole import whole_tensors

LAYOUTS = ["dp4.ep4.accum2.recompute", "dp4.ep2.recompute", "dp4.ep2.accum2", "hsdp2x2.ep2.recompute", "dp2.ep2"]
BESIDE = ["dp2.sp2.ep4.recompute", "dp2.sp2.ep2.accum2"]
CUT = ["tp2.dp2.ep2.accum2.recompute"]
FAMILIES = (
    "qwen3_moe",
    "qwen3_vl_moe",
    "qwen3_omni_moe_thinker",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
    "qwen3_next",
    "ernie4_5_vl_moe",
)


def text_samples(number: int = 6) -> list[dict[str, torch.Tensor]]:
    """HF-style samples of some 7 to 17 tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 180, (1, 7 + 2 * n), generator=generator) for n in range(number)]
    return [{"input_ids": i, "labels": i.clone()} for i in ids]


def samples_of(model: Any) -> list[Sample]:
    return to_samples(discover(model), text_samples())


def test_experts_on_all_ranks_train_as_in_one_process(ranks: RankPool) -> None:
    check(ranks, "qwen3_moe_with_six_experts", text_samples(), ["hsdp2x2.ep2.accum2.recompute"])


@pytest.mark.second
def test_biases_and_layouts_of_gpt_oss_train_as_in_one_process(ranks: RankPool) -> None:
    check(ranks, "gpt_oss", text_samples(4), ["dp2.ep2.recompute"])


def test_experts_that_a_rank_without_images_leaves_out_are_no_hang(ranks: RankPool) -> None:
    samples = hf_samples("ernie4_5_vl_moe")
    text, images = ([s for s in samples if ("pixel_values" in s) == has_images] for has_images in (False, True))
    selective = ot.ParallelPlan(
        default=ot.ComponentPlan(dp_shard=2, ep=2, memory={"recompute": "selective"})
    )  # units in a block
    check(ranks, "ernie4_5_vl_moe", [text[0], images[0], text[1], images[1]], [selective])


def test_ranks_and_experts_without_tokens_beside_ones_with_nearly_all(ranks: RankPool) -> None:
    check(ranks, "lopsided_moe", text_samples(), ["dp4.ep4.recompute"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_with_experts_trains_a_family_as_one_process_does(ranks: RankPool, name: str) -> None:
    cut = CUT if cuts_its_layers(getattr(factories, name)()) else []
    check(ranks, name, hf_samples(name), [*LAYOUTS, *BESIDE, *cut])


def cuts_its_layers(model: Any) -> bool:
    """Whether transformers has a tensor parallel plan for more than the model's vocabulary."""
    return any(".layers." in name for name in model.tp_plan)


@pytest.mark.slow
def test_one_expert_per_rank_is_shared_by_two(ranks: RankPool) -> None:
    check(ranks, "qwen3_moe_with_two_experts", text_samples(), ["dp4.ep2.accum2"])


def laid_out_moe(factory: str = "qwen3_moe", **plan: Any) -> tuple[ot.OmniModel, Pack]:
    """A model under a plan, and this rank's pack."""
    model = getattr(factories, factory)()
    own = samples_of(model)
    state = {"ep_size": plan.get("ep", 1)}
    omni = laid_out(plan, state=state, model=build_omni_model(foundation=model).train())
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return omni, Pack.from_samples(own[rank::world])


def placements() -> dict[str, Any]:
    model, pack = laid_out_moe("lopsided_moe", ep=2)
    total(model(pack)).backward()
    experts = dict(experts_in(model))["foundation.model.layers.0.mlp.experts"]
    weight = experts.gate_up_proj
    assert isinstance(weight, DTensor)
    return {
        "placements": weight.placements,
        "mesh": weight.device_mesh.mesh_dim_names,
        "own": weight.to_local().size(0),
        "row": ot.parallel.layout_of(model).table(model)[0].mesh,
        "dense": model.foundation.model.layers[0].self_attn.q_proj.weight.device_mesh.mesh_dim_names,
        "gradients": [float(full(weight.grad)[expert].abs().max()) for expert in range(4)],
    }


def test_weights_are_sharded_over_ep_and_ep_fsdp_and_an_expert_without_tokens_has_zeros(ranks: RankPool) -> None:
    found = ranks.run(placements, timeout_s=60)[0]
    assert found["placements"][1] == Shard(0) and found["mesh"] == ("ep_fsdp", "ep") and found["own"] == 1
    assert found["dense"] == ("fsdp",) and found["row"] == "1 x 4, ep 2"
    assert found["gradients"][3] == 0 and min(found["gradients"][:3]) > 0


def products(**plan: Any) -> int:
    """Grouped products of a forward."""
    model, pack = laid_out_moe(ep=2, **plan)
    with counted() as forward:
        model(pack)
    return forward["aten._grouped_mm"]


def products_by_bound() -> tuple[int, int]:
    return products(), products(experts={"rows": 4})


def rows_computed(tp: int) -> tuple[int, int]:
    """Rows of the experts of a layer in a forward, and the tokens of the pack."""
    model = laid_out(state={"tp_size": tp}, model=build_omni_model(foundation=factories.qwen3_moe()).train())
    pack = Pack.from_samples(samples_of(factories.qwen3_moe())[:3])
    rows: list[int] = []
    experts = dict(experts_in(model))["foundation.model.layers.1.mlp.experts"]
    experts.act_fn.register_forward_hook(lambda _, arguments, output: rows.append(len(output)))
    model(pack)
    return sum(rows), pack.num_tokens


@pytest.mark.second
def test_tensor_parallel_ranks_share_the_tokens_of_experts(ranks: RankPool) -> None:
    (first, tokens), (second, _) = ranks.run(rows_computed, 2, timeout_s=60, world=2)
    assert tokens % 2 == 1 and (first, second) == (tokens + 1, tokens - 1)  # two experts of each
    check(ranks, "qwen3_moe", text_samples(3), ["tp2.accum2.recompute"])


def exchanges(recompute: str) -> tuple[int, int, int]:
    """All-to-alls of a forward and of its backward; bytes that it says it sent in forwards."""
    model, pack = laid_out_moe(ep=2, memory={"recompute": recompute})
    with counted() as forward:
        loss = total(model(pack))
    with counted() as backward:
        loss.backward()
    sent = sum(bytes_sent(experts) for _, experts in experts_in(model))
    return forward["c10d.alltoall_base_"], backward["c10d.alltoall_base_"], sent


def test_counts_are_exchanged_once_per_layer_and_not_again_in_a_recompute(ranks: RankPool) -> None:
    layers = 2
    counts, there, back = 1, 1, 1
    *once, sent = ranks.run(exchanges, "none", timeout_s=60, world=2)[0]
    assert once == [layers * (counts + there + back), layers * 2] and sent > 0
    again = ranks.run(exchanges, "full", timeout_s=60, world=2)[0]
    assert again == (layers * (counts + there + back), 2 * layers * (there + back), sent)


def updated(ep: int, saved: Path, begun: Path | None = None) -> dict[str, torch.Tensor]:
    """Weights after a step of AdamW, from the state in ``begun`` on; they and the new state end in ``saved``."""
    model, pack = laid_out_moe(ep=ep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    if begun is not None:
        load_optimizer(model, optimizer, begun / "optimizer")
    total(model(pack)).backward()
    optimizer.step()
    save_optimizer(model, optimizer, saved / "optimizer")
    weights = whole_tensors(model.state_dict(keep_vars=True))
    if torch.distributed.get_rank() == 0:
        own = {name.removeprefix("foundation."): weight for name, weight in weights.items()}
        model.foundation.save_pretrained(saved, state_dict=own)
    return weights


def test_weights_and_optimizer_state_do_not_know_the_layout(ranks: RankPool, tmp_path: Path) -> None:
    four = tmp_path / "4"
    weights = ranks.run(updated, 4, four, timeout_s=60)[0]
    plain = dict(type(factories.qwen3_moe()).from_pretrained(four).named_parameters())
    assert len(plain) == len(weights)
    for name, parameter in plain.items():
        assert torch.equal(parameter, weights[f"foundation.{name}"]), name
    spread, alone = (ranks.run(updated, ep, tmp_path / str(ep), four, timeout_s=60, world=2)[0] for ep in (2, 1))
    for name, weight in spread.items():
        torch.testing.assert_close(weight, alone[name], rtol=1e-5, atol=1e-6)
    moments, others = stored(tmp_path / "2" / "optimizer"), stored(tmp_path / "1" / "optimizer")
    assert moments.keys() == others.keys() and len(moments) == 3 * len(weights)
    for name, moment in moments.items():
        torch.testing.assert_close(moment, others[name], rtol=1e-4, atol=1e-6)


def test_a_bound_on_rows_changes_nothing(ranks: RankPool) -> None:
    plan = ot.ParallelPlan(
        default=ot.ComponentPlan(dp_shard=2, ep=2, experts={"rows": 16}, memory={"recompute": "full"})
    )
    report = verify("tests.parallel.factories:lopsided_moe", text_samples(3), [plan], pool=ranks, timeout_s=120)
    assert [row.status for row in report.rows] == ["equal"], str(report)
    whole, bounded = ranks.run(products_by_bound, timeout_s=60, world=2)[0]
    assert whole == 2 * 2 and bounded > 4 * whole


def test_near_ties_are_taken_from_one_process_and_counted_and_other_choices_are_a_difference(ranks: RankPool) -> None:
    tied, misrouted = (
        verify(f"tests.parallel.factories:{name}", text_samples(3), ["dp2.ep2.recompute"], pool=ranks).rows[0]
        for name in ("nearly_tied_moe", "misrouted_moe")
    )
    assert tied.status == "equal" and tied.near_ties > 10, tied
    assert misrouted.status == "different" and "not by a near tie" in misrouted.reason
