"""What a run says of a value that is not finite: the component, the micro-batch and its samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.nonfinite import NonFiniteError
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_recipe
from tests.train.test_trainer import load

Spoil = Callable[[Trainer, Callable[[], bool]], Any]


def infinite(value: Tensor) -> Tensor:
    return value * float("inf")


def encoder_output(trainer: Trainer, is_now: Callable[[], bool]) -> None:
    def spoil(_: Any, __: Any, output: Tensor) -> Tensor:
        return infinite(output) if is_now() else output

    trainer.model.image_encoder.projector.register_forward_hook(spoil)


def foundation_backward(trainer: Trainer, is_now: Callable[[], bool]) -> None:
    """The forward and the loss are finite."""

    def spoil(_: Any, __: Any, output: Tensor) -> None:
        if is_now():
            output.register_hook(infinite)

    trainer.model.foundation.model.layers[1].mlp.register_forward_hook(spoil)


def weight_gradient(trainer: Trainer, is_now: Callable[[], bool]) -> None:
    """So is the gradient of each activation."""
    weight = trainer.model.audio_encoder.projector.layers[1].weight
    weight.register_hook(lambda gradient: infinite(gradient) if is_now() else gradient)


def loss(trainer: Trainer, is_now: Callable[[], bool]) -> None:
    def spoil(_: Any, __: Any, output: Tensor) -> None:
        if is_now():
            output.register_hook(infinite)

    trainer.model.foundation.lm_head.register_forward_hook(spoil)


def spoiled_in(trainer: Trainer, micro_batch: int) -> Callable[[], bool]:
    """Whether the run is in the second step, and in this micro-batch."""
    return lambda: trainer.step == 1 and trainer.watch._place.micro_batch == micro_batch


def failure(recipe: Recipe, spoil: Spoil, micro_batch: int) -> tuple[list[str], list[tuple[str, ...]]]:
    """The lines of the error, and the samples of the micro-batches of the step."""
    trainer = Trainer(recipe)
    batches: list[Any] = []
    inner = trainer.train_step
    trainer.train_step = lambda batch: batches.append(batch) or inner(batch)  # type: ignore[func-returns-value]
    spoil(trainer, spoiled_in(trainer, micro_batch))
    with pytest.raises(NonFiniteError) as told:
        trainer.fit()
    assert trainer.step == 1
    return str(told.value).splitlines(), [tuple(pack.info.ids) for pack in batches[-1].packs]


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (encoder_output, "forward of image_encoder"),
        (foundation_backward, "backward of foundation"),
        (weight_gradient, "weight gradients of audio_encoder"),
        (loss, "backward of the loss"),
    ],
)
def test_the_component_and_the_micro_batch_are_named_in_which_it_began(
    tmp_path: Path, spoil: Spoil, where: str
) -> None:
    recipe = load(tiny_recipe(tmp_path, packs_per_step=3))
    lines, samples = failure(recipe, spoil, micro_batch=1)
    begun = [line for line in lines if line.startswith("  it began in ")]
    shown = ", ".join(samples[1][:8]) + (f" and {len(samples[1]) - 8} more" if len(samples[1]) > 8 else "")
    assert begun == [f"  it began in {where}, micro-batch 1: samples {shown}"]
    assert any(line.startswith("  loss of ") for line in lines) == (spoil is encoder_output)


def test_a_value_that_is_finite_when_it_is_computed_again_is_no_matter_of_the_samples(tmp_path: Path) -> None:
    def once(trainer: Trainer, is_now: Callable[[], bool]) -> None:
        calls: list[None] = []
        encoder_output(trainer, lambda: is_now() and not calls and calls.append(None) is None)

    lines, _ = failure(load(tiny_recipe(tmp_path, packs_per_step=2)), once, micro_batch=0)
    assert "computed again, all values of this step are finite: look for a fault of the hardware" in "".join(lines)


def failure_on_a_rank(recipe: Path, overrides: list[str], spoil: Spoil) -> tuple[list[str], list[tuple[str, ...]]]:
    """It begins on the last rank alone."""

    def on_the_last(trainer: Trainer, is_now: Callable[[], bool]) -> None:
        spoil(trainer, lambda: dist.get_rank() == dist.get_world_size() - 1 and is_now())

    return failure(Recipe.load(str(recipe), overrides), on_the_last, 1)


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (2, "parallel.components.image_encoder.place=world"),
        pytest.param(4, "parallel.default.ulysses=2", marks=pytest.mark.slow),
        pytest.param(4, "parallel.components.foundation.tp=2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (encoder_output, "forward of image_encoder"),
        pytest.param(foundation_backward, "backward of foundation", marks=pytest.mark.slow),
    ],
)
def test_of_several_ranks_that_one_is_named_from_which_the_others_got_it(
    ranks: RankPool, tmp_path: Path, world: int, plan: str, spoil: Spoil, where: str
) -> None:
    recipe = tiny_recipe(tmp_path, packs_per_step=2 * world)
    results = ranks.run(failure_on_a_rank, recipe, [plan], spoil, timeout_s=120, world=world)
    lines, samples = results[-1]
    assert all(others == lines for others, _ in results)
    begun = [line for line in lines if line.startswith("  it began in ")]
    assert begun[-1].startswith(f"  it began in {where}, micro-batch 1 of rank {world - 1}: samples ")
    assert begun[-1].endswith(", ".join(samples[1][:8]))


def spoiled_in_a_section(recipe: Path, overrides: list[str]) -> list[str]:
    """The image encoder of the last rank, in the third window of the second step."""
    trainer = Trainer(Recipe.load(str(recipe), overrides))

    def is_now() -> bool:
        action = trainer.watch._place.action
        return trainer.step == 1 and action is not None and action.window == 2

    if dist.get_rank() == dist.get_world_size() - 1:
        encoder_output(trainer, is_now)
    with pytest.raises(NonFiniteError) as told:
        trainer.fit()
    return str(told.value).splitlines()


@pytest.mark.second
def test_an_encoder_with_ranks_of_its_own_is_named_with_the_window_in_which_it_began(
    ranks: RankPool, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, packs_per_step=6)
    section = 'parallel.sections={"vision":{"components":["image_encoder"],"ranks":1}}'
    results = ranks.run(spoiled_in_a_section, recipe, [section, "data.pack_tokens=96"], timeout_s=120, world=3)
    begun = [[line for line in lines if line.startswith("  it began in ")] for lines in results]
    assert begun == [["  it began in forward of image_encoder from micro-batch 2, on rank 2"]] * 3


@pytest.mark.slow
def test_a_stage_does_not_take_the_gradient_of_the_next_one_for_that_of_the_loss(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The rank may be that of the stage before, which has the same samples."""
    recipe, plan = tiny_recipe(tmp_path, packs_per_step=4), "parallel.components.foundation.pp=2"
    results = ranks.run(failure_on_a_rank, recipe, [plan], foundation_backward, timeout_s=120, world=2)
    begun = [line for line in results[0][0] if line.startswith("  it began in ")]
    assert begun and all(line.startswith("  it began in backward of foundation, micro-batch 1 of") for line in begun)
    assert all(line.endswith(": samples " + ", ".join(results[0][1][1][:8])) for line in begun)
