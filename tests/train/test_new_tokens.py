"""LoRA on a model whose tokenizer got new tokens: their rows train, on any ranks, and are in the adapters' files."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModel, PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import omnitrain as ot
from omnitrain.cli.main import app
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer

MARKS = ["<|im_start|>", "<|im_end|>"]
ROWS = len(MARKS) + 256  # of the base
NEW = [*range(ROWS, ROWS + 5)]  # four of the user's, and the end token of data.chat
QWEN3 = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {text: i for i, text in enumerate(MARKS + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(MARKS)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")


def recipe(folder: Path, tied: bool = True, **lora: Any) -> Path:
    """A recipe in ``folder`` beside its base model, whose tokenizer has four tokens more than the model has rows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", vocab_size=ROWS, num_hidden_layers=2, tie_word_embeddings=tied, **QWEN3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    with_tokens = tokenizer()
    with_tokens.add_tokens([f"<act_{i}>" for i in range(4)])
    with_tokens.save_pretrained(folder / "base")
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(40):
            asked, answered = (
                {"role": "user", "content": f"go {i % 4}"},
                {"role": "assistant", "content": f"<act_{i % 4}>"},
            )
            file.write(json.dumps({"messages": [asked, answered]}) + "\n")
    optimizer = {"learning_rate": 0.01, "warmup_steps": 1, "weight_decay": 0.1}
    tree = {
        "model": {"foundation": str(folder / "base")},
        "data": {
            "train": [{"path": str(folder / "rows.jsonl")}],
            "pack_tokens": 128,
            "workers": 0,
            "chat": {"end": "<end>"},
        },
        "parallel": {"components": {"foundation": {"lora": {"rank": 4, **lora}}}},
        "train": {"steps": 3, "packs_per_step": 2, "device": "cpu", "optimizer": optimizer}
        | {"report": False, "save": {"every": 2, "background": False}, "log_every": 1},
        "output_dir": str(folder / "run"),
    }
    (folder / "recipe.json").write_text(json.dumps(tree))
    return folder / "recipe.json"


def fit(path: Path, overrides: list[str], resume: bool = False) -> None:
    Trainer(Recipe.load(str(path), overrides), resume=resume).fit()


def losses(run: Path) -> list[list[float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [[line["loss"], line["grad_norm"]] for line in lines]


def embeddings(checkpoint: Path) -> list[torch.Tensor]:
    """The embedding, and the head if it is not tied."""
    weights = load_file(checkpoint / "model.safetensors")
    return [weight for name, weight in weights.items() if "embed_tokens" in name or "lm_head" in name]


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model.eval()(input_ids=torch.tensor([[5, *NEW, 7, 9]])).logits


def moved_by_own_loop(checkpoint: Path, rows: str) -> set[int]:
    """The rows of the embedding that a step of AdamW with weight decay moves."""
    model, processor = ot.load_checkpoint(checkpoint, torch_dtype=torch.float32)
    adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    run = ot.prepare(model, rows, processor=processor, optimizer=adamw, micro_batch_size=8)
    before = run.model.foundation.get_input_embeddings().weight.full_tensor().clone()
    run.forward_backward(next(iter(run)))
    run.optimizer.step()
    after = run.model.foundation.get_input_embeddings().weight.full_tensor()
    return set((before != after).any(-1).nonzero().flatten().tolist())


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_of_new_tokens_train_alone_beside_adapters_that_plain_peft_loads(
    tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(recipe(tmp_path, tied, rslora=True, dropout=0.1), [])
    told = "new to the foundation: 5 tokens (ids 258 to 262); of its embeddings, only new rows train"
    assert told in " ".join(capsys.readouterr().out.split())
    second, third = (tmp_path / "run" / "checkpoints" / f"step-{step:08d}" for step in (2, 3))
    for before, after in zip(embeddings(second), embeddings(third), strict=True):
        moved = (before != after).any(-1)
        assert moved.nonzero().flatten().tolist() == NEW and len(after) == NEW[-1] + 1
    folder = third / "adapters" / "foundation"
    deltas = {key: value for key, value in load_file(folder / "adapter_model.safetensors").items() if "token" in key}
    assert [len(delta) for delta in deltas.values()] == [len(NEW)] * (1 if tied else 2)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain.resize_token_embeddings(len(AutoTokenizer.from_pretrained(third)))
    expected = logits(ot.load_checkpoint(third)[0].foundation)
    for theirs in (PeftModel.from_pretrained(plain, folder), AutoPeftModel.from_pretrained(folder)):
        torch.testing.assert_close(logits(theirs), expected, rtol=1e-5, atol=1e-5)
    assert {NEW[-1]} <= moved_by_own_loop(third, str(tmp_path / "rows.jsonl")) <= set(NEW)
    assert CliRunner().invoke(app, ["export", str(third), str(tmp_path / "merged")]).exit_code == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "ranks_share", [pytest.param(axis, marks=pytest.mark.slow) for axis in ("dp_shard", "tp", "pp")]
)
def test_rows_of_new_tokens_train_on_ranks_and_resumed_as_in_one_process(
    tmp_path: Path, ranks: RankPool, ranks_share: str
) -> None:
    path = recipe(tmp_path)
    fit(path, [])
    shutil.copytree(tmp_path / "run", tmp_path / "two", ignore=shutil.ignore_patterns("step-00000003"))
    overrides = [f"output_dir={tmp_path}/two", f"parallel.components.foundation.{ranks_share}=2"]
    ranks.run(fit, path, overrides, True, timeout_s=60, world=2)
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "run"), rtol=1e-5, atol=1e-5)
    one, two = (embeddings(tmp_path / name / "checkpoints" / "step-00000003")[0] for name in ("run", "two"))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
