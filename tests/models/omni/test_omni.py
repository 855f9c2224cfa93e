from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError, WeightsError
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.build import build_foundation_model, build_omni_model
from omnitrain.models.omni.encode import call_component
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.named_parameters import freeze
from omnitrain.models.omni.summary import component_rows
from tests.tiny import FOUNDATION, MODEL, tiny_model, tiny_processor, tiny_samples


@pytest.fixture(scope="module")
def model() -> OmniModel:
    return tiny_model()


@pytest.fixture(scope="module")
def samples(model: OmniModel) -> list[Sample]:
    return tiny_samples(tiny_processor(model))


def step_gradients(model: OmniModel, packs: list[Pack]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one optimizer step over ``packs``, by the rule of one count for the whole batch."""
    model.zero_grad()
    counts: dict[str, int] = {}
    for pack in packs:
        for name, count in pack.loss_counts().items():
            counts[name] = counts.get(name, 0) + count
    total = 0.0
    for pack in packs:
        loss = sum(term.sum / counts[name] for name, term in model(pack).losses.items() if counts[name])
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(one: tuple[float, dict], other: tuple[float, dict]) -> None:
    assert abs(one[0] - other[0]) <= 1e-5 * abs(one[0])
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        # The floor is for key biases without rotary positions, whose gradient is zero but for rounding.
        error = (gradient - other[1][name]).abs().max()
        assert error <= 1e-5 * gradient.abs().max() + 1e-7, f"{name}: {error:.1e}"


def test_the_wrong_answer_would_show(model: OmniModel, samples: list[Sample]) -> None:
    """The comparison below can fail: one sample less moves gradients by far more than its tolerance."""
    with pytest.raises(AssertionError):
        assert_same_step(
            step_gradients(model, [Pack.from_samples(samples)]), step_gradients(model, [Pack.from_samples(samples[1:])])
        )


@pytest.mark.parametrize("groups", [4, 7, 14])
def test_accumulation_gives_the_same_loss_and_gradients(model: OmniModel, samples: list[Sample], groups: int) -> None:
    whole = step_gradients(model, [Pack.from_samples(samples)])
    packs = [Pack.from_samples(samples[i::groups]) for i in range(groups)]
    assert_same_step(whole, step_gradients(model, packs))


def test_any_packing_gives_the_same_loss_and_gradients(model: OmniModel, samples: list[Sample]) -> None:
    uneven = [Pack.from_samples(samples[:1]), Pack.from_samples(samples[:0:-1])]
    assert_same_step(step_gradients(model, [Pack.from_samples(samples)]), step_gradients(model, uneven))


def test_without_the_tokens_that_no_loss_reads_loss_and_gradients_are_the_same(
    model: OmniModel, samples: list[Sample]
) -> None:
    cut = [sample.without_tail() for sample in samples]
    assert sum(map(len, cut)) <= sum(map(len, samples)) - len(samples)
    assert_same_step(*(step_gradients(model, [Pack.from_samples(some)]) for some in (samples, cut)))


def test_each_trainable_parameter_gets_a_gradient(model: OmniModel, samples: list[Sample]) -> None:
    _, gradients = step_gradients(model, [Pack.from_samples(samples)])
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == set(gradients)
    silent = [n for n, g in gradients.items() if not g.abs().sum() and not n.endswith("k_proj.bias")]
    assert silent == []


def test_calls_without_data_change_no_loss_and_build_no_processor_again(
    samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, built = tiny_model(), []
    for name in ("image_encoder", "audio_encoder"):
        kind = type(model.get_submodule(name))
        adapter = kind.adapter
        monkeypatch.setattr(kind, "adapter", lambda self, adapter=adapter: built.append(self) or adapter(self))
    text = Pack.from_samples([sample for sample in samples if not sample.spans])
    alone, with_heads = model(text), model(EncodedPack(text, heads=model.decoder_names))
    assert with_heads.losses["text"].sum.item() == alone.losses["text"].sum.item()
    for _ in range(2):
        made = [call_component(model, name, {}, {name: 3}) for name in (*model.encoder_names, *model.decoder_names)]
    assert [len(idle) for _, idle in made] == [3] * 4 and not any(len(features.main) for features, _ in made)
    assert len(built) == 2


@torch.no_grad()
def test_a_forward_is_encode_media_then_run_foundation_then_run_heads(model: OmniModel, samples: list[Sample]) -> None:
    model.eval()
    pack = Pack.from_samples(samples)
    whole = model(pack)
    encoded = model.encode_media(pack)
    output = model.run_foundation(encoded)
    heads = model.run_heads(encoded, output)
    assert encoded.labels.keys() == pack.targets.keys() == whole.losses.keys() - {"text"}
    assert torch.equal(output.hidden, whole.hidden)
    assert {n: t.sum.item() for n, t in heads.losses.items()} == {n: t.sum.item() for n, t in whole.losses.items()}


@torch.no_grad()
def test_changing_one_sample_leaves_the_others_bitwise_unchanged(model: OmniModel, samples: list[Sample]) -> None:
    model.eval()
    for changed in range(len(samples)):
        swapped = list(samples)
        new_ids = (samples[changed].input_ids + 3) % 250
        swapped[changed] = dataclasses.replace(samples[changed], input_ids=new_ids)
        before, after = Pack.from_samples(samples), Pack.from_samples(swapped)
        hidden = [model(pack).hidden[0].split(pack.info.lengths) for pack in (before, after)]
        for index, one, other in zip(before.info.indices, *hidden, strict=True):
            assert torch.equal(one, other) == (index != changed), f"sample {index}, changed {changed}"


@torch.no_grad()
def test_a_packed_sample_equals_the_sample_alone(model: OmniModel, samples: list[Sample]) -> None:
    model.eval()
    pack = Pack.from_samples(samples)
    by_index = {sample.index: sample for sample in samples}
    for index, packed in zip(pack.info.indices, model(pack).hidden[0].split(pack.info.lengths), strict=True):
        alone = model(Pack.from_samples([by_index[index]])).hidden[0]
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_text_loss_is_that_of_plain_transformers(model: OmniModel, samples: list[Sample]) -> None:
    model.eval()
    sample = next(s for s in samples if not s.spans)
    pack = Pack.from_samples([sample])
    labels = torch.where(torch.from_numpy(sample.loss_mask), pack.input_ids[0], -100)[None]
    plain = model.foundation(input_ids=pack.input_ids, labels=labels, use_cache=False).loss
    ours = model(pack).losses["text"]
    torch.testing.assert_close(ours.sum / ours.count, plain, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_saved_and_loaded_gives_bitwise_equal_outputs(model: OmniModel, samples: list[Sample], tmp_path: Path) -> None:
    model.eval().save_pretrained(tmp_path)
    pack = Pack.from_samples(samples)
    before = model(pack)
    for loaded in (OmniModel.from_pretrained(tmp_path), build_omni_model(weights_path=str(tmp_path))):
        after = loaded.eval()(pack)
        assert torch.equal(before.hidden, after.hidden)
        assert all(torch.equal(before.losses[n].rows, after.losses[n].rows) for n in before.losses)
        assert not any(p.data_ptr() % 64 for p in loaded.parameters())  # where kernels may round otherwise
        trainable = {n for n, p in loaded.named_parameters() if p.requires_grad}
        assert trainable == {n for n, p in model.named_parameters() if p.requires_grad}
        tied = loaded.foundation.get_output_embeddings().weight is loaded.foundation.get_input_embeddings().weight
        assert tied


@pytest.mark.parametrize("change", ["drop", "rename", "reshape", "add"])
def test_weights_that_do_not_fit_are_an_error_that_names_them(model: OmniModel, tmp_path: Path, change: str) -> None:
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "image_encoder.projector.layers.1.weight"
    if change in ("drop", "rename"):
        tensor = tensors.pop(name)
    if change == "rename":
        tensors[name.replace("layers", "layer")] = tensor
    if change == "reshape":
        tensors[name] = tensors[name][:-1].clone()
    if change == "add":
        tensors["surplus.weight"] = torch.zeros(2)
        name = "surplus.weight"
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=name) as caught:
        OmniModel.from_pretrained(tmp_path)
    if change == "rename":
        assert "renamed? the files hold image_encoder.projector.layer.1.weight" in str(caught.value)


def test_freezing_by_name_freezes_that_and_nothing_else(samples: list[Sample]) -> None:
    model = tiny_model()
    freeze(model, ["image_encoder.tower", "foundation"])
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    expected = ("image_encoder.tower.", "foundation.", "image_decoder.tokenizer.", "audio_decoder.tokenizer.")
    positions = {"audio_encoder.tower.embed_positions.weight"}  # Whisper's own sinusoids never train
    assert frozen == {n for n, _ in model.named_parameters() if n.startswith(expected)} | positions
    before = {n: p.clone() for n, p in model.named_parameters()}
    _, gradients = step_gradients(model, [Pack.from_samples(samples)])
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved.isdisjoint(frozen) and gradients.keys() == before.keys() - frozen


def test_what_is_frozen_keeps_the_statistics_of_its_batches() -> None:
    model = tiny_model()
    model.image_encoder.first, model.image_encoder.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    freeze(model.train(), ["image_encoder.first"])
    for again in (model, model.train(), model.eval().train()):
        for norm in (again.image_encoder.first, again.image_encoder.second):
            norm(torch.arange(8.0).view(2, 4))
    assert model.image_encoder.first.running_mean.tolist() == [0.0] * 4
    assert model.image_encoder.second.num_batches_tracked == 3


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("image_encodr", "image_encoder"),
        ("image_encoder.towr", "image_encoder.tower"),
        ("model.layers.0", "foundation.model.layers.0"),  # as HF names it
    ],
)
def test_freezing_nothing_is_an_error_with_a_suggestion(model: OmniModel, name: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"{name}' matches no parameter; did you mean '{hint}'"):
        freeze(model, [name])


def test_the_table_counts_every_parameter(model: OmniModel) -> None:
    rows = {row.name: row for row in component_rows(model)}
    assert sum(row.parameters for row in rows.values()) == sum(p.numel() for p in model.parameters())
    assert rows["image_encoder"].class_name == "VisionEncoder (SiglipVisionModel)"
    assert rows["foundation"].ops == "attention: sdpa, loss: inside the head"
    assert rows["image_decoder"].trainable < rows["image_decoder"].parameters


def test_meta_costs_nothing_and_has_the_same_shapes(model: OmniModel) -> None:
    shapes = {n: p.shape for n, p in build_omni_model(**MODEL, init_device="meta").named_parameters()}
    assert shapes == {n: p.shape for n, p in model.named_parameters()}


def test_a_foundation_that_changes_its_logits_takes_the_plain_loss_and_the_table_says_so(samples: list[Sample]) -> None:
    capped = {
        "model_type": "gemma2",
        **{k: v for k, v in FOUNDATION.items() if k not in ("model_type",)},
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": None,
        "sliding_window": 4096,
    }
    model = tiny_model(foundation=capped)
    sample = next(sample for sample in samples if not sample.spans)
    ids, trained = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.loss_mask)
    with torch.no_grad():
        loss = model(Pack.from_samples([sample])).losses["text"].sum
        logits = model.foundation(input_ids=ids[None]).logits[0]
        uncapped = 3.0 * (logits / 3.0).atanh()
    expected, wrong = (
        F.cross_entropy(x[:-1][trained[1:]], ids[1:][trained[1:]], reduction="sum") for x in (logits, uncapped)
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert abs(loss.item() - wrong.item()) > 1.0
    table = {row.name: row for row in component_rows(model)}
    assert "loss: on the logits" in table["foundation"].ops


def test_parts_replace_those_of_a_saved_model_by_name_and_the_others_keep_their_weights(
    model: OmniModel, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    saved = dict(model.named_parameters())
    tower = {"image_encoder": MODEL["encoders"]["image_encoder"] | {"projector": {"kind": "mlp"}}}
    mixed = build_omni_model(weights_path=str(tmp_path), encoders=tower)
    assert (mixed.encoder_names, mixed.decoder_names) == (model.encoder_names, model.decoder_names)
    assert mixed.config.encoders["image_encoder"]["projector"]["kind"] == "mlp"
    for name, parameter in mixed.named_parameters():
        if not name.startswith("image_encoder."):
            assert torch.equal(parameter, saved[name]), name
    build_omni_model(**MODEL | {"decoders": {}}).config.save_pretrained(tmp_path / "reads")
    other = build_omni_model(
        str(tmp_path / "reads"),
        foundation=FOUNDATION | {"vocab_size": 300},
        decoders={"more": MODEL["decoders"]["audio_decoder"]},
    )
    assert (other.encoder_names, other.decoder_names) == (model.encoder_names, ["more"])
    assert other.foundation.get_input_embeddings().weight.size(0) == 300
    mixed.save_pretrained(tmp_path / "mixed")
    again = dict(build_omni_model(weights_path=str(tmp_path / "mixed")).named_parameters())
    assert all(torch.equal(parameter, again[name]) for name, parameter in mixed.named_parameters())


def test_parts_that_contradict_a_saved_model_are_refused_by_name(model: OmniModel, tmp_path: Path) -> None:
    model.config.save_pretrained(tmp_path)
    wider = FOUNDATION | {"hidden_size": 64}
    with pytest.raises(UserError) as refused:
        build_omni_model(str(tmp_path), foundation=wider, encoders=MODEL["encoders"], init_device="meta")
    assert str(refused.value).splitlines() == [
        f"decoders: {name!r} must have the foundation's hidden size 64, but the saved one has 32; give new settings in "
        f"decoders={{{name!r}: ...}}"
        for name in ("audio_decoder", "image_decoder")
    ]
    with pytest.raises(UserError, match=r"^encoders: 'image_decoder' is the name of a saved decoder; use another"):
        build_omni_model(
            str(tmp_path), encoders={"image_decoder": MODEL["encoders"]["image_encoder"]}, init_device="meta"
        )
    with pytest.raises(UserError) as refused:
        build_omni_model(
            str(tmp_path),
            encoders={"eyes": MODEL["encoders"]["image_encoder"]},
            decoders={"voice": MODEL["decoders"]["audio_decoder"]},
            init_device="meta",
        )
    assert str(refused.value).splitlines() == [
        f"{kind}: {new!r} is for {modalities}, as the saved {old!r} is; to replace that, give it by its name: "
        f"{kind}={{{old!r}: ...}}"
        for kind, new, modalities, old in (
            ("encoders", "eyes", "image and video", "image_encoder"),
            ("decoders", "voice", "audio", "audio_decoder"),
        )
    ]
    with pytest.raises(UserError, match="needs a foundation"):
        build_omni_model()


def test_a_foundation_without_a_head_or_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'siglip_vision_model' is no causal language model"):
        build_foundation_model({"model_type": "siglip_vision_model"}, init_device="meta")
    with pytest.raises(UserError, match="no HF model at"):
        build_foundation_model(str(tmp_path / "nothing"))


def test_a_foundation_may_be_a_path_a_config_or_a_module(tmp_path: Path) -> None:
    first = build_foundation_model(FOUNDATION)
    first.save_pretrained(tmp_path)
    loaded = build_foundation_model(str(tmp_path))
    assert build_foundation_model(first) is first
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), loaded.parameters(), strict=True))


def test_media_tokenizers_of_a_bf16_model_are_loaded_in_fp32_as_they_were_saved(tmp_path: Path) -> None:
    model = tiny_model(torch_dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = dict(OmniModel.from_pretrained(tmp_path).named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".tokenizer." in name else torch.bfloat16)
        assert torch.equal(parameter, loaded[name]) and parameter.dtype == loaded[name].dtype


@pytest.mark.parametrize("init_device", ["cpu", "meta"])
def test_media_tokenizers_stay_fp32_in_a_model_built_from_a_saved_config_alone(
    tmp_path: Path, init_device: str
) -> None:
    tiny_model().config.save_pretrained(tmp_path)
    model = build_omni_model(str(tmp_path), init_device=init_device, torch_dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".tokenizer." in name else torch.bfloat16)
        assert parameter.device.type == init_device


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"foundation": {"path": "somewhere"}}, r"needs `model_type`, found the keys \['path'\]"),
        ({"foundation": FOUNDATION, "encoders": [{"tower": "somewhere"}]}, "encoders: found a list; expected a dict"),
    ],
)
def test_parts_of_a_wrong_shape_are_refused_with_what_was_found(parts: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        build_omni_model(**parts)
