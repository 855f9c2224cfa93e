"""Generation and evaluation on a pipeline, the stages in turn: the tokens and losses of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from transformers import PreTrainedModel

from omnitrain.data.packing.budget import pack_all
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.native import NativeInputs
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.generate import Answer, generate
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.recipe import Sampling
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from omnitrain.recipe.plan_groups import PipelineSchedule
from omnitrain.train.evaluate.evaluate import heldout_loss
from tests.parallel.factories import gemma3, qwen3_vl
from tests.parallel.schedule.test_inference import flat
from tests.tiny import FOUNDATION, TASKS, tiny_model, tiny_processor, tiny_row, tiny_samples, tiny_tokenizer

TOKENS = 24
SAMPLED = {name: Sampling(temperature=1.0) for name in ("text", "image_decoder", "audio_decoder")}

Made = tuple[OmniModel, Any, list[Sample], list[Pack]]


def any_to_any() -> Made:
    """Prompts and packs of all tasks, for a model with four blocks.

    What ends an answer or starts a medium are tokens that this model does draw, each after another number of steps.
    """
    model = tiny_model(seed=3, foundation=FOUNDATION | {"num_hidden_layers": 4})
    processor = tiny_processor(model)
    prompts = [processor.prompt(tiny_row(task, seed), seed) for seed, task in enumerate(TASKS)]
    packs = list(pack_all(tiny_samples(processor), 160))
    processor.end_token, processor.start_tokens = 202, {"image": 233, "audio": 26}
    return model, processor, [prompt for prompt in prompts if isinstance(prompt, Sample)], packs


def of_hf(make: Callable[[], PreTrainedModel]) -> Made:
    """Texts and prompts with media of a model that reads images by itself."""
    model = build_omni_model(foundation=make())
    samples = [probe.sample for probe in probe_samples(model.foundation, model.runner.native)]
    renderer = SimpleNamespace(native=NativeInputs(), grid_positions=lambda grid: None)
    processor = SimpleNamespace(
        start_tokens={}, writers={}, end_token=199, tokenizer=tiny_tokenizer(), renderer=renderer
    )
    return model, processor, samples, list(pack_all(samples, 64))


def deepstack() -> Made:
    return of_hf(qwen3_vl)


def windows() -> Made:
    """Caches of two kinds, and masks that depend on images."""
    return of_hf(gemma3)


def share_on(schedule: PipelineSchedule, model: OmniModel) -> tuple[int, int]:
    """Cut the model over the ranks, if there are any; return which rows are those of this rank: one of so many."""
    if not dist.is_initialized():
        return 0, 1
    plan = ParallelPlan(components={"foundation": ComponentPlan(pp=2, schedule=schedule)})
    state = init_state_of(plan)
    build_parallelize_model(model, parallel_state=state, parallel_plan=plan, enable_mixed_precision=False)
    return state.dp_rank, state.dp_size


def answered(
    make: Callable[[], Made],
    schedules: Sequence[PipelineSchedule] = (PipelineSchedule(),),
    ways: Sequence[tuple[dict[str, Sampling], bool]] = (({}, True),),
) -> list[tuple[dict[str, Any], dict[int, list[Answer]]]]:
    """For each schedule: held-out losses, and number of a prompt -> its answers; of this rank's prompts and packs.

    ``ways``: of generation: sampling, and whether keys and values are kept.
    """
    results = []
    for schedule in schedules:
        model, processor, prompts, packs = make()
        rank, size = share_on(schedule, model)
        own = range(rank, len(prompts), size)
        some = [prompts[number] for number in own]
        losses = heldout_loss(model.eval(), packs[rank::size])
        answers = [
            generate(
                model,
                processor,
                some,
                max_new_tokens=TOKENS,
                sampling=sampling,
                use_cache=use_cache,
                numbers=own,
            )
            for sampling, use_cache in ways
        ]
        results.append(
            (losses, {number: list(made) for number, made in zip(own, zip(*answers, strict=True), strict=True)})
        )
    return results


def tokens_of(answers: dict[int, list[Answer]]) -> dict[int, list[list[tuple[str, int]]]]:
    return {number: [answer.tokens for answer in made] for number, made in answers.items()}


def assert_equal(found: list, expected: list) -> None:
    """Losses and answers of every schedule; ``expected``: of one process."""
    ((losses, answers),) = expected
    for own_losses, own_answers in found:
        assert flat(own_losses) == pytest.approx(flat(losses), rel=1e-5)
        assert own_answers and tokens_of(own_answers) == tokens_of({number: answers[number] for number in own_answers})


@pytest.mark.second
def test_stages_in_turn_say_and_write_what_one_process_does(ranks: RankPool) -> None:
    """Two stages per rank, in turn and in a V: text, images and sound, greedy and sampled; all ranks know all of it."""
    schedules = [PipelineSchedule(chunks=2), PipelineSchedule(kind="zbv")]
    ways = [({}, True), (SAMPLED, True)]
    expected = answered(any_to_any, ways=ways)
    made = ranks.run(answered, any_to_any, schedules, ways, timeout_s=120, world=2)
    for found in made:
        assert len(found) == 2
        assert_equal(found, expected)
    answers = [answer for made in expected[0][1].values() for answer in made]
    assert {mode for answer in answers for mode, _ in answer.tokens} == {"text", "image_decoder", "audio_decoder"}
    assert any(answer.is_finished for answer in answers)
    parts = [[type(part).__name__ for a in answers for part in a.parts] for answers in made[1][0][1].values()]
    assert parts == [[type(part).__name__ for a in answers for part in a.parts] for answers in expected[0][1].values()]


@pytest.mark.parametrize("make", [deepstack, pytest.param(windows, marks=pytest.mark.slow)])
def test_later_stages_read_the_features_and_masks_of_media(ranks: RankPool, make: Callable[[], Made]) -> None:
    ways: list[tuple[dict[str, Sampling], bool]] = [({}, True), ({}, False)]
    expected = answered(make, ways=ways)
    for found in ranks.run(answered, make, [PipelineSchedule()], ways, timeout_s=120, world=2):
        assert_equal(found, expected)
