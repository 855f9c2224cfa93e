"""A run with sections is that of one process, and goes on with other ranks from what they saved together."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import leave_process_groups
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer
from tests.tiny import TASKS, tiny_recipe
from tests.train.test_encoder_costs import FAST, FOUND, costs_of_steps
from tests.train.test_ranks import assert_same_run, metrics
from tests.train.test_ranks import fit_with_momentum as fit

pytestmark = pytest.mark.ranks


def section(components: Sequence[str] = ("image_encoder", "audio_encoder"), ranks: int = 1, **fields: Any) -> str:
    settings = {"components": [*components], "ranks": ranks} | fields
    return f"parallel.sections={{media: {settings}}}"


MEDIA = section()
APART = (
    "parallel.sections={towers: {components: [image_encoder.tower, audio_encoder.tower], ranks: 1}, "
    "projector: {components: [image_encoder.projector], ranks: 1}}"
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(tmp_path_factory.mktemp("sections"), rows=2 * len(TASKS))


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    saved = OmniModel.from_pretrained(max((run / "checkpoints").glob("step-*")))
    return {name: weight.detach() for name, weight in saved.named_parameters()}


def worst_error(run: Path, reference: Path) -> float:
    """Largest difference of a weight, relative to the largest element of that weight, or to 0.01.

    A bias that began at 0 and gets no gradient is rounding, and nothing else.
    """
    found, expected = last_weights(run), last_weights(reference)
    assert found.keys() == expected.keys()
    return max(float((found[n] - w).abs().max() / w.abs().max().clamp(min=0.01)) for n, w in expected.items())


def slots(number: int) -> list[str]:
    return [f"train.packs_per_step={number}", "data.pack_tokens=96", "train.optimizer.learning_rate=0.1"]


@pytest.fixture(scope="module")
def whole(recipe: Path, sections: RankPool) -> Path:
    """An uninterrupted run on sections of two ranks and one."""
    run = recipe.parent / "whole"
    sections.run(fit, recipe, [f"output_dir={run}", *slots(2), MEDIA], timeout_s=300, world=3)
    return run


@pytest.fixture(scope="module")
def half(recipe: Path, sections: RankPool) -> Path:
    """The same run, after two of its four steps."""
    return run_half(sections, recipe, recipe.parent / "half", slots(2))


def run_half(sections: RankPool, recipe: Path, run: Path, arguments: list[str]) -> Path:
    """Two steps on sections of two ranks and one."""
    given = [f"output_dir={run}", *arguments, MEDIA]
    summaries = sections.run(fit, recipe, given, False, 2, timeout_s=300, world=3)
    assert [(s.interrupted, s.step) for s in summaries] == [(True, 2)] * 3
    return run


def go_on(sections: RankPool, recipe: Path, run: Path, arguments: list[str], world: int) -> None:
    """The other steps, on ``world`` ranks."""
    given = [f"output_dir={run}", *arguments]
    if world == 1:
        fit(recipe, given, resume=True)
        leave_process_groups()
    else:
        sections.run(fit, recipe, given, True, timeout_s=300, world=world)


@pytest.mark.second
def test_a_run_with_a_section_is_the_run_of_one_process_and_goes_on_there(
    sections: RankPool, recipe: Path, tmp_path: Path, whole: Path, half: Path
) -> None:
    fit(recipe, [f"output_dir={tmp_path / 'one'}", *slots(2)])
    leave_process_groups()
    assert_same_run(whole, tmp_path / "one")
    assert worst_error(whole, tmp_path / "one") < 1e-6
    run = Path(shutil.copytree(half, tmp_path / "run"))
    go_on(sections, recipe, run, [*slots(2), "parallel.sections={}"], 1)
    assert worst_error(run, whole) < 1e-6


@pytest.mark.second
def test_a_run_that_goes_on_with_the_same_sections_has_the_same_bits(
    sections: RankPool, recipe: Path, tmp_path: Path, whole: Path, half: Path
) -> None:
    run = Path(shutil.copytree(half, tmp_path / "run"))
    go_on(sections, recipe, run, [*slots(2), MEDIA], 3)
    assert worst_error(run, whole) == 0


@pytest.mark.slow
@pytest.mark.parametrize("now", [MEDIA, "parallel.sections={}", section(ranks=2), section(["audio_encoder"]), APART])
def test_a_run_goes_on_with_other_sections(sections: RankPool, recipe: Path, tmp_path: Path, now: str) -> None:
    """On three ranks and one, four without sections, two and two, and with another component apart."""
    settings = [*slots(12), "data.pack_elements={image_encoder: 100_000}"]
    fit(recipe, [f"output_dir={tmp_path / 'one'}", *settings])
    leave_process_groups()
    run = run_half(sections, recipe, tmp_path / "run", settings)
    go_on(sections, recipe, run, [*settings, now], 4)
    assert worst_error(run, tmp_path / "one") < 1e-6
    assert [line["data"] for line in metrics(run)] == [line["data"] for line in metrics(tmp_path / "one")]


@pytest.mark.slow
def test_a_cost_that_a_section_has_measured_counts_where_the_run_goes_on(sections: RankPool, tmp_path: Path) -> None:
    """Measured on two ranks of a section, and used on two ranks without one."""
    recipe = tiny_recipe(tmp_path)
    cost = ["parallel.components.image_encoder.quadratic_cost=measured", "train.optimizer.schedule=constant"]
    unused = FAST["UNUSED_STEPS"]
    short, long = ([*cost, f"train.steps={steps}"] for steps in (unused + 1, unused + 3))
    apart = section(["image_encoder"], ranks=2)
    (first, measured), *others = sections.run(costs_of_steps, recipe, [*short, apart], False, timeout_s=180, world=3)
    assert all(costs == first for costs, _ in others)
    assert sum(row.seconds > 0 for row in measured) >= FAST["MEASURED_STEPS"] - FAST["WARM_UP"]
    linear = set().union(*first[:unused])
    assert max(first[unused]) > max(linear)
    saved = tmp_path / "run" / "checkpoints" / f"step-{unused + 1:08d}" / "trainer.pt"
    assert torch.load(saved, weights_only=True)["state"]["quadratic_costs"] == {"image_encoder": FOUND}
    now = [*long, "parallel.sections={}", "parallel.components.image_encoder.place=world"]
    (more, again), _ = sections.run(costs_of_steps, recipe, now, True, timeout_s=180, world=2)
    assert again == [] and len(more) == 2 and all(max(costs) > max(linear) for costs in more)


def bytes_of(recipe: Path, overrides: Sequence[str]) -> tuple[str, dict[str, int], dict[str, int]]:
    """This rank's section, and of each component the bytes that it holds, and the bytes of the whole component."""
    trainer = Trainer(Recipe.load(str(recipe), list(overrides)))
    layout = layout_of(trainer.model)
    assert layout is not None
    held, all_of_it = {}, {}
    for name, parameters in trainer.model.components.items():
        local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters.values()]
        held[name] = sum(tensor.untyped_storage().nbytes() for tensor in local if not tensor.is_meta)
        all_of_it[name] = sum(p.numel() * p.element_size() for p in parameters.values())
    dist.barrier()  # the store of the ranks' watch is on rank 0
    return layout.state.section, held, all_of_it


def test_a_rank_holds_nothing_of_the_components_of_other_sections(
    sections: RankPool, recipe: Path, tmp_path: Path
) -> None:
    """The two ranks of ``main`` hold each byte of it once, the section's rank those of its encoders, and no more."""
    arguments = [f"output_dir={tmp_path / 'run'}", *slots(2), MEDIA]
    *of_main, of_media = sections.run(bytes_of, recipe, arguments, timeout_s=180, world=3)
    assert [section for section, *_ in (*of_main, of_media)] == ["main", "main", "media"]
    media = ("image_encoder", "audio_encoder")
    for name, expected in of_media[2].items():
        assert of_media[1][name] == (expected if name in media else 0), name
        shards = [held[name] for _, held, _ in of_main]
        assert shards == [0, 0] if name in media else sum(shards) >= expected > 0 or expected == 0, name


def node(recipe: Path, run: Path, number: int, port: int) -> subprocess.Popen[str]:
    """A torchrun of one rank, as one of two nodes: the first has ``main``, the second the section."""
    where = ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    program = ["-m", "omnitrain", "run", str(recipe), f"output_dir={run}", *slots(2), "train.steps=100000", MEDIA]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *where, f"--master-port={port}", *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def children(process: int) -> list[int]:
    """All processes that came from a process, itself included: ranks of torchrun have sessions of their own."""
    found = [process]
    for parent in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def kill_node(node: subprocess.Popen[str]) -> None:
    for process in children(node.pid):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    node.wait()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def await_true(condition: Callable[[], object], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_killed_ends_the_other_in_words(recipe: Path, tmp_path: Path, victim: int) -> None:
    """In a wait for a message the lost rank is named; in another collective, the one that met it, phase and step."""
    run, port = tmp_path / "run", free_port()
    nodes = [node(recipe, run, number, port) for number in range(2)]
    try:
        await_true((run / "metrics.jsonl").exists, 120)
        kill_node(nodes[victim])
        other = nodes[1 - victim]
        output, _ = other.communicate(timeout=60)
        assert other.returncode != 0
        section, rest = ("main", "media")[victim], r"on rank \d, in \w+, step \d+"
        assert re.search(rf"section {section}: rank {victim} is gone|{rest}", output), output[-3000:]
    finally:
        for one in nodes:
            kill_node(one)
