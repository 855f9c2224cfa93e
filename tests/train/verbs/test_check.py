from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from omnitrain.errors import UserError
from omnitrain.parallel.state import leave_process_groups
from omnitrain.recipe import Recipe
from omnitrain.train.build_from_recipe import build_from_recipe
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.check import _check_rows, check_recipe, check_without_tokenizer
from tests.tiny import FOUNDATION, tiny_model, tiny_processor, tiny_recipe, tiny_row, webp, write_parquet


def load(path: Path, *overrides: str) -> Recipe:
    return Recipe.load(str(path), list(overrides))


def rename_a_tensor(folder: Path) -> str:
    """Rename the first tensor of a folder's weights; returns what it was called."""
    tensors = load_file(folder / "model.safetensors")
    name = min(tensors)
    save_file(
        {(f"{key}_x" if key == name else key): value for key, value in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return name


def test_check_finds_every_problem_without_writing_anything(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path)
    assert check_recipe(load(path)) == []
    recipe = load(path, "data.heldout=[{path: nothing.parquet}]", "evaluation={scorer: 'nothing:f'}")
    recipe.data.train[0].columns.messages = "mesages"
    problems = check_recipe(recipe)
    assert [any(word in p for p in problems) for word in ("nothing.parquet", "nothing:f", "mesages")] == [True] * 3
    problems = check_recipe(load(path, "model.encoders={}", "data.max_frames=9"))
    assert any("asks the model to read image" in problem for problem in problems)
    assert any(problem.startswith("data.max_frames: found 9, but no HF processor") for problem in problems)
    assert not (tmp_path / "run").exists()


def test_check_measures_rows_as_training_does_without_their_tail_and_held_out_ones_whole(tmp_path: Path) -> None:
    problems = "\n".join(check_recipe(load(tiny_recipe(tmp_path, evaluated=True), "data.pack_tokens=1")))
    too_long = r": row \S+: (\d+) tokens, but a pack holds at most 1 "
    lengths = {kind: [*map(int, re.findall(f"data.{kind}{too_long}", problems))] for kind in ("train", "heldout")}
    assert lengths["train"] == [length - 1 for length in lengths["heldout"]] and len(lengths["train"]) == 7


def test_a_document_may_be_longer_than_a_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "abc " * 100
    (tmp_path / "long.txt").write_text(text)
    assert (
        check_recipe(load(tiny_recipe(tmp_path, text_only=True), f"data.train=[{{path: {tmp_path}/long.txt}}]")) == []
    )
    assert f"train long: the first row has {len(text) + 1} tokens" in " ".join(capsys.readouterr().out.split())


def test_check_says_whose_rate_a_limit_of_frames_lowers(capsys: pytest.CaptureFixture[str]) -> None:
    processor = tiny_processor(tiny_model())
    processor.readers["video"]["image_encoder"].max_frames = 4
    films = [replace(tiny_row("video_to_text", 0), media={"video": [webp(0, frames)]}) for frames in (4, 9)]
    assert _check_rows("train", [("films", processor.sample(row)) for row in films], []) == []
    assert capsys.readouterr().out.count("train films: `max_frames` lowers the rate of 1 video of this row") == 1


@pytest.mark.second
def test_check_looks_at_each_data_set_though_a_later_one_has_the_same_sources(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path)
    damaged = replace(tiny_row("image_to_text", 0), media={"image": [b"no image"], "audio": [], "video": []})
    first = write_parquet(tmp_path / "first.parquet", [damaged])
    problems = check_recipe(load(path, f"data.train=[{{path: {first}}}, {{path: {tmp_path / 'train.parquet'}}}]"))
    assert [re.sub("of .*", "", problem) for problem in problems] == [
        f"data.train: row {damaged.id!r}: image 1: unreadable image "
    ]


def test_one_unusable_row_at_the_beginning_is_no_problem_of_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"ask": "what"}, {"ask": "what", "say": None}, {"ask": "what", "say": "a cat"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    node = f"data.train={{path: {tmp_path}/rows.jsonl, columns: {{prompt: ask, response: say}}}}"
    assert check_recipe(load(tiny_recipe(tmp_path, text_only=True), node)) == []
    assert "train rows: row 3, the first that is not skipped, has " in " ".join(capsys.readouterr().out.split())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    assert check_recipe(load(tiny_recipe(tmp_path, text_only=True), node)) == [
        "data.train: row 'rows[0]': column 'say' has no value, expected a text"
    ]


@pytest.mark.second
def test_a_plan_is_compared_with_the_model_under_its_key_in_the_recipe(tmp_path: Path) -> None:
    recipe = load(tiny_recipe(tmp_path), "parallel.components.image_encodr.mode=replicate")
    problem = "parallel.components.image_encodr: unknown component; did you mean "
    assert [found.startswith(problem) for found in check_recipe(recipe)] == [True]
    with pytest.raises(UserError, match=re.escape(f"1 problem in the parallel plan:\n  {problem}")):
        Trainer(recipe)
    leave_process_groups()
    assert not (tmp_path / "run").exists()


@pytest.mark.second
def test_check_compares_the_weights_of_every_path_with_their_model(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path)
    model, _ = build_from_recipe(load(path))
    parts = {"foundation": model.foundation, "tower": model.image_encoder.tower, "vq": model.image_decoder.tokenizer}
    for name, part in parts.items():
        part.save_pretrained(tmp_path / name)
    paths = [
        f"model.foundation={tmp_path / 'foundation'}",
        f"model.encoders.image_encoder.tower={tmp_path / 'tower'}",
        "model.encoders.image_encoder.processor={size: {height: 8, width: 8}}",
        f"model.decoders.image_decoder.tokenizer={tmp_path / 'vq'}",
    ]
    assert check_recipe(load(path, *paths)) == []
    renamed = [rename_a_tensor(tmp_path / name) for name in parts]
    problems = check_recipe(load(path, *paths))
    keys = ("model.foundation: ", "model.encoders.image_encoder.tower: ", "model.decoders.image_decoder.tokenizer: ")
    for key, name, problem in zip(keys, renamed, problems, strict=True):
        assert problem.startswith(key) and f"missing: {name} (renamed? the files hold {name}_x)" in problem


@pytest.mark.second
def test_check_compares_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, steps=1)
    Trainer(load(path)).fit()
    parts = ("model.foundation=null", "model.tokenizer=null", "model.encoders={}", "model.decoders={}")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    again = load(path, *parts, f"model.checkpoint={checkpoint}")
    assert check_recipe(again) == []
    (checkpoint / "manifest.json").unlink()  # else the damage itself is found
    name = rename_a_tensor(checkpoint)
    (problem,) = check_recipe(again)
    assert problem.startswith("model.checkpoint: ") and f"missing: {name}" in problem


@pytest.mark.parametrize(
    ("override", "component"),
    [
        ("model.foundation.config.num_key_value_heads=3", "foundation"),
        ("model.foundation.config.num_attention_heads=3", "foundation"),
        ("model.encoders.audio_encoder.processor.chunk_length=2", "audio_encoder"),
        ("model.encoders.image_encoder.tower.config.num_attention_heads=3", "image_encoder"),
    ],
)
def test_check_names_the_component_whose_config_no_forward_can_run(
    tmp_path: Path, override: str, component: str
) -> None:
    (problem,) = check_recipe(load(tiny_recipe(tmp_path), override))
    assert re.match(
        rf"model[., a-z]*{component}: .*cannot (run with|be built from|train .* with) this config: ", problem
    )
    assert "\n" not in problem


def test_ops_that_cannot_train_here_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    ops = ("model.ops.attention=flex", "model.ops.swiglu=liger", "model.ops.cross_entropy=liger")
    recipe = load(tiny_recipe(tmp_path), "train.device=cpu", *ops)
    expected = [
        "model.ops.swiglu: backend 'liger' runs only on CUDA, not on cpu; choose from auto, torch",
        "model.ops.cross_entropy: backend 'liger' runs only on CUDA, not on cpu; choose from auto, compiled, torch",
        "model.ops.attention: attention backend 'flex' cannot compute ordinary attention: it has no backward on CPU; "
        "sdpa, reference can",
    ]
    assert check_recipe(recipe) == expected
    with pytest.raises(UserError) as refused:
        Trainer(recipe)
    assert str(refused.value).splitlines() == expected
    assert not (tmp_path / "run").exists()


@pytest.mark.second
def test_an_attention_backend_that_a_layer_of_the_model_needs_more_of_is_refused(tmp_path: Path) -> None:
    sizes = {key: FOUNDATION[key] for key in FOUNDATION if key.startswith(("num_", "hidden", "intermediate", "head"))}
    config = {"model_type": "gpt_oss", "vocab_size": 264, "num_local_experts": 4, "num_experts_per_tok": 2} | sizes
    path = tiny_recipe(tmp_path)
    foundation = f"model.foundation={{config: {json.dumps(config)}}}"
    assert check_recipe(load(path, foundation, "model.ops.attention=reference")) == []
    (problem,) = check_recipe(load(path, foundation, "model.ops.attention=sdpa"))
    assert re.fullmatch(
        r"model\.ops\.attention: attention backend 'sdpa' cannot compute GptOssAttention: "
        r"it does not support .*sinks.*; .*reference can",
        problem,
    )


def test_check_finds_a_device_that_is_not_there_and_a_folder_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    problems = check_recipe(load(tiny_recipe(tmp_path), "train.device=tpu", f"output_dir={tmp_path / 'full'}"))
    assert [problem.split(":")[0] for problem in problems] == ["train.device", "output_dir"]


def test_a_hf_model_named_as_a_checkpoint_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    recipe = load(tiny_recipe(tmp_path), f"model={{checkpoint: {tmp_path / 'hf'}}}")
    (problem,) = [found for found in check_recipe(recipe) if "omni model" in found or "config" in found]
    assert problem.startswith("model.checkpoint: ") and "is of type 'llama', not 'omnitrain'; pass a HF" in problem


def test_check_resolves_the_layout_for_the_ranks_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_recipe(tmp_path)
    assert check_recipe(load(path, "parallel.default.ulysses=2"), 4) == []
    shown = capsys.readouterr().out
    assert "layout on 4 ranks (--nproc 4):" in shown
    (row,) = [line for line in shown.splitlines() if line.startswith("│ foundation") and "ulysses 2" in line]
    assert [word.strip() for word in row.split("│")[2:4]] == ["fsdp2", "1 x 4"]


def test_without_a_tokenizer_the_model_and_its_layout_are_checked_and_the_rest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_recipe(tmp_path)
    bare = ("model.tokenizer=null", "data.train=[{path: nothing.parquet}]")
    assert any("`check --no-tokenizer` checks the model without one" in one for one in check_recipe(load(path, *bare)))
    capsys.readouterr()
    assert check_without_tokenizer(load(path, *bare), num_ranks=2) == []
    said = " ".join(capsys.readouterr().out.split())
    assert "Qwen3ForCausalLM" in said and "layout on 2 ranks" in said
    assert "not checked: the tokenizer, the chat format, the data, and whether every key has an effect" in said
    wrong = ("parallel.components.foundation.ulysses=3", "train.device=tpu", f"output_dir={path}")
    found = check_without_tokenizer(load(path, *bare, *wrong), num_ranks=3)
    assert [problem.split(":")[0] for problem in found] == [
        "train.device",
        "parallel.components.foundation.ulysses",
        "output_dir",
    ]
