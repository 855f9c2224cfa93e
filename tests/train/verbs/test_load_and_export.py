"""Load and export without a step gives the source back: a table of checkpoints as on the Hub, and what reads them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from omnitrain.models.adapters.lora import add_lora, find_in_all
from omnitrain.models.hf.load import as_dict, config_at, foundation_class
from omnitrain.models.omni.build import build_foundation_model, build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe.plan_groups import Lora
from omnitrain.train.build_from_recipe import load_checkpoint
from omnitrain.train.verbs.export import export
from tests.families import FAMILIES
from tests.models.discovery.test_foundation_class import in_stages
from tests.models.hf.test_quantized import FP8, declare, fp8, plain
from tests.parallel.fsdp.test_weight_loader import deep
from tests.peaks import peak_bytes
from tests.tiny import FOUNDATION, tiny_model, tiny_processor, tiny_row

INDEX = "model.safetensors.index.json"
MTP = {f"model.layers.61.{name}": torch.randn(4, 4).bfloat16() for name in ("eh_proj.weight", "enorm.weight")}


def qwen3_omni_moe() -> PreTrainedConfig:
    """A whole Qwen3-Omni with experts in its thinker and its talker, and a vocoder."""
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 64}
    text |= {"num_key_value_heads": 2, "intermediate_size": 32}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    vocoder = {"codebook_size": 16, "num_quantizers": 4, "decoder_dim": 32, "num_attention_heads": 2}
    return AutoConfig.for_model(
        "qwen3_omni_moe",
        thinker_config=as_dict(FAMILIES["qwen3_omni_moe_thinker"]()),
        talker_config={
            "text_config": text | experts | {"shared_expert_intermediate_size": 16},
            "code_predictor_config": text | {"num_code_groups": 4},
            "thinker_hidden_size": 64,
            "num_code_groups": 4,
            "spatial_merge_size": 2,
        },
        code2wav_config=text | vocoder | {"upsample_rates": [2, 2], "upsampling_ratios": [2]},
    )


def tied(config: PreTrainedConfig) -> PreTrainedConfig:
    config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = True
    return config


def narrow_experts() -> PreTrainedConfig:
    """Qwen3-VL-MoE, whose matrices show by their shape whether they are transposed."""
    config = FAMILIES["qwen3_vl_moe"]()
    config.text_config.moe_intermediate_size = 24
    return config


def transposed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of experts as Qwen3-VL-MoE has them on the Hub."""
    return {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each matrix of each expert by itself."""
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    found = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith("experts"):
            found[name] = tensor
            continue
        for part, matrices in zip(parts[kind], tensor.chunk(len(parts[kind]), 1), strict=True):
            found |= {f"{stem}.{i}.{part}.weight": matrix.contiguous() for i, matrix in enumerate(matrices)}
    return found


@dataclass
class Source:
    """A checkpoint on the Hub.

    Attributes:
        config: of the whole model.
        more: tensors that the class of transformers does not have.
        changed: another form of the tensors on the disk.
        unused: names of modules that the training model does not have.
        lora: targets of adapters of the run.
        plain_transformers: whether transformers reads it without omnitrain.
    """

    config: Callable[[], PreTrainedConfig]
    more: dict[str, Tensor] = field(default_factory=dict)
    changed: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    unused: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()
    plain_transformers: bool = True


SOURCES = {
    "qwen3_vl": Source(FAMILIES["qwen3_vl"]),
    "qwen3_vl_moe fused": Source(narrow_experts, changed=transposed),
    "qwen3_vl_moe per expert": Source(narrow_experts, changed=apart, plain_transformers=False),
    "qwen2_5_omni": Source(in_stages, unused=("talker", "token2wav")),
    "qwen3_omni_moe": Source(qwen3_omni_moe, unused=("code2wav", "talker")),
    "gemma3 tied": Source(lambda: tied(FAMILIES["gemma3"]())),
    "deepseek_v3 with MTP": Source(FAMILIES["deepseek_v3"], MTP, unused=("model.layers.61",)),
    "qwen3_omni_moe with LoRA": Source(
        qwen3_omni_moe, unused=("code2wav", "talker"), lora=("*.o_proj", "*.experts.*", "*.fc1")
    ),
}


def save_source(source: Source, folder: Path) -> dict[str, int]:
    """Save in bf16 in several files, with an index; return modules that are not trained -> their number of tensors."""
    config = source.config()
    torch.manual_seed(0)
    model = class_of(config)(config).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = source.changed(load_file(file)) | source.more
    file.unlink()
    names = sorted(tensors)
    parts = {f"model-{part + 1:05d}-of-00003.safetensors": names[part::3] for part in range(3)}
    for name, of_part in parts.items():
        save_file({key: tensors[key] for key in of_part}, folder / name, {"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: part for part, of_part in parts.items() for name in of_part},
    }
    (folder / INDEX).write_text(json.dumps(index))
    torch.save({}, folder / "spk_dict.pt")  # the voices, without which transformers loads no whole Qwen2.5-Omni
    return {f"{module}.*": sum(name.startswith(f"{module}.") for name in names) for module in source.unused}


def class_of(config: PreTrainedConfig) -> Any:
    """The class of the whole model; that of a model in stages has no forward."""
    in_stages = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni_moe": "Qwen3OmniMoe"}
    if config.model_type in in_stages:
        return getattr(transformers, f"{in_stages[config.model_type]}ForConditionalGeneration")
    return foundation_class(config)


def save_run(source: Source, folder: Path, foundation: Path) -> OmniModel:
    """As a run leaves it that loads its foundation and makes no step."""
    model = build_omni_model(foundation=str(foundation), torch_dtype=torch.float32)
    if source.lora:
        add_lora(model, find_in_all(model, model.components, Lora(targets=list(source.lora), rank=2)))
    model.save_pretrained(folder)
    tiny_processor(tiny_model()).save_pretrained(folder)
    return model


def read_by_vllm(folder: Path) -> dict[str, tuple[str, tuple[str, list[int]]]]:
    """Tensor -> its file, dtype and shape, as vLLM's loader finds them: files that the index names, keys in them."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    found = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, framework="pt") as opened:
            for name in list(opened.keys()):
                assert name not in found and weight_map[name] == file
                stored = opened.get_slice(name)
                found[name] = file, (stored.get_dtype(), stored.get_shape())
    assert found.keys() == weight_map.keys()
    assert {file.name for file in folder.glob("*.safetensors")} == set(weight_map.values())
    return found


def read_by_transformers(folder: Path, caplog: pytest.LogCaptureFixture) -> PreTrainedModel:
    """Without a warning, and without a tensor that is missing, of another shape or not in the class."""
    cls = class_of(config_at(str(folder)))
    caplog.clear()
    with caplog.at_level(logging.WARNING), patch.object(logging.getLogger("transformers"), "propagate", True):
        model, info = PreTrainedModel.from_pretrained.__func__(cls, folder, output_loading_info=True)
    assert not caplog.records and not any(info.values()), (caplog.text, info)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return getattr(model, "thinker", model)(input_ids=torch.arange(5, 25)[None]).logits


COVERED = (
    "qwen2_5_omni",
    "qwen3_omni_moe",
    "qwen3_vl",
    "qwen3_omni_moe with LoRA",
)  # each of their traits is in another one, too
SECOND = ("gemma3 tied", "qwen3_vl_moe fused")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n in COVERED) + [pytest.mark.second] * (n in SECOND))
        for n in SOURCES
    ],
)
def test_what_was_loaded_and_made_no_step_is_its_source(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, original, run, plain = SOURCES[name], *(tmp_path / folder for folder in ("source", "run", "plain"))
    unused = save_source(source, original)
    assert save_run(source, run, original).config.unused_tensors == unused
    said = export(run, plain)
    counts = ", ".join(f"{module} ({count})" for module, count in unused.items())
    copied = f"; copied {sum(unused.values())} tensors that this model does not use from {original}: {counts}"
    assert said.endswith(copied) if unused else "copied" not in said

    assert read_by_vllm(plain) == read_by_vllm(original)
    assert json.loads((plain / INDEX).read_text()) == json.loads((original / INDEX).read_text())
    for file in original.glob("*.safetensors"):
        assert (plain / file.name).read_bytes() == file.read_bytes()
    if not source.plain_transformers:
        return
    exported, untouched = (read_by_transformers(folder, caplog) for folder in (plain, original))
    assert torch.equal(logits(exported), logits(untouched))


@pytest.mark.parametrize(
    "foundation_only", [False, pytest.param(True, marks=pytest.mark.second)], ids=["one folder", "foundation"]
)
def test_an_omni_model_with_lora_that_made_no_step_has_its_parts_as_they_were(
    foundation_only: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original, run, plain = (tmp_path / folder for folder in ("source", "run", "plain"))
    build_foundation_model(FOUNDATION).save_pretrained(original)
    model = tiny_model(foundation=str(original))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    # `tiny_model` draws its weights anew.
    save_file(
        {n.removeprefix("foundation."): before[n] for n in before if n.startswith("foundation.model")},
        original / "model.safetensors",
        {"format": "pt"},
    )
    lora = Lora(targets=["*_proj", "*.fc1"], rank=2)
    add_lora(model, find_in_all(model, ["foundation", "image_encoder"], lora))
    model.save_pretrained(run)
    tiny_processor(model).save_pretrained(run)
    assert len(list((run / "adapters").iterdir())) == 2
    export(run, plain, foundation_only=foundation_only)
    if foundation_only:
        assert (plain / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
        assert torch.equal(*(logits(read_by_transformers(folder, caplog)) for folder in (plain, original)))
        return
    assert not (plain / "adapters").exists()
    with caplog.at_level(logging.WARNING):
        again, processor = load_checkpoint(plain)
    assert not caplog.records
    found = again.state_dict()
    assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in before)
    row = tiny_row("image_to_text", 3)
    assert processor.prompt(row).input_ids.tolist() == tiny_processor(model).prompt(row).input_ids.tolist()


def test_quantized_experts_that_are_apart_are_dequantized(tmp_path: Path) -> None:
    """As in the fp8 checkpoints of Qwen3-VL-MoE on the Hub."""
    config = narrow_experts()
    foundation_class(config)(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = apart(load_file(file))
    experts = {key: value for name in tensors if ".experts." in name for key, value in fp8(name, tensors[name]).items()}
    save_file(tensors | experts, file, {"format": "pt"})
    declare(tmp_path, FP8)
    model = build_omni_model(foundation=str(tmp_path), torch_dtype=torch.float32).foundation
    expected, found = plain(experts), apart(model.state_dict())
    assert len(expected) == 2 * 4 * 3
    for name, matrix in expected.items():
        torch.testing.assert_close(found[name], matrix, rtol=2**-8, atol=0)  # dequantized to bf16


@pytest.mark.parametrize(
    ("targets", "dtype", "has_source"),
    [
        pytest.param((), None, True, id="source", marks=pytest.mark.slow),
        pytest.param(("*.down_proj", "*.up_proj", "*.gate_proj"), None, True, id="source, LoRA"),
        pytest.param((), "bfloat16", False, id="own files", marks=pytest.mark.second),
        pytest.param(
            ("*.down_proj", "*.up_proj", "*.gate_proj"), "bfloat16", False, id="own files, LoRA", marks=pytest.mark.slow
        ),
    ],
)
def test_few_tensors_are_in_memory(
    targets: tuple[str, ...], dtype: str | None, has_source: bool, tmp_path: Path
) -> None:
    """A merged matrix needs the most: the frozen one and the adapters' product, which become their sum.

    The profiler counts the files of the checkpoint, too, which are mapped, and not in memory of the process.
    """
    deep("cpu").save_pretrained(tmp_path / "source")
    model = save_run(Source(FAMILIES["qwen3"], lora=targets), tmp_path / "run", tmp_path / "source")
    _ = model.runner  # its contract is checked on a tiny model
    whole, largest = (of(parameter.numel() * 4 for parameter in model.parameters()) for of in (sum, max))
    if not has_source:
        (tmp_path / "source").rename(tmp_path / "elsewhere")
    peak = peak_bytes(lambda: export(tmp_path / "run", tmp_path / "plain", dtype))
    mapped = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*.safetensors"))
    assert largest / 2 <= peak - mapped < 6 * largest < whole / 8
