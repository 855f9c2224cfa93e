"""Foundations whose image codes are words of their vocabulary (Emu3, Chameleon) learn to write images as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BatchFeature, Emu3Processor, PreTrainedModel

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.errors import UserError
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.encode import require_no_words
from omnitrain.models.omni.generate import generate
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.recipe import Sampling
from omnitrain.train.verbs.export import export
from omnitrain.train.verbs.verify import verify
from tests import families
from tests.families import CODES
from tests.models.test_janus import row
from tests.tiny_processors import byte_tokenizer, chatml, processor_class
from tests.train.verbs.test_export_as_source import saved

IMAGE, FIRST = 2, 280
SPECIAL = ["<|im_end|>", "<|im_start|>", "<image>", "<eol>", "<boi>", "<eoi>", "<img>", "<eof>"]
TEXT = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {
    "attention_dropout": 0.0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 0,
}


def chameleon() -> PreTrainedModel:
    return built(families.chameleon(TEXT, IMAGE, FIRST))


def emu3() -> PreTrainedModel:
    model = built(families.emu3(TEXT, IMAGE, FIRST))
    seen: list[Tensor] = []
    with torch.no_grad(), model.model.vqmodel.quantize.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        model.model.get_image_tokens(torch.randn(4, 3, 16, 16), torch.tensor([[16, 16]] * 4))
        model.model.vqmodel.quantize.embedding.weight.copy_(seen[0].movedim(2, -1).flatten(0, -2))  # not all one code
    return model


def built(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = foundation_class(config)(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=(parameter.numel() / len(parameter)) ** -0.5)
    return model.eval()


def arguments(model: PreTrainedModel) -> list[dict[str, np.ndarray]]:
    """Samples that write an image after one that is read, write one, and read one, as transformers takes them."""
    generator = np.random.default_rng(0)
    made = []
    for asked, written in ((1, 1), (0, 1), (1, 0)):
        pixels = generator.normal(size=(asked + written, 3, 16, 16)).astype(np.float32)
        sizes = {"image_sizes": np.array([[16, 16]] * (asked + written))} if model.config.model_type == "emu3" else {}
        rows = len(words_of(model, pixels, sizes)) // (asked + written)
        text = [generator.integers(20, 250, 5).tolist() for _ in range(3)]
        ids = text[0] + [IMAGE] * rows * asked + text[1]
        labels = [-100] * len(ids) + [IMAGE] * rows * written + text[2]
        ids += [IMAGE] * rows * written + text[2]
        made.append({"input_ids": np.array(ids), "labels": np.array(labels), "pixel_values": pixels, **sizes})
    return made


def words_of(model: PreTrainedModel, pixels: np.ndarray, sizes: dict[str, np.ndarray]) -> Tensor:
    tensors = {name: torch.from_numpy(value) for name, value in {"pixel_values": pixels, **sizes}.items()}
    return model.model.get_image_tokens(**tensors).flatten().long()


def by_hand(model: PreTrainedModel, given: dict[str, np.ndarray]) -> Tensor:
    """The loss, added up: transformers' own forward over the ids in which words stand for images."""
    ids, labels = (torch.from_numpy(given[name]) for name in ("input_ids", "labels"))
    words = words_of(model, given["pixel_values"], {n: v for n, v in given.items() if n == "image_sizes"})
    ids = ids.masked_scatter(ids == IMAGE, words)
    labels = torch.where(labels == IMAGE, ids, labels)
    hidden = model.model(input_ids=ids[None]).last_hidden_state[0]
    logits = model.lm_head(hidden)
    if model.config.model_type == "chameleon":  # it forbids codes; here, but where they are labels
        forbidden = torch.zeros_like(logits, dtype=torch.bool)
        forbidden[:, FIRST : FIRST + CODES] = True
        forbidden[:-1] &= ~(labels[1:, None] >= FIRST)
        logits = logits.masked_fill(forbidden, torch.finfo(logits.dtype).min)
    return cross_entropy(logits[:-1], labels[1:], reduction="sum")


MODELS = {"chameleon": chameleon, "emu3": emu3}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_rows_that_write_images_is_that_of_the_modules_of_transformers(name: str) -> None:
    plain, model = MODELS[name](), build_omni_model(foundation=MODELS[name]())
    assert model.runner.native.interfaces["image"].are_words
    given = arguments(plain)
    pack = Pack.from_samples(to_samples(model.runner.native, given))
    assert int((pack.text_labels == IMAGE).sum()) == 2 * (given[0]["labels"] == IMAGE).sum()
    term = model(pack).losses["text"]
    expected = torch.stack([by_hand(plain, one) for one in given]).sum()
    assert term.sum.item() == pytest.approx(expected.item(), rel=1e-5) and term.count == pack.text_labels.numel()
    term.sum.backward()
    expected.backward()
    gradients = dict(model.foundation.named_parameters())
    for path, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[path].grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=path)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_said_which_words_the_forward_forbids(name: str) -> None:
    (finding,) = (
        one for one in build_omni_model(foundation=MODELS[name]()).runner.contract.findings if one.check == "head"
    )
    said = f"the forward forbids {CODES} tokens, but where they are labels"
    assert (said in finding.fact) == (name == "chameleon")


def omni() -> OmniModel:
    return build_omni_model(foundation=emu3())


def drawn() -> list[Sample]:
    return list(to_samples(omni().runner.native, arguments(emu3())))


LAYOUTS = ["dp2"]
MORE_LAYOUTS = ["dp2.world", "vision1+dp1"]


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [LAYOUTS, MORE_LAYOUTS])
def test_each_layout_trains_it_as_one_process(ranks: RankPool, layouts: list[str]) -> None:
    report = verify(omni, drawn() * 2, layouts, nproc=2, pool=ranks)
    assert report.ok, [row.reason for row in report.rows]


class Pictures:
    """Images as transformers' processor of Emu3 gives them, which needs torchvision; large ones have 16 x 16 pixels."""

    model_input_names = ("pixel_values", "image_sizes")

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Any, **_: Any) -> BatchFeature:
        flat = [image for group in images for image in (group if isinstance(group, list) else [group])]
        flat = [image if max(image.size) == 24 else image.resize((16, 16)) for image in flat]
        pixels = [np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255 for image in flat]
        sizes = np.array([one.shape[1:] for one in pixels])
        return BatchFeature({"pixel_values": np.stack(pixels), "image_sizes": sizes})

    def postprocess(self, images: list[Tensor], return_tensors: str) -> dict[str, list[Image.Image]]:
        values = [(image.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy() for image in images]
        return {"pixel_values": [Image.fromarray(one) for one in values]}


def processor(model: OmniModel) -> OmniProcessor:
    named = dict(
        zip(
            ("image_token", "eol_token", "boi_token", "eoi_token", "image_wrapper_token", "eof_token"),
            SPECIAL[2:],
            strict=True,
        )
    )
    tokenizer = byte_tokenizer(SPECIAL, bos_token="<|im_start|>", eos_token="<|im_end|>", **named)
    hf = processor_class(Emu3Processor)(Pictures(), tokenizer, chat_template=chatml(image="<image>"))
    return OmniProcessor(TemplateRenderer(hf, model.native_inputs), *model.media_adapters())


def test_an_image_of_an_answer_is_trained_as_its_processor_writes_it_and_one_of_a_question_is_not() -> None:
    model = omni()
    sample = processor(model).sample(row(1))
    assert isinstance(sample, Sample), sample
    read, written = sample.spans
    assert not sample.loss_mask[read.positions].any() and sample.loss_mask[written.positions].all()
    assert [SPECIAL[id_] for id_ in sample.input_ids[written.positions[-1] + 1 :][:2]] == ["<eof>", "<eoi>"]
    assert model(Pack.from_samples([sample])).losses["text"].count == sample.loss_mask.sum()


@pytest.mark.second
def test_an_export_has_the_names_of_its_source_and_equal_logits(tmp_path: Path) -> None:
    plain, source = emu3(), tmp_path / "source"
    plain.save_pretrained(source)
    trained = saved(tmp_path / "trained", source, moved_by=0.01)
    export(trained, tmp_path / "plain")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "plain"))
    assert before.keys() == after.keys()
    assert any(name.endswith("embed_tokens.weight") and not torch.equal(before[name], after[name]) for name in before)
    loaded, info = type(plain).from_pretrained(tmp_path / "plain", output_loading_info=True)
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        found = loaded.eval()(input_ids=ids).logits
        expected = OmniModel.from_pretrained(trained).foundation.eval()(input_ids=ids).logits
    assert not any(info.values()) and torch.equal(found, expected)


def refused_on_stages() -> str:
    ready, plan = processor(omni()), ot.ParallelPlan.model_validate({"default": {"pp": 2}})
    run = ot.prepare(omni(), [row(1)], plan, processor=ready, micro_batch_size=1)
    assert isinstance(ready.sample(row(1)), Sample)
    with pytest.raises(UserError) as told:
        next(iter(run))
    return str(told.value)


@pytest.mark.second
def test_a_plan_in_which_no_rank_has_all_codes_refuses_their_rows_in_words(ranks: RankPool) -> None:
    """Also of a processor that the user has made."""
    for told in ranks.run(refused_on_stages, world=2, timeout_s=60):
        assert "cannot write it: no rank has all of its codes; set pp, ulysses" in told


def test_a_stage_of_a_pipeline_refuses_them_in_words() -> None:
    with pytest.raises(UserError, match="the last stage of a pipeline lacks the words of the image items"):
        require_no_words(omni(), Pack.from_samples(drawn()))


BOI, IMG, EOF, EOI, EOL = 4, 6, 7, 5, 3  # ids; the ends of rows have one of the vocabulary's map


def writing() -> tuple[OmniModel, OmniProcessor, list[Sample]]:
    """A model that begins its answer to the first prompt with the start token of an image, and prompts."""
    model = omni()
    of = processor(model)
    model.config.condition_dropout = True
    prompts = [of.prompt(row(n, reads=n % 2 == 0), is_guided=True) for n in (1, 2, 5)]
    with torch.no_grad():
        ids = torch.from_numpy(prompts[0].input_ids)[None]
        state = model.foundation.model(input_ids=ids).last_hidden_state[0, -1]
        model.foundation.lm_head.weight[BOI] = 20 * state / state.norm()
    return model, of, prompts


def by_transformers(plain: PreTrainedModel, ids: Tensor, height: int, width: int) -> tuple[list[int], Tensor]:
    """Words and pixels of an image after ``ids``, as the documentation of Emu3 generates it."""
    codes = plain.model.vocabulary_mapping.image_tokens

    def allowed(_: int, seen: Tensor) -> list[int]:
        offset = len(seen) - int((seen == IMG).nonzero()[-1])
        if offset > height * (width + 1):
            return [EOF] if offset == height * (width + 1) + 1 else [EOI]
        return codes if offset % (width + 1) else [EOL]

    length = height * (width + 1) + 2
    made = plain.generate(
        ids[None], max_new_tokens=length, do_sample=False, prefix_allowed_tokens_fn=allowed, pad_token_id=0
    )[0, len(ids) :]
    return made.tolist(), plain.model.decode_image_tokens(torch.cat([made, made[:1]])[None], height, width)


@pytest.mark.parametrize(("size", "height", "width"), [(None, 2, 2), ("16x24", 3, 2), ("24x16", 2, 3)])
def test_it_writes_the_image_that_transformers_generates(size: str | None, height: int, width: int) -> None:
    model, of, (prompt, *_) = writing()
    sampling = {"text": Sampling(size=size)}
    (answer,) = generate(model, of, [prompt], max_new_tokens=24, sampling=sampling)
    assert answer.tokens[0] == ("text", BOI)
    written = [token for mode, token in answer.tokens if mode == "foundation.image"]
    before = [*of.tokenizer(f"{height}*{width}", add_special_tokens=False)["input_ids"], IMG]
    ids = torch.cat([torch.from_numpy(prompt.input_ids), torch.tensor([BOI, *before])])
    words, pixels = by_transformers(model.foundation, ids, height, width)
    assert written[: len(before) + len(words)] == before + words and len({*words} - {EOL, EOF, EOI}) > 1
    image = next(part for part in answer.parts if isinstance(part, Image.Image))
    assert image.size == (8 * width, 8 * height)
    assert image == Pictures().postprocess(list(pixels), "PIL.Image.Image")["pixel_values"][0]


def test_a_batch_writes_it_as_each_prompt_alone_with_and_without_cache_and_guidance() -> None:
    model, of, prompts = writing()
    for guidance in (1.0, 3.0):
        options: dict[str, Any] = {"max_new_tokens": 16, "sampling": {"text": Sampling(guidance=guidance)}}
        together = generate(model, of, prompts, **options)
        alone = [generate(model, of, [prompt], numbers=[n], **options)[0] for n, prompt in enumerate(prompts)]
        uncached = generate(model, of, prompts, use_cache=False, **options)
        for other in (alone, uncached):
            assert [answer.tokens for answer in other] == [answer.tokens for answer in together]
        assert any(isinstance(part, Image.Image) for answer in together for part in answer.parts)


def test_a_size_that_its_processor_does_not_make_is_refused_in_words() -> None:
    model, of, prompts = writing()
    with pytest.raises(UserError, match=r"size '40x8': Emu3Processor makes 16x16 of such an image; use that"):
        generate(model, of, prompts, sampling={"text": Sampling(size="40x8")})


def on_ranks(plan: dict[str, int]) -> list[Any]:
    model, of, prompts = writing()
    build_parallelize_model(model, parallel_state=init_parallel_state(**plan), enable_mixed_precision=False)
    return [(answer.tokens, answer.parts) for answer in generate(model, of, prompts, max_new_tokens=16)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, {"pp_size": 2}], ids=["dp2", "pp2"])
def test_ranks_write_what_one_process_writes(ranks: RankPool, plan: dict[str, int]) -> None:
    model, of, prompts = writing()
    expected = [(answer.tokens, answer.parts) for answer in generate(model, of, prompts, max_new_tokens=16)]
    assert any(isinstance(part, Image.Image) for _, parts in expected for part in parts)
    assert all(found == expected for found in ranks.run(on_ranks, plan, timeout_s=120, world=2))


def test_a_prompt_with_an_image_is_answered_as_by_transformers() -> None:
    model, plain = omni(), emu3()
    of = processor(model)
    prompts = [of.prompt(row(5)), of.prompt(row(66, reads=False))]
    for prompt, answer in zip(prompts, generate(model, of, prompts, max_new_tokens=4), strict=True):
        ids = torch.from_numpy(prompt.input_ids)
        for span in prompt.spans:
            features = span.item.features
            ids = ids.masked_scatter(ids == IMAGE, words_of(plain, features.pop("pixel_values"), features))
        for _, token in answer.tokens:
            with torch.no_grad():
                assert token == int(plain(input_ids=ids[None]).logits[0, -1].argmax())
            ids = torch.cat([ids, torch.tensor([token])])
