"""Sections train as one process in the corners that the table of layouts does not reach, and a lost rank is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import LostRankError
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.verify.run import micro_batches
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe import ComponentPlan, ParallelPlan
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.parallel import MAIN
from tests.parallel.factories import any_to_any, windows_of_four_heads
from tests.parallel.laid_out import full, samples
from tests.parallel.schedule.separate import factory
from tests.parallel.schedule.test_layouts import samples_of
from tests.tiny import MODEL, tiny_model

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Planned(Layout):
    """A layout whose components have fields of their own."""

    components: Mapping[str, Mapping[str, Any]] = field(kw_only=True)

    def plan(self) -> ParallelPlan:
        own = {name: ComponentPlan(**fields) for name, fields in self.components.items()}
        return super().plan().model_copy(update={"components": own})


def planned(word: str, **components: Mapping[str, Any]) -> Planned:
    return Planned(**vars(parse_layout(word)), components=components)


def require_equal(
    sections: RankPool, make: Callable[[], PreTrainedModel], given: Sequence[Sample], layout: str | Layout
) -> None:
    (row,) = verify(make, given, [layout], nproc=8, timeout_s=180, pool=sections).rows
    assert row.status == "equal", row


@pytest.mark.slow  # a random graph (test_graphs.py) has two ranks for three
@pytest.mark.parametrize("word", ["encoders2+dp3.accum2", "encoders2.window2+dp3.accum3"])
def test_a_fan_out_need_not_be_whole(sections: RankPool, word: str) -> None:
    require_equal(sections, factory("any_to_any", "all"), samples(), word)


@pytest.mark.slow
def test_a_section_may_hold_copies(sections: RankPool) -> None:
    layout = planned("encoders2+dp2.accum2", image_encoder={"mode": "replicate"}, audio_encoder={"mode": "replicate"})
    require_equal(sections, any_to_any, samples(), layout)


@pytest.mark.slow  # by default, ranks of a section share an item of one of its components
def test_components_of_a_section_may_have_different_degrees(sections: RankPool) -> None:
    layout = planned("encoders2+dp2.accum2", audio_encoder={"mode": "hsdp", "dp_replicate": 2})
    require_equal(sections, any_to_any, samples(), layout)


def vision_samples(make: Callable[[], PreTrainedModel]) -> list[Sample]:
    from omnitrain.models.contract.samples import probe_samples

    omni = build_omni_model(foundation=make())
    return [probe.sample for probe in probe_samples(omni.foundation, omni.runner.native)]


@pytest.mark.parametrize(
    "word",
    [
        pytest.param("vision2+dp1.accum2", marks=pytest.mark.slow),
        pytest.param("vision2.twice+dp2", marks=pytest.mark.second),
    ],
)
def test_ranks_of_a_section_may_share_an_item(sections: RankPool, word: str) -> None:
    given = vision_samples(windows_of_four_heads)
    require_equal(sections, windows_of_four_heads, given, planned(word, image_encoder={"ulysses": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("word", ["vision1+dp2.ep2.accum2", "vision1.twice+pp2.dp2.ep2"])
def test_experts_of_main_are_spread_beside_a_section(sections: RankPool, word: str) -> None:
    require_equal(sections, factory("qwen3_vl_moe", "all"), samples_of("qwen3_vl_moe"), word)


@pytest.mark.slow
def test_items_of_a_section_are_dealt_by_a_given_cost(sections: RankPool) -> None:
    layout = planned("vision2+dp2.accum2", image_encoder={"quadratic_cost": 0.01})
    require_equal(sections, any_to_any, samples(), layout)


def with_dropout() -> OmniModel:
    """Dropout in the image tower alone."""
    encoder = MODEL["encoders"]["image_encoder"]
    tower = {"config": encoder["tower"]["config"] | {"attention_dropout": 0.5}}
    return tiny_model(encoders=MODEL["encoders"] | {"image_encoder": encoder | {"tower": tower}})


@dataclass(frozen=True)
class Step:
    """What a step gave on a rank.

    Attributes:
        loss: of all ranks.
        gradients: parameter -> its gradient; of this rank's section.
    """

    loss: float
    gradients: dict[str, torch.Tensor]


def step(layout: Layout, make: Callable[[], OmniModel], packs: list[list[Pack]] | None, given: list[Sample]) -> Step:
    """One step; ``packs``: of each data rank. None: :func:`micro_batches` of ``given``."""
    plan = layout.plan()
    state = init_state_of(plan)
    model = make().train()
    if packs is None:
        packs = micro_batches(model, given, state.of_section(MAIN).dp_size, layout.accumulation)
    model = build_parallelize_model(model, parallel_plan=plan, enable_mixed_precision=False)
    torch.manual_seed(0)
    loss = accumulate_gradients(
        model, step_planner(model)(packs[state.dp_rank] if state.section == MAIN else [])
    ).double()
    dist.all_reduce(loss)
    return Step(float(loss), {n: full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None})


def together(steps: Sequence[Step]) -> dict[str, torch.Tensor]:
    """The gradients of all sections."""
    return {name: gradient for of_rank in steps for name, gradient in of_rank.gradients.items()}


@pytest.mark.parametrize(
    "word", ["vision1.twice+dp2.accum2", pytest.param("vision1.twice.slots1+dp2.accum2", marks=pytest.mark.slow)]
)
def test_a_repeated_forward_draws_the_same_random_numbers(sections: RankPool, word: str) -> None:
    once, twice = (
        sections.run(step, parse_layout(layout), with_dropout, None, samples(), timeout_s=180, world=3)
        for layout in ("vision1+dp2.accum2", word)
    )
    assert once[0].loss == twice[0].loss
    expected, repeated = together(once), together(twice)
    assert any(name.startswith("image_encoder") for name in expected)
    assert [name for name, gradient in expected.items() if not repeated[name].equal(gradient)] == []
    (without,) = sections.run(step, parse_layout("accum2"), any_to_any, None, samples(), timeout_s=180, world=1)
    assert abs(without.loss - once[0].loss) > 1e-4 * without.loss


@pytest.mark.parametrize(
    "word", [pytest.param("encoders1+dp2.accum2", marks=pytest.mark.slow), "encoders1.twice.slots1+dp2.accum3"]
)
def test_a_step_without_targets_has_no_loss_and_no_gradients(sections: RankPool, word: str) -> None:
    read_only = [sample for sample in samples() if not any(span.is_target for span in sample.spans)]
    unlabelled = [replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in read_only]
    assert any(sample.spans for sample in unlabelled)
    steps = sections.run(step, parse_layout(word), any_to_any, None, unlabelled, timeout_s=180, world=3)
    assert [found.loss for found in steps] == [0.0] * 3
    assert all(not gradient.any() for gradient in together(steps).values())


def without_items() -> list[Sample]:
    return [sample for sample in samples() if all(span.is_target for span in sample.spans)]


@pytest.mark.slow
def test_a_step_without_items_leaves_the_section_without_work(sections: RankPool) -> None:
    require_equal(sections, any_to_any, without_items(), "encoders1+dp2.accum2")


@pytest.mark.parametrize("reader", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_windows_with_items_on_one_rank_only_train_as_one_process(sections: RankPool, reader: int) -> None:
    """The other rank never has an item, and the reader has none in its first window."""
    text, (image,), (sound,) = without_items(), samples("image_to_text"), samples("speech_to_text")
    idle = Pack.from_samples([idle_prompt(any_to_any())])
    of_reader = [Pack.from_samples([sample]) for sample in (text[0], image, sound)]
    packs = [[idle] * 3, of_reader] if reader else [of_reader, [idle] * 3]
    found = sections.run(step, parse_layout("encoders1+dp2.accum3"), any_to_any, packs, [], timeout_s=180, world=3)
    (expected,) = sections.run(step, parse_layout("accum3"), any_to_any, [of_reader], [], timeout_s=180, world=1)
    assert found[0].loss == pytest.approx(expected.loss, rel=1e-6)
    require_close(together(found), expected.gradients, 1e-5)


def require_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Errors relative to the largest element of a gradient, and at least of 1e-4: smaller ones are rounding."""
    for name, gradient in expected.items():
        size = float(gradient.abs().max().clamp(min=1e-4))
        error = float((found.get(name, torch.zeros_like(gradient)) - gradient).abs().max())
        assert error <= tolerance * size, (name, error, size)


def lost_in_a_step(folder: str, victim: int) -> None:
    """The victim is killed in the second step, when a tower or the foundation begins its second forward there."""
    plan = parse_layout("vision1+dp2.accum3").plan()
    state = init_state_of(plan)
    model = build_parallelize_model(any_to_any().train(), parallel_plan=plan, enable_mixed_precision=False)
    packs = micro_batches(model, samples("image_to_text") * 6, 2, 3)
    batch = step_planner(model)(packs[state.dp_rank] if state.section == MAIN else [])
    accumulate_gradients(model, batch)
    dist.barrier()
    calls = []

    def end(*_: object) -> None:
        calls.append(time.monotonic())
        if len(calls) == 2:
            Path(folder, "ended").write_text(str(calls[-1]))
            os.kill(os.getpid(), signal.SIGKILL)

    if state.rank == victim:
        tower = model.encoders["image_encoder"].tower.encoder
        (tower.layers if state.section != MAIN else model.foundation.model.layers)[0].register_forward_pre_hook(end)
    try:
        accumulate_gradients(model, batch)
    except LostRankError as error:
        Path(folder, f"rank{state.rank}").write_text(f"{time.monotonic()}\n{error}")
        raise


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "section"), [(2, "vision"), (0, "main")])
def test_a_rank_killed_in_a_step_is_named_with_section_and_message_within_5_s(
    sections: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, section: str
) -> None:
    monkeypatch.setattr("omnitrain.parallel.spawn.pool._GRACE_SECONDS", 5.0)
    with pytest.raises(RankError):
        sections.run(lost_in_a_step, str(tmp_path), victim, timeout_s=60, world=3)
    ended = float((tmp_path / "ended").read_text())
    told = [path.read_text().split("\n", 1) for path in tmp_path.glob("rank*")]
    assert told
    for at, error in told:
        assert float(at) - ended < 5
        assert f"section {section}" in error and f"rank {victim} is gone" in error and "message" in error, error
