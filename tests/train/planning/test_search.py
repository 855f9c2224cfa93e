from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnitrain.errors import UserError
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.rank_meter import Collective, Op
from omnitrain.plan.tables import ItemFacts, MicroBatchFacts
from omnitrain.recipe import Optimizer, ParallelPlan
from omnitrain.recipe.parallel import FOUNDATION as NAME
from omnitrain.recipe.parallel import ComponentPlan, Section
from omnitrain.recipe.plan_groups import PipelineSchedule
from omnitrain.train.planning import devices, search
from omnitrain.train.planning.devices import MEASURED, Device, device_here, find_device
from omnitrain.train.planning.encoding import count_encoder
from omnitrain.train.planning.estimate import Estimate
from omnitrain.train.planning.rank_run import Training, predict_rank
from omnitrain.train.planning.search import Candidate, Planner, Search, text_pack
from tests.tiny import SIGLIP
from tests.train.planning import planned
from tests.train.planning.planned import ENCODER, EXPERTS, FOUNDATION, IMAGES, counted, encoded

TOKENS = 256


@cache
def training(has_experts: bool = False) -> Training:
    encoders = {ENCODER: {"tower": {"config": SIGLIP}, "projector": {"kind": "pixel_shuffle"}}}
    foundation = FOUNDATION | (EXPERTS if has_experts else {})
    model: OmniModel = build_omni_model(foundation=foundation, encoders=encoders, init_device="meta").train()
    return Training(model, Optimizer(), True, text_pack(model, [TOKENS]))


def planner(
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    elements: int,
    num_ranks: int = 8,
    *,
    has_experts: bool = False,
    plan: ParallelPlan | None = None,
) -> Planner:
    monkeypatch.setattr(search, "count_cell", counted)
    monkeypatch.setattr(search, "count_encoder", encoded)
    item = ItemFacts(4, elements, 0, elements)
    numbers = (1, 7) if elements else (0,)
    drawn = [MicroBatchFacts({"text": TOKENS}, (TOKENS,), {ENCODER: (item,) * number}) for number in numbers]
    return Planner(training(has_experts), plan or ParallelPlan(), device, num_ranks, 24, drawn)


@pytest.mark.parametrize(
    ("elements", "per_node", "link", "more"),
    [
        pytest.param(0, 2, 1e9, {}, marks=pytest.mark.second),
        pytest.param(300, 1, 4.5e11, {}, marks=pytest.mark.second),
        (0, 2, 1e9, {"num_ranks": 4, "has_experts": True}),
    ],
    ids=["text", "images", "experts"],
)
def test_the_joint_search_finds_the_best_of_all_layouts_and_estimates_fewer(
    monkeypatch: pytest.MonkeyPatch, elements: int, per_node: int, link: float, more: dict[str, Any]
) -> None:
    num_ranks = more.get("num_ranks", 8)
    device = replace(find_device("h100", per_node=per_node, memory=1.2e9 / num_ranks), link=link)
    plan = planner(monkeypatch, device, elements, **more)
    candidates = [*plan.of_sequence(1)]
    everything = [plan.judge(candidate) for candidate in candidates]
    fitting = [one for one in everything if one.found and not one.reason]
    best = min(one.found.seconds for one in fitting if one.found)
    found = Search()
    plan.joint(candidates, found, 1)
    assert found.fitting[0].found is not None
    assert found.fitting[0].found.seconds == best
    assert found.slower
    for one in everything:
        if one.found:
            bound = plan.bound(one)
            assert isinstance(bound, Estimate)
            assert bound.seconds <= one.found.seconds * (1 + 1e-9), str(one)
            assert bound.peak <= one.found.peak * (1 + 1e-9), str(one)
    assert sum(map(len, vars(found).values())) == len(candidates)


def test_only_1f1b_and_gpipe_have_to_wait_for_other_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = []
    for kind in ("1f1b", "zbv"):
        schedule = ParallelPlan(components={NAME: ComponentPlan(pp=2, schedule=PipelineSchedule(kind=kind))})
        plan = planner(monkeypatch, find_device("h100"), 0, plan=schedule)
        candidate = plan.own()
        bound, found = plan.bound(candidate), plan.judge(candidate).found
        assert isinstance(bound, Estimate) and found is not None and bound.seconds <= found.seconds
        bounds.append(bound.seconds)
    number = 6  # 24 packs on 4 data-parallel ranks; the two stages of a rank share the work, or of two ranks
    assert bounds[0] / bounds[1] == pytest.approx(2 / (number * (1 - (1 - 1 / number) ** 2)))


def test_a_layout_that_does_not_fit_in_the_real_build_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planner(monkeypatch, find_device("h100", memory=1e9), 0)
    first, second = plan.search(2).fitting[:2]
    sizes = {str(first): 2e9, str(second): 9e8}

    def built(_: Training, wanted: ParallelPlan, *__: object, **___: object) -> SimpleNamespace:
        return SimpleNamespace(peak=next((sizes[str(one)] for one in (first, second) if one.plan == wanted), 1e8))

    monkeypatch.setattr(search, "predict_rank", built)
    found = plan.search(1, is_counted=True)
    assert str(found.fitting[0]) == str(second) and found.fitting[0].peak == 9e8
    assert [(str(one), one.reason) for one in found.rejected] == [(str(first), "memory: 1.86 of 0.885 GiB")]


def test_ranks_of_sections_of_the_plan_are_not_given_to_the_foundation(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = ParallelPlan(sections={"encoders": Section(components=[ENCODER], ranks=2)})
    plan = planner(monkeypatch, find_device("h100"), 300, plan=sections)
    assert {str(one) for one in plan.of_sequence(1) if not one.plan.of(NAME).pp} >= {"dp6", "tp2"}
    cp = planner(monkeypatch, find_device("h100"), 0, plan=ParallelPlan(default=ComponentPlan(cp=2)))
    assert str(cp.own()) == "cp2" and {one.degrees.get("cp") for one in cp.of_sequence(1)} == {2}


def test_ranks_share_the_cpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    cpu = replace(find_device("h100"), name=MEASURED)
    shared = [(one.flops / cpu.flops, one.memory / cpu.memory) for one in map(cpu.shared_by, (1, 2, 4))]
    assert shared == [(1, 1), (1, 1 / 2), (1 / 2, 1 / 4)]
    assert find_device("h100").shared_by(4) == find_device("h100")


def test_ranks_over_gloo_wait_for_the_weights_that_they_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = find_device("h100")
    gloo = replace(nccl, has_gloo=True)
    whole = Collective("reduce_scatter", 1000, tuple(range(8)), False)
    assert gloo.seconds_of_link(whole) == nccl.seconds_of_link(whole._replace(kind="all_reduce"))
    gathered = gloo.seconds_of_link(Collective("all_gather", int(2e7), tuple(range(8)), False))
    found = [plan.judge(plan.own()).found for plan in (planner(monkeypatch, one, 0) for one in (nccl, gloo))]
    assert found[0] is not None and found[1] is not None
    sums = 3 * 2 * 5 * gathered  # micro-batches; forward and backward; four blocks and their ends
    assert found[1].seconds - found[0].seconds == pytest.approx(sums)  # computation hides them else
    assert found[1].idle["weights"] == pytest.approx(sums / found[1].seconds) and found[0].idle["weights"] == 0


def test_a_run_plans_for_the_gpus_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device_here("cuda") == replace(find_device("h100"), memory=85e9, per_node=4)
    gpu.name = "NVIDIA L40S"
    with pytest.raises(UserError, match=r"parallel\.auto: found the GPU NVIDIA L40S; expected one of A100, H100, "):
        device_here("cuda")


def test_the_state_of_an_encoder_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planner(monkeypatch, find_device("h100"), 300)
    estimated = plan.judge(Candidate({}, ParallelPlan())).found
    assert estimated is not None
    part, rest = encoded().part, 5 * 4e7  # of the foundation: four blocks and its ends
    expected = {
        "weights": part.weights + rest,
        "gradients": part.gradients + rest,
        "optimizer": part.optimizer + 2 * rest,
    }
    assert {cause: estimated.memory[cause] for cause in expected} == {c: size / 8 for c, size in expected.items()}


@pytest.mark.slow
def test_weights_gradients_and_state_are_those_of_the_real_build() -> None:
    trained = planned.training(IMAGES)
    plan = Planner(trained, ParallelPlan(), find_device("h100"), 2, 2)
    estimated, built = plan.judge(plan.own()).found, predict_rank(trained, ParallelPlan(), 2, 1)
    assert estimated is not None
    for cause in ("weights", "gradients", "optimizer"):
        assert estimated.memory[cause] == pytest.approx(getattr(built, cause), rel=0.001)


def test_an_encoder_is_counted_for_its_smallest_items() -> None:
    found = count_encoder(training(), ParallelPlan(), ENCODER)
    sizes = [parameter.numel() for _, parameter in training().model.components[ENCODER].items()]
    assert (found.part.weights, found.part.gradients) == (4 * sum(sizes), 4 * sum(sizes))
    assert found.part.optimizer == pytest.approx(8 * sum(sizes), rel=0.01)  # two moments of AdamW
    assert found.feature_bytes == 128 * 2 * FOUNDATION["hidden_size"]  # in bf16
    forward, backward = (
        sum(one.flops * times for one, times in work.items() if isinstance(one, Op))
        for work in (found.part.forward, found.part.backward)
    )
    assert 1.5 * forward < backward <= 2 * forward  # no gradient of the pixels
    assert found.part.kept > 0


@pytest.mark.slow
def test_one_number_of_ranks_of_experts_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model: OmniModel = build_omni_model(foundation=FOUNDATION | EXPERTS, init_device="meta").train()
    trained = Training(model, Optimizer(), True, text_pack(model, [TOKENS]))
    plan = ParallelPlan(components={NAME: ComponentPlan(ep=4)})
    candidate = Candidate({"ep": 4}, plan)

    def judged() -> Estimate:
        found = Planner(trained, ParallelPlan(), find_device("h100"), 8, 8).judge(candidate).found
        assert found is not None
        return found

    by_two = judged()
    monkeypatch.setattr(search, "standing", lambda _, ep: ep)
    by_four = judged()
    assert by_two.seconds == pytest.approx(by_four.seconds, rel=0.01)
    for cause in ("weights", "gradients", "optimizer", "activations"):
        assert by_two.memory[cause] == pytest.approx(by_four.memory[cause], rel=0.01)
    assert by_two.memory["buffers"] >= by_four.memory["buffers"]  # of more experts than a rank has
