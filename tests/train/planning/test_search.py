from dataclasses import replace
from functools import cache

import pytest

from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.rank_meter import Collective, Op
from omnitrain.plan.tables import ItemFacts, MicroBatchFacts
from omnitrain.recipe import Optimizer, ParallelPlan
from omnitrain.recipe.parallel import FOUNDATION as NAME
from omnitrain.recipe.parallel import ComponentPlan
from omnitrain.train.planning import search
from omnitrain.train.planning.cells import Cell, CountedPart, Work
from omnitrain.train.planning.devices import Device, find_device
from omnitrain.train.planning.encoding import Encoding, count_encoder
from omnitrain.train.planning.estimate import Estimate
from omnitrain.train.planning.rank_run import Training
from omnitrain.train.planning.search import Candidate, Planner, Search, text_pack
from tests.tiny import SIGLIP
from tests.train.planning.planned import EXPERTS, FOUNDATION

ENCODER = "image_encoder"
TOKENS = 256
ENCODER_BYTES = 1e7
KEPT = {"none": 6e6, "selective": 3e6, "full": 1e6}
REPEATED = {"none": 2.0, "selective": 2.2, "full": 3.0}


@cache
def training() -> Training:
    encoders = {ENCODER: {"tower": {"config": SIGLIP}, "projector": {"kind": "pixel_shuffle"}}}
    model: OmniModel = build_omni_model(foundation=dict(FOUNDATION), encoders=encoders, init_device="meta").train()
    return Training(model, Optimizer(), True, text_pack(model, [TOKENS]))


def counted(_: Training, plan: ParallelPlan, num_ranks: int) -> Cell:
    """A cell whose blocks compute 1 TFLOP, and exchange as much as blocks do."""
    own = plan.of(NAME)
    tp, mode = own.tp or 1, own.memory.mode
    shards = num_ranks // tp
    everyone = tuple(range(0, num_ranks, tp))
    sent: Work = {Collective("all_gather", int(2e7 / tp), everyone, False): 1}
    if tp > 1:
        sent = {**sent, Collective("all_reduce", 4_000_000, tuple(range(tp)), True): 2}
    forward: Work = {Op(int(1e12 / tp), 1000, 2048 // tp): 1, Op(0, int(1e8 / tp)): 3, **sent}
    backward: Work = {Op(int(REPEATED[mode] * 1e12 / tp), 1000, 2048 // tp): 1, **sent}
    weights = 4e7 / tp / shards
    block = CountedPart(weights, weights, 2 * weights, KEPT[mode] / tp, forward, backward)
    return Cell((block,) * 4, replace(block, weights=weights + ENCODER_BYTES / shards, kept=1e6 / tp), 1e6, shards)


def encoded(*_: object) -> Encoding:
    forward: Work = {Op(10**12, 1000, 1024): 1}
    backward: Work = {Op(2 * 10**12, 1000, 1024): 1}
    part = CountedPart(ENCODER_BYTES, 1e7, 2e7, 1e6, forward, backward)
    return Encoding(part, 1000, 10_000, ItemFacts(4, 1000, 0, 1000))


def planner(monkeypatch: pytest.MonkeyPatch, device: Device, elements: int, num_ranks: int = 8) -> Planner:
    monkeypatch.setattr(search, "count_cell", counted)
    monkeypatch.setattr(search, "count_encoder", encoded)
    item = ItemFacts(4, elements, 0, elements)
    numbers = (1, 7) if elements else (0,)
    drawn = [MicroBatchFacts({"text": TOKENS}, (TOKENS,), {ENCODER: (item,) * number}) for number in numbers]
    return Planner(training(), ParallelPlan(), device, num_ranks, 24, drawn)


@pytest.mark.parametrize(
    ("elements", "per_node", "link"),
    [(0, 2, 1e9), (300, 1, 4.5e11)],
    ids=["text", "images"],
)
def test_the_joint_search_finds_the_best_of_all_layouts_and_estimates_fewer(
    monkeypatch: pytest.MonkeyPatch, elements: int, per_node: int, link: float
) -> None:
    device = replace(find_device("h100", per_node=per_node, memory=1.5e8), link=link)
    plan = planner(monkeypatch, device, elements)
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


def test_an_encoder_is_counted_for_its_smallest_items() -> None:
    found = count_encoder(training(), ParallelPlan(), ENCODER)
    sizes = [parameter.numel() for _, parameter in training().model.components[ENCODER].items()]
    assert (found.part.weights, found.part.gradients, found.part.optimizer) == tuple(n * sum(sizes) for n in (4, 4, 8))
    number = found.elements // found.item.elements
    assert found.feature_bytes == number * found.item.num_tokens * 2 * FOUNDATION["hidden_size"]  # in bf16
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
