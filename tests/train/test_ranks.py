from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.state import leave_process_groups
from omnitrain.recipe import Optimizer, Recipe
from omnitrain.train import saves
from omnitrain.train.nonfinite import NonFiniteError
from omnitrain.train.trainer import RunSummary, Trainer
from tests.tiny import TASKS, tiny_moe_recipe, tiny_recipe, tiny_row, write_parquet

EVALUATED = ["evaluation.max_new_tokens=3", "evaluation.loss_every=3", "evaluation.batch_size=5", "data.workers=1"]
TWO_SLOTS = ["train.packs_per_step=2", "data.pack_tokens=96"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp2": (2, []),
    "hsdp2x2.recompute": (
        4,
        ["parallel.default.mode=hsdp", "parallel.default.dp_replicate=2", "parallel.default.memory.recompute=full"],
    ),
    "replicate2.world": (2, ["parallel.default.place=world", "parallel.default.mode=replicate"]),
    "sp2": (2, ["parallel.default.ulysses=2"]),
    "dp2.sp2": (4, ["parallel.default.ulysses=2"]),
    "tp2.dp2": (4, ["parallel.components.foundation.tp=2"]),
    "pp2.dp2": (4, ["parallel.components.foundation.pp=2"]),
}
SECOND = {"replicate2.world", "sp2"}


def fit(
    recipe: Path, overrides: Sequence[str], resume: bool = False, interrupted_at: int | None = None, times: int = 1
) -> RunSummary:
    """One rank's run; ``interrupted_at``: the last rank gets Ctrl-C at the end of that step; ``times``: of the call."""
    trainer = Trainer(Recipe.load(str(recipe), list(overrides)), resume=resume)
    inner = trainer.train_step

    def train_step(batch: object) -> tuple[float, float]:
        result = inner(batch)
        if trainer.step == interrupted_at and trainer.ranks.peers.rank == trainer.ranks.peers.size - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    trainer.train_step = train_step
    return [trainer.fit() for _ in range(times)][-1]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(run: Path, reference: Path) -> None:
    """Losses per head and source and gradient norms of every step, and the weights in the end."""
    lines, expected = metrics(run), metrics(reference)
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert line["sources"].keys() == other["sources"].keys() and line["data"] == other["data"]
        assert 0 <= line["data_wait"] <= 1
        assert "flops" not in line or line["flops"]["components"] == other["flops"]["components"]
        for name, head in other["heads"].items():
            assert line["heads"][name] == pytest.approx(head, rel=1e-5)
    assert [line["heldout"]["heads"]["text"] for line in lines if "heldout" in line] == [
        pytest.approx(line["heldout"]["heads"]["text"], rel=1e-4) for line in expected if "heldout" in line
    ]
    got, wanted = (OmniModel.from_pretrained(max((r / "checkpoints").glob("step-*"))) for r in (run, reference))
    for (name, weight), other in zip(got.named_parameters(), wanted.parameters(), strict=True):
        # A step of AdamW is as long as the rate whatever the gradient: rounding around zero moves a weight by that.
        assert (weight - other).abs().max() <= 0.05 * 3e-4 * len(lines) + 1e-5 * other.abs().max(), name


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its reference run of one process is beside it, in ``one``."""
    path = tiny_recipe(tmp_path_factory.mktemp("ranks"), rows=2 * len(TASKS), evaluated=True)
    fit(path, [f"output_dir={path.parent / 'one'}", *TWO_SLOTS, *EVALUATED])
    return path


@pytest.fixture(scope="module")
def counted(recipe: Path) -> Path:
    """The same run, which counts FLOPs."""
    fit(recipe, [f"output_dir={recipe.parent / 'counted'}", *TWO_SLOTS, *EVALUATED, "train.flops=true"])
    return recipe.parent / "counted"


@pytest.fixture(scope="module")
def text_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(tmp_path_factory.mktemp("text"), evaluated=True, text_only=True)


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (row[0] == 4) + [pytest.mark.second] * (name in SECOND), id=name)
        for name, row in LAYOUTS.items()
    ],
)
def test_a_run_on_ranks_is_the_run_of_one_process(
    ranks: RankPool, recipe: Path, tmp_path: Path, world: int, overrides: list[str], request: pytest.FixtureRequest
) -> None:
    """Four ranks share two packs. Evaluation gives the same scores; one checkpoint, one line per step.

    Each step has the same FLOPs of each component, whoever encodes and whoever has a part of the sequence.
    """
    counts = bool(overrides)  # it takes longer than all the rest
    reference = request.getfixturevalue("counted") if counts else recipe.parent / "one"
    arguments = [f"output_dir={tmp_path / 'run'}", *TWO_SLOTS, *EVALUATED, f"train.flops={counts}", *overrides]
    first, *others = ranks.run(fit, recipe, arguments, timeout_s=120, world=world)
    assert_same_run(tmp_path / "run", reference)
    scores = json.loads((reference / "eval.json").read_text())
    got = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert got.keys() == scores.keys()
    assert got["losses"]["heads"]["text"] == pytest.approx(scores["losses"]["heads"]["text"], rel=1e-4)
    assert all(other.scores.keys() == first.scores.keys() and other.step == 4 for other in others)
    lines = metrics(tmp_path / "run")
    flops = [line["flops"] for line in lines if counts]
    assert all(set(of_step["components"]) > {"foundation", "image_encoder"} for of_step in flops)
    hardware = [of_step["per_step_hardware"] / of_step["per_step"] for of_step in flops]
    assert all(
        (ratio > 1.1) if "parallel.default.memory.recompute=full" in overrides else ratio == 1 for ratio in hardware
    )
    encoders = [row for line in lines for row in line.get("encoders", {}).values()]
    assert encoders and all(1 <= row["imbalance"] <= row["imbalance_drawn"] for row in encoders)
    costs = [row["cost"] for row in encoders]
    encoding = world // (2 if "parallel.components.foundation.pp=2" in overrides else 1)  # ranks of the first stage
    assert all(len(cost["by_rank"]) == encoding and max(cost["by_rank"]) == cost["max"] > 0 for cost in costs)
    assert all(sum(cost["by_rank"]) == pytest.approx(encoding * cost["mean"]) for cost in costs)
    assert all((row["bytes_moved"] > 0) <= (row["waited"] > 0) for row in encoders)
    assert any(row["bytes_moved"] for row in encoders) == any(row["moved"] for row in encoders)


def nan_on_the_last_rank(recipe: Path, overrides: list[str]) -> str:
    """Its third step is not finite there. A step takes 700 s on the clock of the first rank, and none on the other."""
    trainer = Trainer(Recipe.load(str(recipe), overrides))
    is_last, norm = trainer.ranks.peers.rank == trainer.ranks.peers.size - 1, trainer.model.foundation.model.norm
    norm.register_forward_hook(lambda _, __, out: out * float("nan") if is_last and trainer.step == 2 else None)
    saves.time = SimpleNamespace(monotonic=lambda: 0.0 if is_last else 700.0 * trainer.step)
    try:
        trainer.fit()
    except NonFiniteError as error:
        return str(error)
    finally:
        saves.time = time
    return "no error"


@pytest.mark.parametrize("overrides", [[], ["parallel.components.foundation.pp=2"]], ids=["dp2", "pp2"])
def test_ranks_save_at_the_same_steps_and_stop_at_the_nan_of_one_of_them(
    ranks: RankPool, text_recipe: Path, tmp_path: Path, overrides: list[str]
) -> None:
    run = tmp_path / "run"
    arguments = [f"output_dir={run}", *TWO_SLOTS, *overrides]
    first, other = ranks.run(nan_on_the_last_rank, text_recipe, arguments, timeout_s=120, world=2)
    assert first == other and first.startswith("step 3: the loss is nan")
    assert f"the steps before it are saved in {run / 'checkpoints' / 'step-00000002'}" in first
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000001", "step-00000002"]


def test_a_run_goes_on_with_another_number_of_ranks(ranks: RankPool, recipe: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches one rank only; all of them stop after the same step, save once, and one process goes on."""
    arguments = [f"output_dir={tmp_path / 'run'}", *TWO_SLOTS, *EVALUATED]
    summaries = ranks.run(fit, recipe, arguments, False, 2, timeout_s=120, world=2)
    assert [(s.interrupted, s.step) for s in summaries] == [(True, 2), (True, 2)]
    fit(recipe, [*arguments, "parallel.default.memory.recompute=full"], resume=True)
    leave_process_groups()
    assert_same_run(tmp_path / "run", recipe.parent / "one")


@pytest.mark.second
def test_a_run_on_a_pipeline_is_the_run_of_one_process_and_goes_on_there(
    ranks: RankPool, recipe: Path, tmp_path: Path
) -> None:
    arguments = [f"output_dir={tmp_path / 'run'}", *TWO_SLOTS, *EVALUATED, "parallel.components.foundation.pp=2"]
    ranks.run(fit, recipe, arguments, False, 2, timeout_s=120, world=2)
    first, other = ranks.run(fit, recipe, arguments, True, timeout_s=120, world=2)
    assert_same_run(tmp_path / "run", recipe.parent / "one")
    found, expected = (json.loads((run / "eval.json").read_text()) for run in (tmp_path / "run", recipe.parent / "one"))
    assert found.keys() == expected.keys() and other.scores.keys() == first.scores.keys()
    assert found["losses"]["heads"]["text"] == pytest.approx(expected["losses"]["heads"]["text"], rel=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_with_any_other_stages(ranks: RankPool, recipe: Path, tmp_path: Path) -> None:
    """One step on a pipeline, one on data parallel ranks, two in one process."""
    arguments = [f"output_dir={tmp_path / 'run'}", *TWO_SLOTS, *EVALUATED]
    ranks.run(fit, recipe, [*arguments, "parallel.components.foundation.pp=2"], False, 1, timeout_s=120, world=2)
    ranks.run(fit, recipe, arguments, True, 2, timeout_s=120, world=2)
    fit(recipe, arguments, resume=True)
    leave_process_groups()
    assert_same_run(tmp_path / "run", recipe.parent / "one")


# The update is nearly linear in the gradients, as that of SGD with momentum: the weights show every difference.
AS_SGD = ["train.optimizer.eps=10", "train.optimizer.learning_rate=1", "train.optimizer.weight_decay=0"]
STAGES_IN_TURN = ["parallel.components.foundation.pp=2", "parallel.components.foundation.schedule.chunks=2"]


@pytest.mark.parametrize(
    ("world", "then"),
    [
        pytest.param(2, {"one": (1, [])}, id="pp2.v2", marks=pytest.mark.second),
        pytest.param(
            4,
            {"dp4": (4, []), "pp4": (4, ["parallel.components.foundation.pp=4"]), "one": (1, [])},
            id="pp2.v2.dp2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_weights_of_a_run_that_leaves_its_pipeline_are_those_of_one_process(
    ranks: RankPool, tmp_path: Path, world: int, then: dict[str, tuple[int, list[str]]]
) -> None:
    path = tiny_recipe(tmp_path, text_only=True)
    settings = ["train.packs_per_step=4", "data.pack_tokens=96", "model.foundation.config.num_hidden_layers=4", *AS_SGD]

    def weights(run: str) -> dict[str, torch.Tensor]:
        return OmniModel.from_pretrained(max((tmp_path / run / "checkpoints").glob("step-*"))).state_dict()

    fit(path, [f"output_dir={tmp_path / 'whole'}", *settings])
    begun = [f"output_dir={tmp_path / 'begun'}", *settings]
    ranks.run(fit, path, [*begun, *STAGES_IN_TURN], False, 2, timeout_s=120, world=world)
    before, expected = weights("begun"), weights("whole")
    for name, (number, overrides) in then.items():
        shutil.copytree(tmp_path / "begun", tmp_path / name)
        arguments = [f"output_dir={tmp_path / name}", *settings, *overrides]
        if number == 1:
            fit(path, arguments, resume=True)
            leave_process_groups()
        else:
            ranks.run(fit, path, arguments, True, timeout_s=120, world=number)
        for key, weight in weights(name).items():
            moved, error = (expected[key] - before[key]).abs().max(), (weight - expected[key]).abs().max()
            assert moved > 0 and error <= 1e-5 * expected[key].abs().max() + 1e-3 * moved, (name, key, moved, error)


def with_momentum(model: OmniModel, settings: Optimizer, *_: object) -> torch.optim.SGD:
    """In place of AdamW: its update is linear in the gradients, so that weights show every difference."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(
        [{"params": trained, "peak": settings.learning_rate}], settings.learning_rate, momentum=0.9, foreach=False
    )


def fit_with_momentum(
    recipe: Path, overrides: Sequence[str], resume: bool = False, interrupted_at: int | None = None
) -> RunSummary:
    with patch("omnitrain.train.lr_groups.build_optimizer", with_momentum):
        return fit(recipe, overrides, resume, interrupted_at)


@pytest.fixture(scope="module")
def momentum_runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """Kind of model -> its recipe, with settings; beside it ``whole``, a run of four ranks, and ``begun``, its half."""

    @cache
    def make(kind: str) -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp(kind)
        path = tiny_moe_recipe(folder) if kind == "moe" else tiny_recipe(folder, text_only=True)
        settings = ["train.packs_per_step=4", "data.pack_tokens=96", "train.optimizer.learning_rate=0.1"]
        for name, stop in (("whole", None), ("begun", 2)):
            run = [f"output_dir={folder / name}", *settings]
            ranks.run(fit_with_momentum, path, run, False, stop, timeout_s=120, world=4)
        return path, settings

    return make


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        pytest.param(1, [], marks=pytest.mark.second),
        pytest.param(3, [], marks=pytest.mark.second),
        pytest.param(2, [], marks=pytest.mark.slow),
        pytest.param(4, ["parallel.default.ulysses=2"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel.components.foundation.tp=2"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel.components.foundation.ep=2"], marks=pytest.mark.slow),
        pytest.param(4, ["parallel.default.mode=hsdp", "parallel.default.dp_replicate=2"], marks=pytest.mark.slow),
    ],
    ids=["one", "dp3", "dp2", "dp2.sp2", "tp2", "ep2", "hsdp2x2"],
)
def test_a_run_of_sgd_with_momentum_that_began_on_four_ranks_goes_on_in_any_layout(
    ranks: RankPool,
    momentum_runs: Callable[[str], tuple[Path, list[str]]],
    tmp_path: Path,
    world: int,
    overrides: list[str],
) -> None:
    recipe, settings = momentum_runs("moe" if "parallel.components.foundation.ep=2" in overrides else "text")
    shutil.copytree(recipe.parent / "begun", tmp_path / "run")
    arguments = [f"output_dir={tmp_path / 'run'}", *settings, *overrides]
    ranks.run(fit_with_momentum, recipe, arguments, True, timeout_s=120, world=world)
    found, expected = metrics(tmp_path / "run"), metrics(recipe.parent / "whole")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for line, other in zip(found, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
    last = [run / "checkpoints" / "step-00000004" for run in (tmp_path / "run", recipe.parent / "whole")]
    begun = OmniModel.from_pretrained(recipe.parent / "begun" / "checkpoints" / "step-00000002").state_dict()
    one, other = (OmniModel.from_pretrained(checkpoint).state_dict() for checkpoint in last)
    assert max(float((weight - other[name]).abs().max()) for name, weight in one.items()) <= 1e-6
    assert min(float((weight - begun[name]).abs().max()) for name, weight in one.items()) > 1e-6
    states = [torch.load(checkpoint / "trainer.pt")["state"]["data"] for checkpoint in last]
    assert states[0] == states[1]  # the same samples were drawn


def test_a_trainer_goes_on_where_ctrl_c_ended_it(ranks: RankPool, text_recipe: Path, tmp_path: Path) -> None:
    arguments = [f"output_dir={tmp_path / 'run'}", *TWO_SLOTS]
    summaries = ranks.run(fit, text_recipe, arguments, False, 2, 2, timeout_s=60, world=2)
    assert [(s.interrupted, s.step) for s in summaries] == [(False, 4), (False, 4)]
    fit(text_recipe, [f"output_dir={tmp_path / 'one'}", *TWO_SLOTS])
    leave_process_groups()
    found, expected = ([line["loss"] for line in metrics(tmp_path / run)] for run in ("run", "one"))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("axis", "stops"),
    [pytest.param("tp", [2], marks=pytest.mark.second), pytest.param("pp", [1, 3], marks=pytest.mark.slow)],
    ids=["tp", "pp"],
)
def test_a_run_of_adapters_goes_on_without_the_ranks_that_cut_its_matrices_or_its_blocks(
    ranks: RankPool, text_recipe: Path, tmp_path: Path, axis: str, stops: list[int]
) -> None:
    """The adapters of all stages are in one folder, from which a pipeline goes on, and then one process."""
    lora = "parallel.components.foundation.lora={targets: ['*_proj'], rank: 4}"
    fit(text_recipe, [f"output_dir={tmp_path / 'one'}", *TWO_SLOTS, lora])
    leave_process_groups()
    arguments = [f"output_dir={tmp_path / axis}", *TWO_SLOTS, lora]
    for stop in stops:
        cut = [*arguments, f"parallel.components.foundation.{axis}=2"]
        ranks.run(fit, text_recipe, cut, stop > stops[0], stop, timeout_s=120, world=2)
    fit(text_recipe, arguments, resume=True)
    leave_process_groups()
    assert_same_run(tmp_path / axis, tmp_path / "one")


def test_the_experts_of_all_stages_are_measured_balanced_and_recorded(ranks: RankPool, tmp_path: Path) -> None:
    """One process takes the experts that the two stages wrote, and finds none that it would not have chosen."""
    recipe, lines = tiny_moe_recipe(tmp_path), {}
    for name, overrides in (("pp2", ["parallel.components.foundation.pp=2", "record"]), ("one", ["replay"])):
        *plan, files = overrides
        arguments = [f"output_dir={tmp_path / name}", f"train.experts.{files}={tmp_path / 'routing'}", *plan]
        ranks.run(
            fit, recipe, [*arguments, "train.experts.loss=sample", "train.steps=1"], timeout_s=120, world=1 + len(plan)
        )
        lines[name] = metrics(tmp_path / name)
    for line, other in zip(lines["pp2"], lines["one"], strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5) and other["replay"]["others"] == 0
        assert len(line["experts"]) == 2
        for layer, row in other["experts"].items():
            for key in ("load", "entropy"):
                assert line["experts"][layer][key] == pytest.approx(row[key], rel=1e-6)
    saved = [torch.load(tmp_path / run / "checkpoints" / "step-00000001" / "trainer.pt") for run in ("pp2", "one")]
    found, expected = (file["state"]["expert_shares"] for file in saved)
    assert found.keys() == expected.keys() and len(found) == 2
    assert all(found[layer] == pytest.approx(values) for layer, values in expected.items())


@pytest.mark.second
def test_a_run_computes_in_bf16_where_it_is_told_to(ranks: RankPool, recipe: Path, tmp_path: Path) -> None:
    """Evaluation, too; the state stays fp32, and losses are those of fp32 up to rounding."""
    arguments = [f"output_dir={tmp_path / 'run'}", *TWO_SLOTS, *EVALUATED]
    ranks.run(fit, recipe, [*arguments, "train.precision=bf16"], timeout_s=120, world=2)
    for line, other in zip(metrics(tmp_path / "run"), metrics(recipe.parent / "one"), strict=True):
        assert 0 < abs(line["loss"] / other["loss"] - 1) < 0.02
    saved = OmniModel.from_pretrained(max((tmp_path / "run" / "checkpoints").glob("step-*")))
    assert {parameter.dtype for parameter in saved.parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Packs per step -> a recipe of all media; its reference run of one process is beside it, in ``one``."""

    @cache
    def make(micro_batches: int) -> Path:
        path = tiny_recipe(tmp_path_factory.mktemp("packs"), rows=2 * len(TASKS), packs_per_step=micro_batches)
        fit(path, [f"output_dir={path.parent / 'one'}", "data.pack_tokens=96", *AS_SGD])
        leave_process_groups()
        return path

    return make


ON_VISION_RANK = "parallel.sections={vision: {components: [image_encoder], ranks: 1}}"


@pytest.mark.parametrize(
    ("world", "micro_batches", "overrides"),
    [
        pytest.param(3, 4, [], marks=pytest.mark.second),
        pytest.param(4, 5, ["parallel.components.foundation.pp=2"], marks=pytest.mark.slow),
        pytest.param(4, 4, [ON_VISION_RANK], marks=pytest.mark.slow),
        pytest.param(4, 3, [], marks=pytest.mark.slow),
        pytest.param(4, 5, ["parallel.default.mode=hsdp", "parallel.default.dp_replicate=2"], marks=pytest.mark.slow),
        pytest.param(4, 5, ["parallel.components.foundation.tp=2"], marks=pytest.mark.slow),
    ],
    ids=["dp3", "pp2.dp2", "dp3.section", "dp4", "hsdp2x2", "tp2.dp2"],
)
def test_any_number_of_ranks_runs_any_number_of_packs(
    ranks: RankPool,
    recipe_of: Callable[[int], Path],
    tmp_path: Path,
    world: int,
    micro_batches: int,
    overrides: list[str],
) -> None:
    """Some ranks have a pack less than others, or one for themselves where two others divide theirs."""
    recipe, run = recipe_of(micro_batches), tmp_path / "run"
    arguments = [f"output_dir={run}", "data.pack_tokens=96", *AS_SGD, *overrides]
    ranks.run(fit, recipe, arguments, timeout_s=120, world=world)
    found, expected = metrics(run), metrics(recipe.parent / "one")
    assert len(found) == len(expected) == 4
    for line, other in zip(found, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert line["sources"].keys() == other["sources"].keys()
        assert "flops" not in line or line["flops"]["components"] == other["flops"]["components"]
    states = [torch.load(of / "checkpoints" / "step-00000004" / "trainer.pt") for of in (run, recipe.parent / "one")]
    assert states[0]["state"]["data"] == states[1]["state"]["data"]


def test_idle_packs_do_not_count_in_the_balance_of_the_micro_batches(ranks: RankPool, tmp_path: Path) -> None:
    """Three ranks run four packs as six micro-batches; the mean is over four."""
    recipe = tiny_moe_recipe(tmp_path)
    settings = ["train.packs_per_step=4", "train.steps=2", "train.experts.loss=micro_batch", "train.experts.weight=0.1"]
    fit(recipe, [f"output_dir={tmp_path / 'one'}", *settings])
    leave_process_groups()
    ranks.run(fit, recipe, [f"output_dir={tmp_path / 'run'}", *settings], timeout_s=120, world=3)
    for line, other in zip(metrics(tmp_path / "run"), metrics(tmp_path / "one"), strict=True):
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def fit_elsewhere(recipe: Path, folder: Path, overrides: Sequence[str]) -> None:
    """Each rank has a folder of its own."""
    with patch("omnitrain.checkpoint.store._TIMEOUT_S", 0.0):
        fit(recipe, [*overrides, f"output_dir={folder / str(dist.get_rank())}"])


def test_a_folder_that_ranks_do_not_share_is_refused_before_the_first_step(
    ranks: RankPool, text_recipe: Path, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=r"output_dir: .*use a folder that all machines share"):
        ranks.run(fit_elsewhere, text_recipe, tmp_path, TWO_SLOTS, timeout_s=60, world=2)
    assert sorted(file.name for file in (tmp_path / "0").iterdir()) == [
        ".lock",
        "environment.json",
        "layout.json",
        "metrics.jsonl",
        "recipe.yaml",
    ]


@pytest.mark.second
def test_a_failing_scorer_ends_all_ranks(ranks: RankPool, text_recipe: Path, tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text("def score(answers):\n    raise RuntimeError('no score today')\n")
    arguments = [f"output_dir={tmp_path / 'run'}", *TWO_SLOTS, *EVALUATED, f"evaluation.scorer={scorer}:score"]
    with pytest.raises(RankError, match=r"failed on 2 of 2 ranks[^$]*no score today"):
        ranks.run(fit, text_recipe, arguments, timeout_s=60, world=2)
    assert (tmp_path / "run" / "checkpoints").is_dir()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_row_that_fails_on_some_ranks_ends_all_of_them(
    ranks: RankPool, recipe: Path, tmp_path: Path, workers: int
) -> None:
    """In the first step, before the ranks have talked; without a data process that would end with the error, too."""
    rows = [tiny_row("text", seed) for seed in range(40)]
    rows[20].messages[0]["content"][0]["text"] = "long " * 500
    data = write_parquet(tmp_path / "rows.parquet", rows)
    arguments = [f"output_dir={tmp_path / 'run'}", *TWO_SLOTS, f"data.train=[{{path: {data}}}]", "data.overlong=error"]
    arguments += ["model.encoders={}", "model.decoders={}", "data.heldout=[]", "evaluation=null"]
    with pytest.raises(RankError, match=r"failed on 4 of 4 ranks") as failure:
        ranks.run(fit, recipe, [*arguments, f"data.workers={workers}", "train.steps=40"], timeout_s=60, world=4)
    assert "a pack holds at most 96" in str(failure.value)
    assert "TrainingError: the data failed on another rank" in str(failure.value)


@pytest.mark.second
def test_ranks_count_and_list_the_rows_that_they_reject_as_one_process_does(ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks begin the run, and three go on."""
    recipe, rows = tiny_recipe(tmp_path, text_only=True, steps=8), [tiny_row("text", seed) for seed in range(48)]
    bad = (3, 12, 20, 31, 40)
    for seed in bad:
        rows[seed].messages[0]["content"][0]["text"] = "long " * 500
    rows[20] = replace(rows[20], source="books")
    write_parquet(tmp_path / "train.parquet", rows)
    run, whole = tmp_path / "run", tmp_path / "whole"
    fit(recipe, [f"output_dir={whole}", *TWO_SLOTS])
    leave_process_groups()
    ranks.run(fit, recipe, [f"output_dir={run}", *TWO_SLOTS], False, 2, timeout_s=60, world=2)
    ranks.run(fit, recipe, [f"output_dir={run}", *TWO_SLOTS], True, timeout_s=60, world=3)
    counts = [line["rejected"] for line in metrics(whole)]
    assert [line["rejected"] for line in metrics(run)] == counts
    reasons = [line["rejected_reasons"] for line in metrics(whole)]
    assert [line["rejected_reasons"] for line in metrics(run)] == reasons
    overlong = "... tokens, but a pack holds at most ..."
    assert reasons[-1] == {"books": {overlong: 1}, "text": {overlong: 4}}
    assert sum(counts[1].values()) < 5 and counts[-1] == {"books": 1, "text": 4}
    listed = [[json.loads(line) for line in (of / "rejected.jsonl").read_text().splitlines()] for of in (whole, run)]
    assert [sorted(row["id"] for row in of_run) for of_run in listed] == [sorted(rows[i].id for i in bad)] * 2


def compiled_blocks(recipe: Path, overrides: Sequence[str]) -> list[str] | None:
    compiled = Trainer(Recipe.load(str(recipe), list(overrides))).compiled
    return compiled and compiled.names


def test_a_trainer_knows_what_its_plan_compiles(ranks: RankPool, recipe: Path, tmp_path: Path) -> None:
    arguments = [f"output_dir={tmp_path / 'run'}", "parallel.components.foundation.compile=true"]
    (names,) = ranks.run(compiled_blocks, recipe, arguments, timeout_s=60, world=1)
    assert names == ["model.layers.0", "model.layers.1"]


def seeded_noise(recipe: Path, overrides: Sequence[str], resume: bool) -> list[float]:
    """What dropout would draw in each step."""
    trainer = Trainer(Recipe.load(str(recipe), list(overrides)), resume=resume)
    inner, drawn = trainer.optimizer.step, []

    def step() -> None:
        drawn.append(float(torch.rand(())))
        inner()

    trainer.optimizer.step = step
    trainer.fit()
    if dist.is_initialized():
        assert len(set(trainer.ranks.peers.gather(drawn[0]))) == dist.get_world_size()
    return drawn


@pytest.mark.second
def test_random_numbers_of_a_step_do_not_depend_on_resuming(text_recipe: Path, tmp_path: Path) -> None:
    whole = seeded_noise(text_recipe, [f"output_dir={tmp_path / 'a'}"], False)
    first = seeded_noise(text_recipe, [f"output_dir={tmp_path / 'b'}", "train.steps=2"], False)
    rest = seeded_noise(text_recipe, [f"output_dir={tmp_path / 'b'}", "train.steps=4"], True)
    assert whole == first + rest and len(set(whole)) == 4


def test_ranks_draw_random_numbers_of_their_own(ranks: RankPool, text_recipe: Path, tmp_path: Path) -> None:
    ranks.run(seeded_noise, text_recipe, [f"output_dir={tmp_path / 'run'}", *TWO_SLOTS], False, timeout_s=60, world=2)
