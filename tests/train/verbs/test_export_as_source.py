"""An export has the tensors, dtypes, files and configs of the checkpoint from which the model was loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2_5OmniForConditionalGeneration

import omnitrain as ot
from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import add_lora, find_adapters
from omnitrain.models.hf.load import config_at, foundation_class
from omnitrain.models.hf.source_checkpoint import SourceCheckpoint
from omnitrain.models.omni.build import build_omni_model
from omnitrain.recipe import Recipe
from omnitrain.recipe.plan_groups import Lora
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.export import export
from tests.families import FAMILIES
from tests.models.discovery.test_foundation_class import in_stages
from tests.models.hf.test_quantized import quantize
from tests.tiny import tiny_model, tiny_processor, tiny_recipe, tiny_tokenizer

MTP = {f"model.layers.61.{name}": torch.randn(4, 4).bfloat16() for name in ("eh_proj.weight", "enorm.weight")}
TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% generation %}\
{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def source(folder: Path, family: str, more: dict[str, Tensor] | None = None, **text: Any) -> Path:
    """A tiny model in bf16 in several files, as on the Hub; ``more`` is in the last one."""
    config = FAMILIES[family]()
    for name, value in text.items():
        setattr(config.get_text_config(decoder=True), name, value)
    torch.manual_seed(0)
    foundation_class(config)(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    if more:
        index_file = folder / "model.safetensors.index.json"
        index = json.loads(index_file.read_text())
        last = max(index["weight_map"].values())
        save_file(load_file(folder / last) | more, folder / last, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(more, last)
        index["metadata"]["total_size"] += sum(tensor.numel() * tensor.element_size() for tensor in more.values())
        index_file.write_text(json.dumps(index))
    return folder


def saved(folder: Path, foundation: Path, moved_by: float = 0.0) -> Path:
    """As a run saves it, in fp32, with a chat format of its own."""
    model = build_omni_model(foundation=str(foundation), torch_dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(moved_by)
    model.save_pretrained(folder)
    tiny_processor(tiny_model()).save_pretrained(folder)
    return folder


def tensors_by_file(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def assert_same_tensors(found: Path, expected: Path) -> None:
    """File by file, bitwise, and the index."""
    one, other = tensors_by_file(found), tensors_by_file(expected)
    assert {file: set(tensors) for file, tensors in one.items()} == {file: set(of) for file, of in other.items()}
    for file, tensors in other.items():
        for name, tensor in tensors.items():
            assert one[file][name].dtype == tensor.dtype and torch.equal(one[file][name], tensor), name
    index = "model.safetensors.index.json"
    assert (found / index).is_file() == (expected / index).is_file() == (len(other) > 1)
    if len(other) > 1:
        assert json.loads((found / index).read_text()) == json.loads((expected / index).read_text())


def logits(folder: Path) -> Tensor:
    """As transformers computes them; nothing is missing, unexpected or of another shape."""
    model, info = foundation_class(config_at(str(folder))).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 25)[None]).logits


@pytest.mark.second
def test_a_trained_part_of_a_model_in_stages_is_exported_with_the_others_as_they_were(tmp_path: Path) -> None:
    original, plain = tmp_path / "source", tmp_path / "plain"
    Qwen2_5OmniForConditionalGeneration(in_stages()).to(torch.bfloat16).save_pretrained(original)
    others = {name for name in load_file(original / "model.safetensors") if not name.startswith("thinker.")}
    export(saved(tmp_path / "trained", original, moved_by=1.0), plain)
    before, after = (load_file(folder / "model.safetensors") for folder in (original, plain))
    assert {name for name in before if torch.equal(before[name], after[name])} == others


def test_a_model_with_the_template_of_its_source_has_its_configs_tokenizer_and_license(tmp_path: Path) -> None:
    original = tmp_path / "source"
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(original)
    source(original, "qwen3", vocab_size=256, eos_token_id=tokenizer.eos_token_id)
    (original / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, tokenizer.eos_token_id]}))
    (original / "LICENSE").write_text("do as you like")
    (original / "README.md").write_text("about the source")
    model = build_omni_model(foundation=str(original), torch_dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    ot.OmniProcessor(ot.data.TemplateRenderer(tokenizer), *model.media_adapters()).save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "plain")
    expected = {file.name for file in original.iterdir()} - {"README.md"}
    assert {file.name for file in (tmp_path / "plain").iterdir()} == expected and "LICENSE" in expected
    for name in expected:
        if not name.startswith("model"):
            assert (tmp_path / "plain" / name).read_bytes() == (original / name).read_bytes(), name
    assert_same_tensors(tmp_path / "plain", original)


def test_another_end_token_dtype_and_vocabulary_are_in_the_configs(tmp_path: Path) -> None:
    original = source(tmp_path / "source", "deepseek_v3", MTP)
    end = tiny_processor(tiny_model()).end_token
    export(saved(tmp_path / "saved", original), tmp_path / "plain", "float32")
    config, generation = (
        json.loads((tmp_path / "plain" / f"{name}.json").read_text()) for name in ("config", "generation_config")
    )
    assert config["eos_token_id"] == generation["eos_token_id"] == [end, 2] and config["dtype"] == "float32"
    dtypes = {name: tensor.dtype for of in tensors_by_file(tmp_path / "plain").values() for name, tensor in of.items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == set(MTP)
    model = build_omni_model(foundation=str(original), torch_dtype=torch.float32)
    model.foundation.resize_token_embeddings(300)
    model.config.foundation = json.loads(model.foundation.config.to_json_string(use_diff=False))
    model.save_pretrained(tmp_path / "grown")
    tiny_processor(tiny_model()).save_pretrained(tmp_path / "grown")
    export(tmp_path / "grown", tmp_path / "larger")
    assert logits(tmp_path / "larger").size(-1) == 300


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_merged_adapters_are_in_the_weights_of_the_source(tmp_path: Path, scale: float) -> None:
    """Adapters that did not train change no bit; others change what they adapt, and nothing else."""
    original = source(tmp_path / "source", "deepseek_v3", MTP)
    model = build_omni_model(foundation=str(original), torch_dtype=torch.float32)
    lora = Lora(targets=["o_proj", "experts.*"], rank=2)
    add_lora(model, {"foundation": find_adapters(model, "foundation", lora)})
    with torch.no_grad():
        for name in model.adapter_names:
            if "lora_B" in name:
                model.get_parameter(name).add_(scale)
    model.save_pretrained(tmp_path / "saved")
    tiny_processor(tiny_model()).save_pretrained(tmp_path / "saved")
    assert "copied 2 tensors" in export(tmp_path / "saved", tmp_path / "plain")
    before, after = tensors_by_file(original), tensors_by_file(tmp_path / "plain")
    changed = {name for file, of in before.items() for name in of if not torch.equal(of[name], after[file][name])}
    adapted = {name for of in before.values() for name in of if ".o_proj." in name or ".mlp.experts." in name}
    assert len(adapted) == 2 + 4 * 3 and changed == (adapted if scale else set())


def test_a_run_remembers_its_source_and_its_export_has_the_trained_weights_in_it(tmp_path: Path) -> None:
    original = source(tmp_path / "source", "deepseek_v3", MTP, vocab_size=len(tiny_tokenizer()))
    tiny_tokenizer().save_pretrained(original)
    recipe = tiny_recipe(tmp_path, text_only=True, steps=1)
    Trainer(Recipe.load(str(recipe), [f"model.foundation={original}"])).fit()
    assert "copied 2 tensors that this model does not use" in export(tmp_path / "run", tmp_path / "plain")
    before, after = tensors_by_file(original), tensors_by_file(tmp_path / "plain")
    same = {name for file, of in before.items() for name, value in of.items() if torch.equal(value, after[file][name])}
    names = {name for of in before.values() for name in of}
    assert set(MTP) <= same and names - same >= {"model.embed_tokens.weight", "lm_head.weight"}
    assert [(file, {n: (v.dtype, v.shape) for n, v in of.items()}) for file, of in before.items()] == [
        (file, {n: (v.dtype, v.shape) for n, v in of.items()}) for file, of in after.items()
    ]


def test_a_source_that_is_gone_is_told_and_can_be_named_where_it_is_now(tmp_path: Path) -> None:
    original = source(tmp_path / "source", "deepseek_v3", MTP)
    checkpoint, now = saved(tmp_path / "saved", original), tmp_path / "now"
    original.rename(now)
    said = export(checkpoint, tmp_path / "own")
    assert f"without the files of its source: no checkpoint at '{original}'" in said
    assert "; --source can name another copy of it; left out 2 tensors of the foundation's checkpoint that" in said
    assert said.endswith("this model does not use: model.layers.61.* (2)")
    assert "copied 2 tensors" in export(checkpoint, tmp_path / "plain", source=str(now))
    assert_same_tensors(tmp_path / "plain", now)
    other = source(tmp_path / "other", "qwen3")
    with pytest.raises(UserError, match=r"'.*other' lacks \d+ of \d+ tensors of DeepseekV3ForCausalLM, such as model"):
        export(checkpoint, tmp_path / "none", source=str(other))
    wide = source(tmp_path / "wide", "deepseek_v3", kv_lora_rank=24)
    with pytest.raises(
        UserError, match=r"has 2 of \d+ .* in another shape, such as model.layers.0.self_attn.kv_b_proj"
    ):
        export(checkpoint, tmp_path / "none", source=str(wide))
    assert not (tmp_path / "none").exists()


def test_tied_weights_that_the_source_has_twice_are_twice_in_the_export(tmp_path: Path) -> None:
    original = source(tmp_path / "source", "qwen3", tie_word_embeddings=True)
    tensors = {name: tensor for of in tensors_by_file(original).values() for name, tensor in of.items()}
    for file in original.glob("model*"):
        file.unlink()
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    assert len(twice) == len(tensors) + 1
    save_file(twice, original / "model.safetensors", {"format": "pt"})
    export(saved(tmp_path / "saved", original), tmp_path / "plain")
    assert_same_tensors(tmp_path / "plain", original)
    export(saved(tmp_path / "trained", original, moved_by=0.5), tmp_path / "later")
    later = load_file(tmp_path / "later" / "model.safetensors")
    assert torch.equal(later["lm_head.weight"], later["model.embed_tokens.weight"])
    assert not torch.equal(later["lm_head.weight"], twice["lm_head.weight"])


@pytest.mark.parametrize(("family", "prediction"), [("deepseek_v3", "model.layers.61."), ("gpt_oss", "")])
def test_a_quantized_source_is_exported_dequantized(tmp_path: Path, family: str, prediction: str) -> None:
    """Its layer of multi-token prediction, too, which the model does not have: here a copy of the last one."""
    original, plain = tmp_path / "source", tmp_path / "plain"
    expected = quantize(original, family)
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    if prediction:
        file, last = original / "model.safetensors", "model.layers.1."
        for tensors in (stored := load_file(file), expected):
            tensors |= {n.replace(last, prediction): t.clone() for n, t in tensors.items() if n.startswith(last)}
        save_file(stored, file, {"format": "pt"})
    said = export(saved(tmp_path / "saved", original), plain)
    copied = sum(bool(prediction) and name.startswith(prediction) for name in expected)
    more = f"; copied {copied} tensors that this model does not use from {original}: {prediction}* ({copied})"
    assert said.endswith(", which is not quantized" + (more if copied else ""))
    found = load_file(plain / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16, name
        torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=2**-8, atol=0)
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    assert logits(plain).isfinite().all()


def test_a_source_in_bin_files_gives_no_files(tmp_path: Path) -> None:
    original = source(tmp_path / "source", "qwen3")
    tensors = {name: tensor for of in tensors_by_file(original).values() for name, tensor in of.items()}
    for file in original.glob("model*"):
        file.unlink()
    torch.save(tensors, original / "pytorch_model.bin")
    said = export(saved(tmp_path / "saved", original), tmp_path / "plain", "bfloat16")
    assert f"without the files of its source: '{original}' has no weights in safetensors files; --source can" in said
    assert torch.equal(logits(tmp_path / "plain"), logits(original))


def test_an_export_with_attached_components_takes_no_source(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "saved")
    tiny_processor(model).save_pretrained(tmp_path / "saved")
    with pytest.raises(UserError, match="--source: only an export of the foundation's class has its files; add --fou"):
        export(tmp_path / "saved", tmp_path / "omni", source=str(tmp_path))


def test_of_a_source_on_the_hub_only_needed_files_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = source(tmp_path / "source", "qwen3")
    names = [
        *(file.name for file in original.iterdir()),
        *("spk_dict.pt", "LICENSE", "chat_template.jinja", "tokenizer.model"),
    ]
    kept: list[str] = []

    def snapshot_download(repository: str, **patterns: Any) -> str:
        unneeded = ["original/consolidated.00.pth", "pytorch_model-00001-of-00002.bin", "onnx/model.onnx", "a.gguf"]
        kept.extend(filter_repo_objects([*names, *unneeded], **patterns))
        return str(original)

    monkeypatch.setattr("omnitrain.models.hf.load.snapshot_download", snapshot_download)
    assert SourceCheckpoint.open("organization/model").folder == original and kept == names
