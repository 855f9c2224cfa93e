"""Foundations with quantized files are built without quantization."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from omnitrain.errors import UserError
from omnitrain.models.hf.load import config_at, foundation_class, load_strictly
from omnitrain.models.hf.stored_tensor import weights_left_in_files
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.fsdp.load import load_weights
from tests.families import FAMILIES

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Of matrices, values and a factor for each block of them."""
    if not name.endswith("_proj.weight"):
        return {name: weight.bfloat16()}
    scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    blocks = [(size + 127) // 128 for size in weight.shape]
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.expand(blocks).contiguous()}


def mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Of experts, two values to a byte, and an exponent for each 32."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight.bfloat16()}
    experts, inner, outer = weight.shape
    blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.full(blocks.shape[:3], 122, dtype=torch.uint8)}


def plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What quantized tensors stand for, by the names of the model that was quantized."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            found[stem] = convert_moe_packed_tensors(tensor, tensors[f"{stem}_scales"]).float()
        elif not name.endswith(("_scales", "_scale_inv")):
            scale = tensors.get(f"{name}_scale_inv")
            found[name] = tensor.float() if scale is None else tensor.float() * scale[0, 0]
    return found


def quantize(folder: Path, family: str) -> dict[str, Tensor]:
    """Write a small model in quantized files; what its weights are then."""
    config = FAMILIES[family]()
    torch.manual_seed(0)
    foundation_class(config)(config).save_pretrained(folder)
    how, quantized = (FP8, fp8) if family == "deepseek_v3" else (MXFP4, mxfp4)
    file = folder / "model.safetensors"
    tensors = {key: value for entry in load_file(file).items() for key, value in quantized(*entry).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    declare(folder, how)
    return plain(tensors)


def declare(folder: Path, how: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))


def require_plain(model: PreTrainedModel, expected: dict[str, Tensor], folder: Path) -> None:
    """Saved, it has what the files stood for, in files that say nothing of quantization."""
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, expected[name], rtol=2**-8, atol=0)  # put back in bf16
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_weights_are_what_they_stood_for_before_and_after_they_are_saved(tmp_path: Path, family: str) -> None:
    expected = quantize(tmp_path / "quantized", family)
    model = build_omni_model(foundation=str(tmp_path / "quantized"), torch_dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    require_plain(model.foundation, expected, tmp_path / "saved")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")) is type(model.foundation)


@pytest.mark.parametrize(("rows", "columns"), [(192, 64), (320, 64), (128, 192), (320, 192)])
@pytest.mark.parametrize("context", [nullcontext, weights_left_in_files], ids=["in memory", "in files"])
def test_blocks_that_are_not_full_have_their_own_factors(
    tmp_path: Path, rows: int, columns: int, context: Callable[[], AbstractContextManager[None]]
) -> None:
    """As in DeepSeek-V3, with 576 rows in blocks of 128."""
    config = FAMILIES["deepseek_v3"]()
    config.hidden_size, config.intermediate_size = columns, rows
    foundation_class(config)(config).save_pretrained(tmp_path)
    name, tensors = "model.layers.0.mlp.up_proj.weight", load_file(tmp_path / "model.safetensors")
    values = tensors[name].to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.arange(-(-rows // 128) * -(-columns // 128)).view(-(-rows // 128), -1)
    save_file(tensors | {name: values, f"{name}_scale_inv": scales}, tmp_path / "model.safetensors", {"format": "pt"})
    declare(tmp_path, FP8)
    with context():
        model = load_strictly(foundation_class(config), str(tmp_path), torch.float32, config=config_at(str(tmp_path)))
    expected = values.float() * scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    assert torch.equal(torch.empty(rows, columns).copy_(model.get_parameter(name).detach()), expected)


def test_weights_of_a_model_on_the_meta_device_are_put_back_too(tmp_path: Path) -> None:
    expected = quantize(tmp_path / "quantized", "deepseek_v3")
    model = build_omni_model(foundation=str(tmp_path / "quantized"), init_device="meta").foundation
    load_weights(model, str(tmp_path / "quantized"))
    require_plain(model.float(), expected, tmp_path / "saved")


def test_transformers_is_told_to_put_them_back_whatever_the_device_could_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(tmp_path, "deepseek_v3")
    cls = foundation_class(FAMILIES["deepseek_v3"]())
    told: list[Any] = []

    def from_pretrained(path: str, config: Any, **kwargs: Any) -> None:
        told.append(config.quantization_config)
        raise OSError("not now")

    monkeypatch.setattr(cls, "from_pretrained", from_pretrained)
    with pytest.raises(UserError, match="not now"):
        build_omni_model(foundation=str(tmp_path))
    assert told == [FP8 | {"dequantize": True}]


def test_what_cannot_be_put_back_is_refused(tmp_path: Path) -> None:
    quantize(tmp_path, "deepseek_v3")
    declare(tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match=r"are quantized \(gptq\), and transformers cannot dequantize them"):
        build_omni_model(foundation=str(tmp_path))
