"""Weights of a model that was built on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from omnitrain.errors import UserError, WeightsError
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.fsdp.load import load_weights
from omnitrain.parallel.spawn.pool import RankPool
from tests.families import FAMILIES
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import full, gradients, laid_out, pack, total


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    any_to_any().save_pretrained(folder)
    return folder


def on_meta(folder: Path) -> Any:
    return build_omni_model(config_path=str(folder), init_device="meta")


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated and not written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # with it goes fill_uninitialized_memory
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(8).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def loaded_on_rank(folder: Path) -> dict[str, Any]:
    with poisoned():
        model = laid_out(model=on_meta(folder), weights_path=str(folder)).train()
    plain = any_to_any()
    values = dict(plain.named_parameters())
    buffers = dict(plain.named_buffers())
    head, embedding = model.foundation.lm_head.weight, model.foundation.model.embed_tokens.weight
    total(model(pack("text"))).backward()
    return {
        "parameters": {name: torch.equal(full(p.detach()), values[name]) for name, p in model.named_parameters()},
        "buffers": {name: torch.equal(b, buffers[name]) for name, b in model.named_buffers()},
        "same buffers": buffers.keys() == dict(model.named_buffers()).keys(),
        "tied": head is embedding,
        "trained": {name for name, p in model.named_parameters() if p.requires_grad},
        "gradient": gradients(model)["foundation.model.embed_tokens.weight"],
    }


def test_a_model_from_meta_has_weights_buffers_and_ties_of_a_plain_one_on_all_ranks(
    ranks: RankPool, saved: Path
) -> None:
    plain = any_to_any().train()
    trained = {name for name, p in plain.named_parameters() if p.requires_grad}
    total(plain(pack("text"))).backward()
    expected = 2 * plain.foundation.model.embed_tokens.weight.grad  # input side and output side, of both ranks
    for found in ranks.run(loaded_on_rank, saved, timeout_s=60, world=2):
        assert all(found["parameters"].values()) and all(found["buffers"].values()) and found["same buffers"]
        assert found["tied"] and found["trained"] == trained
        assert (found["gradient"] - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_tensor_that_is_missing_is_named_and_nothing_is_loaded(saved: Path, tmp_path: Path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[min(tensors)]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = on_meta(saved)
    with pytest.raises(WeightsError, match="missing"):
        load_weights(model, str(tmp_path))
    assert all(parameter.is_meta for parameter in model.parameters())


def without_weights(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        laid_out(model=on_meta(folder))
    return str(caught.value)


def test_a_model_from_meta_without_weights_is_refused(ranks: RankPool, saved: Path) -> None:
    (message,) = ranks.run(without_weights, saved, timeout_s=60, world=1)
    assert "on the meta device" in message and "pass weights_path" in message


def hf_model(name: str, device: str = "cpu") -> PreTrainedModel:
    config = FAMILIES[name]()
    with torch.device(device):
        torch.manual_seed(0)
        return foundation_class(config)(config)


def hf_loaded_on_rank(folder: Path) -> dict[str, bool]:
    model = laid_out(model=hf_model("gemma3", "meta"), weights_path=str(folder))
    plain = dict(hf_model("gemma3").named_parameters(prefix="foundation"))
    return {name: torch.equal(full(p.detach()), plain[name]) for name, p in model.named_parameters()}


def test_a_hf_model_from_meta_becomes_the_foundation_with_its_weights(ranks: RankPool, tmp_path: Path) -> None:
    hf_model("gemma3").save_pretrained(tmp_path)
    for equal in ranks.run(hf_loaded_on_rank, tmp_path, timeout_s=120, world=2):
        assert len(equal) > 10 and all(equal.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_from_meta_is_a_plain_construction(name: str, tmp_path: Path) -> None:
    plain = hf_model(name)
    plain.save_pretrained(tmp_path)
    model = hf_model(name, "meta")
    with poisoned():
        load_weights(model, str(tmp_path))
    for kind in ("named_parameters", "named_buffers"):
        expected, found = dict(getattr(plain, kind)()), dict(getattr(model, kind)())
        assert expected.keys() == found.keys()
        different = [key for key, value in expected.items() if not torch.equal(value, found[key])]
        assert not different
