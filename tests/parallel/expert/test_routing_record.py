"""Routers' decisions that one run writes and another takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omnitrain.errors import UserError
from omnitrain.models.discovery import discover
from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.ops.experts.routing_replay import Recording
from omnitrain.parallel.expert.routing_record import RoutingFiles, RoutingOfRun, write_routing
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.verify.run import micro_batches, train
from omnitrain.recipe import parse_layout
from tests.parallel import factories
from tests.parallel.expert.test_experts import text_samples

LAYER = "foundation.model.layers.1.mlp"


def routed(layout: str, factory: str, record: str | None = None, replay: str | None = None) -> tuple[int, int]:
    """A step under a layout; what the replay changed on this rank."""
    found = parse_layout(layout)
    model = build_omni_model(foundation=getattr(factories, factory)()).train()
    batch = to_samples(discover(model.foundation), text_samples())
    state = init_state_of(found.plan())
    table = micro_batches(model, batch, state.dp_size, found.accumulation)
    build_parallelize_model(model, parallel_plan=found.plan(), enable_mixed_precision=False)
    routing = RoutingOfRun(model, record, replay, state.rank)
    accumulate_gradients(model, step_planner(model)(table[state.dp_rank]), forward_context=routing.forward_context)
    routing.end(step=1)
    return routing.read()


def read(folder: Path) -> dict[Any, torch.Tensor]:
    samples = to_samples(discover(factories.qwen3_moe()), text_samples())
    ids, lengths = [sample.id for sample in samples], [len(sample) for sample in samples]
    return RoutingFiles(folder).of_samples(ids, lengths).decisions


def test_what_ranks_that_share_rows_write_is_what_one_process_writes_and_any_layout_takes(
    ranks: RankPool, tmp_path: Path
) -> None:
    for layout in ("dp1", "dp2.sp2.ep2.recompute.accum2"):
        world = parse_layout(layout).num_ranks
        ranks.run(routed, layout, "qwen3_moe", str(tmp_path / layout), timeout_s=60, world=world)
    one, many = (read(tmp_path / layout) for layout in ("dp1", "dp2.sp2.ep2.recompute.accum2"))
    assert len(one) == 2 * 6 and one.keys() == many.keys()
    assert all(torch.equal(decisions, many[key]) and int(decisions.min()) >= 0 for key, decisions in one.items())
    for factory, moves in (("qwen3_moe", False), ("misrouted_moe", True)):
        taken = ranks.run(routed, "dp2.ep2", factory, None, str(tmp_path / "dp1"), timeout_s=60, world=2)
        assert (sum(others for _, others in taken) > 0) == moves, factory


def recorded_by_train() -> tuple[set[str], int]:
    """A step under Ulysses whose routing is recorded: gradients of routers, and decisions of this rank."""
    model = build_omni_model(foundation=factories.qwen3_moe()).train()
    batch = to_samples(discover(model.foundation), text_samples())
    plan = parse_layout("sp2").plan()
    init_state_of(plan)
    (packs,) = micro_batches(model, batch, 1, 1)
    build_parallelize_model(model, parallel_plan=plan, enable_mixed_precision=False)
    found = train(model, packs, steps=1)
    assert found.routing is not None
    known = sum(int((decisions >= 0).all(-1).sum()) for decisions in found.routing[0].decisions.values())
    return {name for name in found.gradients if name.endswith("mlp.gate.weight")}, known


def test_ranks_that_share_rows_record_their_own_decisions_and_train_the_routers(ranks: RankPool) -> None:
    found = ranks.run(recorded_by_train, timeout_s=60, world=2)
    tokens = sum(len(sample) for sample in to_samples(discover(factories.qwen3_moe()), text_samples()))
    assert [len(names) for names, _ in found] == [2, 2] and sum(known for _, known in found) == 2 * tokens


def test_a_topk_that_decides_about_no_token_keeps_its_gradient() -> None:
    model = build_omni_model(foundation=factories.qwen3_moe())
    with Recording().recorded(model, ["a"], [99]):
        model.foundation(input_ids=torch.arange(20, 32)[None]).logits.square().sum().backward()
    gate = model.get_parameter(f"{LAYER}.gate.weight").grad
    assert gate is not None and int(gate.count_nonzero()) > 0


def test_of_a_sample_that_came_twice_the_last_step_counts_and_its_length_must_be_the_same(tmp_path: Path) -> None:
    for step in (1, 2):
        own = Recording({(LAYER, 0, "a"): torch.full((3, 2), step), (LAYER, 0, "b"): torch.full((2, 2), 7)})
        write_routing(tmp_path / f"step-{step:08d}.rank-0", own, {"a": 3} if step == 2 else {"b": 2, "a": 3})
    found = RoutingFiles(tmp_path).of_samples(["a", "b", "c"], [3, 2, 9]).decisions
    assert {key[-1]: int(own.unique()) for key, own in found.items()} == {"a": 2, "b": 7}
    with pytest.raises(UserError, match=r"sample a has 4 tokens, but 3 in .*step-00000002.rank-0.safetensors; record"):
        RoutingFiles(tmp_path).of_samples(["a"], [4])


def test_a_folder_without_decisions_and_a_model_without_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"train.experts.replay: no decisions in {tmp_path}; expected files of an"):
        RoutingOfRun(build_omni_model(foundation=factories.qwen3_moe()), None, str(tmp_path), 0)
    with pytest.raises(UserError, match=r"train.experts.record: \w+ has no experts; remove"):
        RoutingOfRun(factories.any_to_any(), str(tmp_path), None, 0)
    (tmp_path / "step-00000001.rank-0.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="is not a file of recorded decisions"):
        RoutingFiles(tmp_path)
