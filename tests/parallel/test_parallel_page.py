"""The scripts of docs/parallel.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import omnitrain as ot
from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankPool
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import pack
from tests.tiny import tiny_processor, tiny_row

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


def run_page(folder: Path) -> tuple[list[tuple[str, str, int]], float, int]:
    names: dict[str, object] = {}
    for script in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(script, str(PAGE), "exec"), names)
    model = any_to_any().train()
    names["train"](model, [pack("text"), pack("image_to_text")], folder)
    with pytest.raises(UserError, match="found a batch of transformers for a parallelized model"):
        model(input_ids=torch.zeros(1, 2, dtype=torch.long))
    processor, own = tiny_processor(model), range(dist.get_rank() + 1)  # the second rank has one more of each
    prompts = [processor.prompt(tiny_row("image_to_text", seed)) for seed in own]
    losses, answers = names["evaluate"](model, processor, [pack("text") for _ in own], prompts)
    assert len(answers) == len(prompts) and all(answer.tokens for answer in answers)
    layout = [(row.name, row.mode, row.trainable) for row in ot.parallel.layout_of(model).table(model)]
    return layout, losses["heads"]["text"]["tokens"], pack("text").loss_counts()["text"]


def test_the_scripts_of_the_page_train_a_step_and_evaluate_on_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for rows, tokens, tokens_of_pack in ranks.run(run_page, tmp_path, timeout_s=60, world=2):
        assert ("image_encoder", "replicate", 7008) in rows and ("audio_encoder", "fsdp2", 0) in rows
        assert tokens == 3 * tokens_of_pack


def saved_by_the_page(mesh: str, folder: Path) -> None:
    """One step of the page's loop with SGD on another mesh, in which a wrong norm shows; equal packs on all ranks."""
    script = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    names: dict[str, object] = {}
    for old, new in {'dp_mode="fsdp2"': mesh, "AdamW": "SGD", "lr=1e-4": "lr=1.0"}.items():
        assert old in script
        script = script.replace(old, new)
    exec(script, names)
    names["train"](any_to_any().train(), [pack("text"), pack("image_to_text")], folder)


def test_the_script_of_the_page_steps_in_a_pipeline_as_in_one_process(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(saved_by_the_page, "", tmp_path / "one", timeout_s=60, world=1)
    ranks.run(saved_by_the_page, "pp_size=2", tmp_path / "two", timeout_s=60, world=2)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and max((two[name] - one[name]).abs().max() for name in one) < 1e-5
