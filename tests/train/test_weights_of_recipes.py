"""The weights of a recipe's model: from the files of each part, fresh where there are none, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from omnitrain.models.hf.load import foundation_class, resolve
from omnitrain.models.hf.stored_values import FILES
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import leave_process_groups
from omnitrain.recipe import Recipe
from omnitrain.train.prepare import prepare_model
from omnitrain.train.process_groups import join_ranks
from tests.parallel.fsdp.test_stored_weights import own
from tests.parallel.laid_out import full
from tests.tiny import FOUNDATION, MODEL, WHISPER, tiny_recipe, tiny_row, write_parquet

TOWER = "audio_encoder.tower."


def prepared(recipe: Path, overrides: list[str]) -> OmniModel:
    loaded, device = Recipe.load(str(recipe), overrides), torch.device("cpu")
    return prepare_model(loaded, join_ranks(loaded.parallel, device), device, None).model


def prepared_on_rank(recipe: Path, overrides: list[str], fresh: tuple[str, ...]) -> tuple[int, int, dict[str, Tensor]]:
    """Bytes that the rank read, those that it keeps of weights in files, and all whole weights."""
    before = FILES.num_bytes
    model = prepared(recipe, overrides)
    kept = [tensor.nbytes for name, tensor in own(model).items() if not name.startswith(fresh)]
    whole = {name: full(parameter.detach()) for name, parameter in model.named_parameters()}
    leave_process_groups()
    return FILES.num_bytes - before, sum(kept), whole


DECODER = {
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
    "vocab_size": 64,
    "pad_token_id": 0,
}


def save(folder: Path, model: PreTrainedModel) -> str:
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def recipe(tmp_path: Path) -> tuple[Path, list[str]]:
    """A foundation, and an encoder whose tower is a part of a model with a decoder, both from files."""
    torch.manual_seed(0)
    foundation = save(tmp_path / "foundation", resolve(FOUNDATION, foundation_class))
    whole = save(tmp_path / "whisper", resolve(WHISPER | DECODER))
    rows = write_parquet(tmp_path / "speech.parquet", [tiny_row("speech_to_text", seed) for seed in range(4)])
    changes = [
        f"model.foundation={foundation}",
        f"model.encoders={json.dumps({'audio_encoder': MODEL['encoders']['audio_encoder'] | {'tower': whole}})}",
    ]
    return tiny_recipe(tmp_path), [
        *changes,
        "model.decoders={}",
        f"data.train=[{{path: {rows}}}]",
        "data.pack_tokens=96",
    ]


def test_each_rank_reads_its_shards_of_all_parts_and_no_tensor_of_a_model_around_a_tower(
    ranks: RankPool, recipe: tuple[Path, list[str]]
) -> None:
    expected = {name: parameter.detach() for name, parameter in prepared(*recipe).named_parameters()}
    fresh = ("audio_encoder.projector",)
    assert any(name.startswith(fresh) for name in expected) and any(name.startswith(TOWER) for name in expected)
    for read, kept, whole in ranks.run(prepared_on_rank, *recipe, fresh, timeout_s=60, world=2):
        assert read == kept > 0
        assert whole.keys() == expected.keys()
        assert [name for name, tensor in whole.items() if not torch.equal(tensor, expected[name])] == []
