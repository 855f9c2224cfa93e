"""Janus: the modules with which it writes images are a decoder, and are exported under their own names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import JanusForConditionalGeneration, JanusProcessor
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.generate import generate
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import ChatFormat
from omnitrain.train.verbs.export import export
from omnitrain.train.verbs.verify import verify
from tests.families import FAMILIES
from tests.tiny import FOUNDATION, part, png
from tests.tiny_processors import byte_tokenizer, chatml

SPECIAL = ["<|im_end|>", "<|im_start|>", "<image_placeholder>", "<begin_of_image>", "<end_of_image>"]
IMAGE, START = 2, 3
DECODERS: dict = {"image_decoder": {}}
CODES = 16  # of an image
LAYOUTS = ["dp2", "pp2.accum2"]
MORE_LAYOUTS = ["tp2", "sp2", "vision1+dp1"]


def janus() -> JanusForConditionalGeneration:
    config = FAMILIES["janus"]()
    config.text_config.vocab_size, config.text_config.eos_token_id, config.image_token_id = 272, 0, IMAGE
    torch.manual_seed(0)
    model = JanusForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # codes and attention that are not all alike
            nn.init.normal_(parameter, std=parameter.size(-1) ** -0.5)
    return model.eval()


def hf_processor(model: JanusForConditionalGeneration) -> JanusProcessor:
    named = dict(zip(("image_token", "boi_token", "eoi_token"), SPECIAL[2:], strict=True))
    tokenizer = byte_tokenizer(SPECIAL, eos_token="<|im_end|>", **named)
    side = model.config.vision_config.image_size
    images = JanusImageProcessorPil(size={"height": side, "width": side}, min_size=1)
    shown = chatml(image="<image_placeholder>")
    return JanusProcessor(
        images, tokenizer, chat_template=shown, num_image_tokens=model.config.vision_config.num_image_tokens
    )


def processor(model: OmniModel) -> OmniProcessor:
    renderer = TemplateRenderer(
        hf_processor(model.foundation), model.native_inputs, starts=ChatFormat(image="<begin_of_image>")
    )
    return OmniProcessor(renderer, *model.media_adapters())


def row(seed: int, *, reads: bool = True, writes: bool = True) -> Row:
    asked, answer = [part("image")] * reads, [part("image")] * writes
    messages = [
        {"role": "user", "content": [*asked, part("text", f"draw {seed}")]},
        {"role": "assistant", "content": [part("text", "here: "), *answer]},
    ]
    images = [png(10 * seed + number) for number in range(reads + writes)]
    return Row(f"{seed}", "drawings", messages, {"image": images, "audio": [], "video": []}, {})


def samples(of: OmniProcessor) -> list[Sample]:
    made = [of.sample(one, number) for number, one in enumerate((row(1), row(2, reads=False), row(3, writes=False)))]
    assert all(isinstance(one, Sample) for one in made), made
    return made


def by_hand(model: JanusForConditionalGeneration, sample: Sample) -> tuple[Tensor, Tensor]:
    """Losses of the words and of the codes of a sample, added up, from transformers' own modules."""
    ids = torch.from_numpy(sample.input_ids)
    embeds = model.get_input_embeddings()(ids)
    codes, places = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
    for span in sample.spans:
        at = torch.from_numpy(span.positions)
        pixels = torch.from_numpy(span.item.features["pixel_values"])
        if span.is_target:
            codes, places = model.model.vqmodel.encode(pixels).image_tokens.flatten(), at
            rows = model.prepare_embeddings_for_image_generation(codes)
        else:
            rows = model.model.get_image_features(pixels).pooler_output.flatten(0, 1)
        embeds = embeds.index_copy(0, at, rows)
    hidden = model.model.language_model(inputs_embeds=embeds[None]).last_hidden_state[0]
    trained = torch.from_numpy(sample.loss_mask).nonzero().flatten()
    words = cross_entropy(model.lm_head(hidden[trained - 1]), ids[trained], reduction="sum")
    return words, cross_entropy(model.model.generation_head(hidden[places - 1]), codes, reduction="sum")


def omni() -> OmniModel:
    return build_omni_model(foundation=janus(), decoders=DECODERS)


def drawn() -> list[Sample]:
    return samples(processor(omni()))


@pytest.fixture(scope="module")
def model() -> OmniModel:
    return omni()


def test_the_losses_are_those_of_the_modules_of_transformers(model: OmniModel) -> None:
    plain, given = janus(), samples(processor(model))
    assert [[span.is_target for span in one.spans] for one in given] == [[False, True], [True], [False]]
    expected = [by_hand(plain, one) for one in given]
    words, codes = (torch.stack(losses).sum() for losses in zip(*expected, strict=True))
    losses = model(Pack.from_samples(given)).losses
    assert losses["text"].sum.item() == pytest.approx(words.item(), rel=1e-5)
    assert losses["image_decoder"].sum.item() == pytest.approx(codes.item(), rel=1e-5) and codes > 1
    assert losses["image_decoder"].count == 2 * CODES
    (words + codes).backward()
    (losses["text"].sum + losses["image_decoder"].sum).backward()
    model.give_back_decoders()
    gradients = dict(model.foundation.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert plain.model.generation_embeddings.weight.grad is not None


def test_generated_codes_are_those_of_the_modules_of_transformers() -> None:
    model, plain = omni(), janus()
    prompt = processor(model).prompt(row(5))
    ids, wanted = torch.from_numpy(prompt.input_ids), []
    (span,) = prompt.spans
    pixels = torch.from_numpy(span.item.features["pixel_values"])
    with torch.no_grad():
        embeds = plain.get_input_embeddings()(torch.cat([ids, torch.tensor([START])]))
        rows = plain.model.get_image_features(pixels).pooler_output.flatten(0, 1)
        embeds = embeds.index_copy(0, torch.from_numpy(span.positions), rows)
        for _ in range(CODES):
            state = plain.model.language_model(inputs_embeds=embeds[None]).last_hidden_state[0, -1:]
            wanted.append(int(plain.model.generation_head(state).argmax()))
            embeds = torch.cat([embeds, plain.prepare_embeddings_for_image_generation(torch.tensor(wanted[-1:]))])
        image = plain.model.vqmodel.decode(torch.tensor([wanted]))[0]
    model.foundation.lm_head.register_forward_hook(_only_images)
    (answer,) = generate(model, processor(model), [prompt], max_new_tokens=CODES + 2)
    assert answer.tokens[: CODES + 1] == [("text", START), *(("image_decoder", code) for code in wanted)]
    shown = ((image.clamp(-1, 1) + 1) * 127.5).round().permute(1, 2, 0).numpy().astype(np.uint8)
    assert np.array_equal(np.asarray(answer.parts[0]), shown)


def _only_images(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).index_fill(-1, torch.tensor([START]), 1)


def test_an_export_has_the_names_of_its_source_and_equal_logits(tmp_path: Path) -> None:
    plain, source, trained = janus(), tmp_path / "source", tmp_path / "trained"
    plain.save_pretrained(source)
    hf_processor(plain).save_pretrained(source)
    model = build_omni_model(foundation=str(source), decoders=DECODERS)
    with torch.no_grad():
        for parameter in model.image_decoder.head.parameters():
            parameter.add_(1)
    model.save_pretrained(trained)
    processor(model).save_pretrained(trained)
    assert "JanusForConditionalGeneration" in export(trained, tmp_path / "plain")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "plain"))
    assert before.keys() == after.keys() and json.loads((tmp_path / "plain" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith("model.generation_head.")}
    loaded, info = JanusForConditionalGeneration.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(info.values()), info
    loaded.eval(), model.eval()
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        state = loaded.model.language_model(input_ids=ids).last_hidden_state
        assert torch.equal(loaded(input_ids=ids).logits, model.foundation(input_ids=ids).logits)
        assert torch.equal(loaded.model.generation_head(state), model.image_decoder.head(state))


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [LAYOUTS, MORE_LAYOUTS])
def test_each_layout_trains_it_as_one_process(ranks: RankPool, layouts: list[str]) -> None:
    report = verify(omni, drawn() * 2, layouts, nproc=2, pool=ranks)
    assert report.ok, report


def test_a_refused_model_leaves_a_ready_foundation_whole() -> None:
    plain = janus()
    before = set(plain.state_dict())
    with pytest.raises(UserError, match="this is the name of another component"):
        build_omni_model(foundation=plain, decoders=DECODERS, teachers={"image_decoder": FOUNDATION})
    assert set(plain.state_dict()) == before


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(UserError, match=r"image_decoder: Qwen3ForCausalLM does not write images by itself"):
        build_omni_model(foundation=FOUNDATION, decoders=DECODERS)
    with pytest.raises(UserError, match="image_size: found 4, but JanusVQVAE decodes images of 8 pixels alone"):
        build_omni_model(foundation=janus(), decoders={"image_decoder": {"image_size": 4}})
    with pytest.raises(UserError, match="image_sizes: the foundation's own head has no classes for sizes"):
        build_omni_model(foundation=janus(), decoders={"image_decoder": {"image_sizes": ["4x4"]}})


def test_it_is_found_without_weights(tmp_path: Path) -> None:
    janus().save_pretrained(tmp_path)
    model = build_omni_model(foundation=str(tmp_path), decoders=DECODERS, init_device="meta")
    assert model.image_decoder.config.of_foundation["head"] == "model.generation_head" and model.device.type == "meta"
