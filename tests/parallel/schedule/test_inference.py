"""Generation and evaluation of a sharded model: ranks step together, and say what one process says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import Row, open_sources
from omnitrain.errors import UserError
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.generate import Answer, generate
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state, init_state_of
from omnitrain.recipe import ParallelPlan, Recipe, Sampling
from omnitrain.train.evaluate.evaluate import Answered, EvaluationResult, Evaluator
from omnitrain.train.process_groups import join_ranks
from tests.parallel.factories import qwen3_vl
from tests.tiny import TASKS, part, tiny_model, tiny_processor, tiny_recipe, tiny_row, tiny_tokenizer, write_parquet

TOKENS = 24
SAMPLED = {name: Sampling(temperature=1.0) for name in ("text", "image_decoder", "audio_decoder")}


def any_to_any() -> tuple[OmniModel, OmniProcessor, list[Sample]]:
    """Prompts of all tasks; those of odd numbers have no media.

    What ends an answer or starts a medium are tokens that this model does draw, each after another number of steps.
    """
    model = tiny_model(seed=3)
    processor = tiny_processor(model)
    tasks = [task for task in TASKS if task not in ("text", "text_to_image")]
    rows = [tiny_row(task, seed) for seed, with_media in enumerate(tasks) for task in (with_media, "text")]
    prompts = [processor.prompt(row, index) for index, row in enumerate(rows)]
    processor.end_token, processor.start_tokens = 215, {"image": 43, "audio": 184}
    return model, processor, [prompt for prompt in prompts if isinstance(prompt, Sample)]


def media_beside_text() -> tuple[OmniModel, Any, list[Sample]]:
    """Of a HF model that reads images and videos by itself: three texts, then prompts with media."""
    model = build_omni_model(foundation=qwen3_vl())
    probes = probe_samples(model.foundation, model.runner.native)
    assert [len(probe.modalities) for probe in probes] == [0, 0, 0, 1, 1, 2, 2]
    renderer = SimpleNamespace(native=NativeInputs(), grid_positions=lambda grid: None)
    processor = SimpleNamespace(
        start_tokens={}, writers={}, end_token=199, tokenizer=tiny_tokenizer(), renderer=renderer
    )
    return model, processor, [probe.sample for probe in probes]


def answers_of_rank(
    make: Callable[[], tuple[OmniModel, Any, list[Sample]]],
    shares: Sequence[Sequence[int]],
    samplings: Sequence[dict[str, Sampling]],
) -> list[dict[int, Answer]]:
    """For each way of sampling: number -> answer, for the prompts of this rank's share."""
    model, processor, prompts = make()
    own = shares[dist.get_rank()]
    build_parallelize_model(model, parallel_state=init_parallel_state(), enable_mixed_precision=False)
    some = [prompts[number] for number in own]
    answers = []
    for sampling in samplings:
        made = generate(model, processor, some, max_new_tokens=TOKENS, sampling=sampling, numbers=own)
        answers.append(dict(zip(own, made, strict=True)))
    return answers


def tokens_of(answers: Iterable[dict[int, Answer]]) -> dict[int, list[tuple[str, int]]]:
    return {number: answer.tokens for one in answers for number, answer in sorted(one.items())}


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param([[0, 2, 4, 6, 8], [9, 7]], id="2 ranks, one without media", marks=pytest.mark.slow),
        pytest.param([[8, 3, 4], [], [1, 2, 0, 5]], id="3 ranks, one without prompts"),
    ],
)
def test_ranks_that_finish_at_different_times_answer_as_one_process(ranks: RankPool, shares: list[list[int]]) -> None:
    model, processor, prompts = any_to_any()
    samplings: list[dict[str, Sampling]] = [{}, SAMPLED]
    made = ranks.run(answers_of_rank, any_to_any, shares, samplings, world=len(shares), timeout_s=120)
    steps = [max((len(answer.tokens) for answer in greedy.values()), default=0) for greedy, _ in made]
    assert len(set(steps)) > 1 and max(steps) == TOKENS
    for sampling, together in zip(samplings, zip(*made, strict=True), strict=True):
        alone = generate(model, processor, prompts, max_new_tokens=TOKENS, sampling=sampling)
        expected = {number: alone[number].tokens for share in shares for number in share}
        assert tokens_of(together) == expected
        assert {mode for answer in expected.values() for mode, _ in answer} >= {"text", "image_decoder"}


def test_towers_of_a_hf_model_are_called_equally_often_by_ranks_with_and_without_media(ranks: RankPool) -> None:
    model, processor, prompts = media_beside_text()
    alone = generate(model, processor, prompts, max_new_tokens=TOKENS)
    shares = [[0, 1], [6, 3, 4, 5]]
    together = ranks.run(answers_of_rank, media_beside_text, shares, [{}], world=2, timeout_s=1200)
    assert tokens_of(one for (one,) in together) == {
        number: alone[number].tokens for share in shares for number in share
    }


def refusals_of_rank(plan: dict[str, Any]) -> list[str]:
    """What each rank raises for prompts of rank 0 that it cannot answer; other ranks have none."""
    model, processor, (prompt, *_) = any_to_any()
    plan = ParallelPlan.model_validate(plan)
    build_parallelize_model(model, None, init_state_of(plan), plan, enable_mixed_precision=False)
    of_tokens = {"seen": np.zeros((1, len(prompt), 3), dtype=np.int64)}
    told = []
    for refused, sampling in [
        (prompt, {"text": Sampling(guidance=2)}),
        (replace(prompt, forward_inputs=of_tokens), {}),
    ]:
        with warnings.catch_warnings(action="ignore"), pytest.raises(UserError) as raised:
            generate(model, processor, [refused] * (dist.get_rank() == 0), sampling=sampling)
        told.append(str(raised.value))
    return told


@pytest.mark.parametrize("plan", [{}, {"sections": {"vision": {"ranks": 1, "components": ["image_encoder"]}}}])
def test_a_prompt_that_a_rank_cannot_answer_is_refused_on_all_ranks(ranks: RankPool, plan: dict[str, Any]) -> None:
    here, there = ranks.run(refusals_of_rank, plan, world=2, timeout_s=60)
    assert here == there and "cannot be guided: make it with" in here[0] and "with 'seen' for each token" in here[1]


def score(answers: list[Answered]) -> dict[str, float]:
    """Depends on every answer and on their order."""
    return {"sum": float(sum((i + 1) * token for i, a in enumerate(answers) for _, token in a.answer.tokens))}


def no_score(answers: list[Answered]) -> dict[str, float]:
    raise KeyError(f"{len(answers)} answers")


def evaluated(path: Path, scorer: str) -> EvaluationResult:
    """On all ranks, or on this process alone where there are none."""
    recipe = Recipe.load(str(path), [f"evaluation.scorer={__name__}:{scorer}"])
    model, processor, _ = any_to_any()
    ranks = join_ranks(recipe.parallel, torch.device("cpu"))
    if ranks.state is not None:
        build_parallelize_model(model, parallel_state=ranks.state, enable_mixed_precision=False)
    return Evaluator(model, processor, open_sources(recipe.data.heldout), recipe, ranks).evaluate()


def recipe_with(folder: Path, rows: list[Row]) -> Path:
    path = tiny_recipe(folder)
    settings = {"batch_size": 3, "max_new_tokens": TOKENS, "sampling": {"image_decoder": {"temperature": 1.0}}}
    tree = yaml.safe_load(path.read_text()) | {"evaluation": settings}
    tree["data"]["heldout"] = [{"path": str(write_parquet(folder / "heldout.parquet", rows))}]
    path.write_text(yaml.safe_dump(tree))
    return path


def damaged(row: Row) -> Row:
    return replace(row, id=f"damaged {row.id}", media=row.media | {"image": [b"no image"]})


@pytest.mark.parametrize(("world", "num_rows"), [(3, 2), pytest.param(2, 11, marks=pytest.mark.slow)])
def test_evaluation_over_ranks_is_that_of_one_process(
    ranks: RankPool, tmp_path: Path, world: int, num_rows: int
) -> None:
    rows = [tiny_row(TASKS[-1 - i % len(TASKS)], i) for i in range(num_rows)]
    rows[-1] = damaged(tiny_row("image_to_text", num_rows))
    path = recipe_with(tmp_path, rows)
    alone = evaluated(path, "score")
    first, *others = ranks.run(evaluated, path, "score", world=world, timeout_s=120)
    assert [a.row.id for a in first.answers] == [a.row.id for a in alone.answers] and len(alone.answers) == num_rows - 1
    assert [a.answer.tokens for a in first.answers] == [a.answer.tokens for a in alone.answers]
    assert first.scores == alone.scores and first.scores["sum"] > 0
    assert first.rejected == alone.rejected and [row.id for row in alone.rejected] == [rows[-1].id]
    assert flat(first.losses) == pytest.approx(flat(alone.losses), rel=1e-6)
    counts = {name: value for name, value in flat(alone.losses).items() if name.endswith("tokens")}
    assert counts and counts.items() <= flat(first.losses).items()
    for other in others:
        assert (other.losses, other.scores, other.rejected) == (first.losses, first.scores, first.rejected)
        assert other.answers == []


def flat(losses: dict[str, Any], prefix: str = "") -> dict[str, float]:
    return {
        path: number
        for name, value in losses.items()
        for path, number in (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        ).items()
    }


def problem_of(path: Path, scorer: str) -> str:
    try:
        evaluated(path, scorer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_a_scorer_that_raises_on_rank_0_ends_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    path = recipe_with(tmp_path, [tiny_row("text", seed) for seed in range(3)])
    first, other = ranks.run(problem_of, path, "no_score", world=2, timeout_s=120)
    assert first == "KeyError: '3 answers'" and other == "TrainingError: rank 0 failed: KeyError: '3 answers'"


def test_a_row_that_one_rank_cannot_use_at_all_ends_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ask = tiny_row("text", 0)
    writes_video = replace(
        ask, id="film", messages=[ask.messages[0], {"role": "assistant", "content": [part("video")]}]
    )
    path = recipe_with(tmp_path, [ask, writes_video])
    first, other = ranks.run(problem_of, path, "score", world=2, timeout_s=120)
    assert other.startswith("UserError: row 'film' of 'text' asks the model to write video")
    assert first.startswith("UserError: rank 1 failed: row 'film'")
