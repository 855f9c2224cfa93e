"""Operations on tensors in files: the values of plain tensors, from the bytes that are needed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from omnitrain.models.hf.load import config_at, load_strictly
from omnitrain.models.hf.stored_tensor import StoredTensor, stored_tensors, weights_left_in_files
from omnitrain.models.hf.stored_values import FILES, cast, read
from omnitrain.models.omni.build import build_omni_model
from tests.families import FAMILIES
from tests.models.hf.test_quantized import quantize
from tests.parallel.fsdp.test_load import hf_model

Weights = dict[str, Tensor]

# name -> a chain of operations on "a" [6, 4] and "b" [2, 4], and the bytes that a read of its first row needs
CHAINS: dict[str, tuple[Callable[[Weights], Tensor], int]] = {
    "whole": (lambda w: w["a"][...], 16),
    "rows": (lambda w: w["a"][2:5], 16),
    "columns": (lambda w: w["a"].narrow(1, 1, 2), 8),
    "chunk": (lambda w: w["a"].chunk(4)[2], 16),
    "one row": (lambda w: w["a"][-1], 4),
    "concatenated": (lambda w: torch.cat([w["b"], w["a"]], 0), 16),
    "side by side": (lambda w: torch.cat([w["a"][:2], w["b"]], -1), 32),
    "stacked": (lambda w: torch.stack([w["b"], w["a"][:2]]), 32),
    "stacked in the middle": (lambda w: torch.stack([w["b"], w["a"][4:]], 1), 32),
    "transposed": (lambda w: w["a"].t().contiguous(), 24),
    "permuted": (lambda w: w["a"].view(3, 2, 4).permute(1, 2, 0), 96),
    "experts": (lambda w: torch.cat([torch.stack(w["a"].chunk(3)), torch.stack([w["b"]] * 3)], 1), 64),
    "in another shape": (lambda w: w["a"].reshape(2, 3, 4), 48),
    "flat": (lambda w: w["a"].flatten(), 16),
    "taken apart": (lambda w: w["a"].unbind(0)[3].unsqueeze(0), 16),
    "squeezed": (lambda w: w["a"][1:2].squeeze(0), 4),
    "rounded": (lambda w: w["a"].to(torch.bfloat16).to(torch.float32), 16),
    "widened": (lambda w: w["half"].float().bfloat16(), 4),
    "a number": (lambda w: w["number"].clone(), 4),
    "interleaved": (lambda w: w["a"].reshape(3, 2, 4).transpose(0, 1).reshape(6, 4), 96),
}


@pytest.fixture
def both(tmp_path: Path) -> tuple[Weights, Weights]:
    """The same tensors, in memory and in a file."""
    torch.manual_seed(0)
    plain = {"a": torch.randn(6, 4), "b": torch.randn(2, 4), "number": torch.tensor(3.0)}
    plain["half"] = torch.randn(4, 2).bfloat16()
    save_file(plain, tmp_path / "model.safetensors")
    return plain, dict(stored_tensors([str(tmp_path / "model.safetensors")]))


@pytest.mark.parametrize("name", CHAINS)
def test_any_region_has_the_values_of_a_plain_tensor(both: tuple[Weights, Weights], name: str) -> None:
    plain, stored = both
    chain, first_row_bytes = CHAINS[name]
    before = FILES.num_bytes
    expected, found = chain(plain), chain(stored)
    assert isinstance(found, StoredTensor) and FILES.num_bytes == before
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.read(), expected)
    sent = pickle.loads(pickle.dumps(found.value))
    for dim, size in enumerate(expected.shape):
        for start, stop in ((0, size), (size // 2, size), (size - 1, size), (1, 1)):
            region = [slice(0, of_dim) for of_dim in expected.shape]
            region[dim] = slice(start, stop)
            assert torch.equal(read(sent, tuple(region)), expected[tuple(region)])
    if expected.ndim:
        before = FILES.num_bytes
        torch.empty_like(expected[:1]).copy_(found[:1])
        assert FILES.num_bytes - before == first_row_bytes


def test_other_operations_read_their_inputs(both: tuple[Weights, Weights]) -> None:
    plain, stored = both
    for compute in (
        lambda w: w["a"] @ w["b"].t(),
        lambda w: torch.cat([w["a"], torch.ones(1, 4)]),
        lambda w: w["a"].sum(),
    ):
        found = compute(stored)
        assert type(found) is Tensor and torch.equal(found, compute(plain))


def test_what_is_written_to_a_stored_tensor_stays(both: tuple[Weights, Weights]) -> None:
    plain, stored = both
    parameter = nn.Parameter(stored["a"])
    with torch.no_grad():
        parameter[2:4].zero_()  # a slice is a tensor of its own
        assert torch.equal(parameter.read(), plain["a"])
        assert parameter.mul_(2) is parameter
    assert torch.equal(parameter.read(), 2 * plain["a"]) and not parameter.is_in_files
    assert torch.equal(stored["a"].read(), plain["a"])


def test_the_data_of_a_parameter_can_be_replaced(both: tuple[Weights, Weights]) -> None:
    plain, stored = both
    layer = nn.Linear(4, 6, bias=False)
    layer.weight = nn.Parameter(stored["a"])
    weight = layer.weight
    layer.to(torch.float64)
    assert layer.weight is weight and torch.equal(weight.read(), plain["a"].double())
    weight.data = weight.data.to(torch.bfloat16)
    assert torch.equal(copy.deepcopy(layer).weight.read(), plain["a"].bfloat16())
    weight.data = torch.ones(6, 4)
    assert type(weight) is nn.Parameter and torch.equal(layer.weight, torch.ones(6, 4))


def test_a_cast_that_loses_nothing_is_left_out(both: tuple[Weights, Weights]) -> None:
    half = both[1]["half"].value
    assert cast(cast(half, torch.float32), torch.bfloat16) is half
    assert cast(cast(half, torch.float16), torch.float32) != cast(half, torch.float32)


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3", "ernie4_5_vl_moe", "janus"])
def test_transformers_converts_weights_that_it_does_not_read(tmp_path: Path, name: str) -> None:
    plain = hf_model(name)
    plain.save_pretrained(tmp_path)
    before = FILES.num_bytes
    with weights_left_in_files():
        stored = load_strictly(type(plain), str(tmp_path), config=FAMILIES[name]())
    assert FILES.num_bytes == before
    names, expected = dict(stored.named_parameters()), dict(plain.named_parameters())
    assert names.keys() == expected.keys()
    assert all(isinstance(parameter, StoredTensor) and parameter.is_in_files for parameter in names.values())
    assert [n for n, parameter in names.items() if not torch.equal(parameter.read(), expected[n])] == []


def test_a_buffer_of_the_checkpoint_keeps_its_values(tmp_path: Path) -> None:
    """Such as the biases of a router, which transformers sets to zero if no checkpoint has them."""
    plain = hf_model("deepseek_v3")
    bias = plain.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    bias.copy_(torch.linspace(0.5, 0.507, len(bias)))
    plain.save_pretrained(tmp_path)
    with weights_left_in_files():
        stored = load_strictly(type(plain), str(tmp_path), config=FAMILIES["deepseek_v3"]())
    assert torch.equal(stored.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias"), bias)


def test_weights_of_bin_files_are_read_at_once(tmp_path: Path) -> None:
    plain = hf_model("qwen3_moe")
    plain.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    file.unlink()
    with weights_left_in_files():
        loaded = load_strictly(type(plain), str(tmp_path), config=FAMILIES["qwen3_moe"]())
    for one, other in zip(loaded.parameters(), plain.parameters(), strict=True):
        assert type(one) is nn.Parameter and torch.equal(one, other)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_dequantized_weights_are_computed_when_they_are_read(tmp_path: Path, family: str) -> None:
    quantize(tmp_path, family)
    with weights_left_in_files():
        stored = build_omni_model(foundation=str(tmp_path), torch_dtype=torch.float32).foundation
    plain = load_strictly(type(stored), str(tmp_path), torch.float32, config=config_at(str(tmp_path)))
    values = dict(plain.named_parameters())
    assert len(values) > 10
    for name, parameter in stored.named_parameters():
        assert isinstance(parameter, StoredTensor) and parameter.is_in_files
        assert torch.equal(read(pickle.loads(pickle.dumps(parameter.value))), values[name])


def test_experts_in_mxfp4_are_dequantized_one_by_one(tmp_path: Path) -> None:
    """Two values to a byte, and an exponent for each 32."""
    quantize(tmp_path, "gpt_oss")
    with weights_left_in_files():
        stored = build_omni_model(foundation=str(tmp_path), torch_dtype=torch.float32).foundation
    experts = stored.get_parameter("model.layers.0.mlp.experts.down_proj")
    before = FILES.num_bytes
    torch.empty_like(experts[2:3]).copy_(experts[2:3])
    assert FILES.num_bytes - before == experts[0].numel() * (1 / 2 + 1 / 32)
