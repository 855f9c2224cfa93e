"""Twelve steps in which every rank draws what it draws: no hang, and the gradients of one process."""

from __future__ import annotations

import pytest
import torch

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import StepPlanner, step_planner
from omnitrain.parallel.verify.run import ShardedSGD
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import gradients, laid_out
from tests.parallel.step.random_tables import RANKS, Step, num_media, random_steps, step_batch

ENCODERS = ("image_encoder", "audio_encoder")
STEPS, SAMPLED = 12, 3  # every third step's gradients are compared
# Small: rounding of one step moves the weights of the next, and many updates at 0.01 amplify it to 1e-5 of a gradient.
LEARNING_RATE = 0.001

Gradients = dict[int, dict[str, torch.Tensor]]


def train(model: OmniModel, planner: StepPlanner, drawn: list[list]) -> Gradients:
    """Gradients of the sampled steps; ``drawn``: ``[step][micro-batch]`` samples of this rank."""
    optimizer = ShardedSGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    found = {}
    for index, micro_batches in enumerate(drawn):
        accumulate_gradients(model, step_batch(model, planner, micro_batches))
        if index % SAMPLED == SAMPLED - 1:
            found[index] = gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return found


def train_on_rank(steps: list[Step], state: dict[str, int], place: str) -> Gradients | None:
    model = laid_out({"memory": {"recompute": "full"}}, {name: {"place": place} for name in ENCODERS}, state)
    rank = torch.distributed.get_rank()
    found = train(model, step_planner(model), [step[rank] for step in steps])
    return found if rank == 0 else None


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return random_steps(any_to_any(), STEPS, seed=0)


@pytest.fixture(scope="module")
def expected(steps: list[Step]) -> Gradients:
    """Of one process: all samples of a step in one pack."""
    model = any_to_any().train()
    together = [[[sample for rank in step for drawn in rank for sample in drawn]] for step in steps]
    return train(model, step_planner(model), together)


def test_the_random_steps_have_every_mixture_of_ranks(steps: list[Step]) -> None:
    mixtures = {"text beside media": 0, "nothing beside media": 0, "unequal images": 0, "last is text": 0, "nothing": 0}
    for step in steps:
        micro_batches = list(zip(*step, strict=True))
        for drawn in micro_batches:
            has_media = [any(sample.spans for sample in samples) for samples in drawn]
            mixtures["text beside media"] += any(has_media) and any(
                s and not m for s, m in zip(drawn, has_media, strict=True)
            )
            mixtures["nothing beside media"] += any(has_media) and not all(drawn)
            mixtures["unequal images"] += len({num_media(samples, "image_encoder") for samples in drawn} - {0}) > 1
        earlier = [sample for drawn in micro_batches[:-1] for samples in drawn for sample in samples]
        last = [sample for samples in micro_batches[-1] for sample in samples]
        mixtures["last is text"] += any(s.spans for s in earlier) and bool(last) and not any(s.spans for s in last)
        mixtures["nothing"] += not any(samples for drawn in micro_batches for samples in drawn)
    assert all(mixtures.values()), mixtures


@pytest.mark.parametrize(
    ("state", "place"),
    [
        pytest.param({}, "local", id="dp4.local", marks=pytest.mark.slow),
        pytest.param({"dp_replicate_size": 2}, "world", id="hsdp2x2.world"),
    ],
)
@pytest.mark.second
def test_ranks_with_any_mixture_of_modalities_never_hang_and_have_the_gradients_of_one_process(
    ranks: RankPool, steps: list[Step], expected: Gradients, state: dict[str, int], place: str
) -> None:
    found = ranks.run(train_on_rank, steps, state, place, timeout_s=120, world=RANKS)[0]
    assert found.keys() == expected.keys() and len(found) == STEPS // SAMPLED
    for index, reference in expected.items():
        assert found[index].keys() == reference.keys(), index
        for name, gradient in reference.items():
            error, size = (found[index][name] - gradient).abs().max(), gradient.abs().max()
            # A key bias without rotary positions has a gradient that is zero but for rounding.
            allowed = 1e-5 * size if size > 1e-7 else 1e-7
            assert error <= allowed, f"step {index}, {name}: {error:.1e} of {size:.1e}"
