"""The scripts of docs/python.md run unchanged, inside a running event loop and on several ranks."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from transformers import LlavaForConditionalGeneration

import omnitrain as ot
from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import forget_parallel_state
from tests.tiny import png
from tests.train.test_native_foundation import save_llava
from tests.whole import whole_tensors

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A model, and three rows; the parallel state of this process ends with the test."""
    save_llava(tmp_path / "llava")
    with (tmp_path / "rows.jsonl").open("w") as rows:
        for number, (question, answer) in enumerate({"one?": "ab", "two?": "cd", "three?": "ef"}.items()):
            (tmp_path / f"{number}.png").write_bytes(png(number))
            asked = [{"type": "image"}, {"type": "text", "text": question}]
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            rows.write(json.dumps({"messages": messages, "images": [str(tmp_path / f"{number}.png")]}) + "\n")
    yield tmp_path
    forget_parallel_state()
    dist.destroy_process_group()


def script_of_page(number: int = 0) -> dict[str, object]:
    script = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]
    names: dict[str, object] = {}
    exec(compile(script, str(PAGE), "exec"), names)
    return names


def all_of_it(folder: Path, name: str, **settings: float) -> tuple[list[str], list[str]]:
    """The answers, and the lines that the script prints."""
    names = script_of_page()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run = names["train"](*(str(folder / place) for place in ("llava", "rows.jsonl", name)), **settings)
    return names["ask"](run, str(folder / "rows.jsonl")), printed.getvalue().splitlines()


def test_the_script_of_the_page_learns_its_rows_by_heart_and_saves_what_it_learnt(folder: Path) -> None:
    async def notebook() -> list[str]:  # its event loop runs in the thread of the cells
        return all_of_it(folder, "saved", epochs=30, rate=1e-2)[0]

    assert asyncio.run(notebook()) == ["ab", "cd", "ef"]
    script_of_page()["for_transformers"](f"{folder}/saved")
    model, processor = ot.load_checkpoint(folder / "saved")
    exported = dict(LlavaForConditionalGeneration.from_pretrained(f"{folder}/saved-hf").named_parameters())
    assert exported.keys() == dict(model.foundation.named_parameters()).keys()
    assert all(torch.equal(exported[name], parameter) for name, parameter in model.foundation.named_parameters())
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # the loop of pieces goes on with what was saved
        losses = script_of_page(1)["all_of_it"](model, processor, f"{folder}/rows.jsonl", epochs=2, rate=1e-4)
    assert len(printed.getvalue().splitlines()) == 2 and losses["heads"]["text"]["loss"] < 0.5


@pytest.mark.second
def test_the_script_of_the_page_trains_on_ranks_with_unequal_numbers_of_packs_as_in_one_process(
    folder: Path, ranks: RankPool
) -> None:
    """With one row per pack, a rank has no pack in the second step of an epoch."""
    settings = {"epochs": 2, "rate": 1e-2, "pack_tokens": 40, "global_batch_size": 2}
    alone, lines = all_of_it(folder, "one", **settings)
    (first, of_first), (second, of_second) = ranks.run(all_of_it_on_rank, folder, settings, timeout_s=60, world=2)
    assert (len(alone), len(first), len(second), of_second) == (3, 2, 1, [])
    losses, expected = (re.findall(r"loss (\S+)", "\n".join(printed)) for printed in (of_first, lines))
    assert len(losses) == 4 and [float(loss) for loss in losses] == pytest.approx(
        [float(one) for one in expected], 1e-3
    )


def all_of_it_on_rank(folder: Path, settings: dict[str, float]) -> tuple[list[str], list[str]]:
    return all_of_it(folder, "two", **settings)


def train_on_any_dataset(folder: Path, **settings: int) -> tuple[dict[str, torch.Tensor], list[float], dict[str, int]]:
    """Three rows, one of them without an image, in steps of two rows: the second step has one row."""
    images = [Image.open(folder / f"{number}.png") for number in range(3)]
    rows = [("one?", "ab", images[:1]), ("two?", "cd", []), ("three?", "ef", images[1:])]
    model, losses, state = script_of_page(2)["train"](str(folder / "llava"), rows, rate=1e-2, **settings)
    return whole_tensors(dict(model.named_parameters())), losses, state


@pytest.mark.second
def test_any_dataset_trains_on_two_ranks_as_in_one_process(folder: Path, ranks: RankPool) -> None:
    settings = {"epochs": 3, "micro_batch_size": 1, "global_batch_size": 2}
    weights, losses, state = train_on_any_dataset(folder, **settings)
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert state == {"epoch": 3, "steps": 0, "rows": 0, "length": 3, "seed": 0}
    for of_rank, losses_of_rank, state_of_rank in ranks.run(on_rank, folder, settings, timeout_s=60, world=2):
        assert state_of_rank == state and losses_of_rank == pytest.approx(losses, 1e-4)
        assert of_rank.keys() == weights.keys()
        assert all((of_rank[name] - weight).abs().max() < 1e-4 for name, weight in weights.items())


def on_rank(folder: Path, settings: dict[str, int]) -> tuple[dict[str, torch.Tensor], list[float], dict[str, int]]:
    with pytest.raises(UserError, match=r"this run has 2 ranks; pass rank=state\.dp_rank, ranks=state\.dp_size"):
        ot.build_dataloader([1], micro_batch_size=1)
    return train_on_any_dataset(folder, **settings)
