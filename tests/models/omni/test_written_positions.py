"""Images that a foundation with M-RoPE writes have the positions of images that it reads, also when generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.clips import Clip
from omnitrain.data.sources.rows import Row
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.generate import Answer, generate
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.recipe import ChatFormat, Sampling
from tests.families import FAMILIES
from tests.models.decoders.continuous import CONTEXT, FLOW
from tests.models.decoders.test_decoders import IMAGE_TOKENIZERS
from tests.models.decoders.test_sizes import SIZES, drawing
from tests.tiny import part, png, webp
from tests.tiny_processors import FAMILIES as PROCESSORS

DECODERS = {
    "codes": {"tokenizer": {"config": IMAGE_TOKENIZERS["emu3"]}, "image_sizes": SIZES},
    "flow head": FLOW,
    "in context": CONTEXT,
    "film in codes": {"tokenizer": {"config": IMAGE_TOKENIZERS["emu3"]}, "image_size": 4, "num_frames": 5},
    "film in context": CONTEXT | {"num_frames": 5},
}
MODELS = ["qwen2_5_vl", "qwen3_vl"]
START = "<|im_start|>"


def built(name: str, decoder: str) -> tuple[OmniModel, OmniProcessor]:
    config = FAMILIES[name]()
    config.image_token_id, config.video_token_id = 2, 3
    config.vision_start_token_id, config.vision_end_token_id = 4, 5
    config.vision_config.patch_size = 2  # as the processor
    config.get_text_config().vocab_size = 300
    torch.manual_seed(0)
    model = build_omni_model(foundation=config, decoders={"image_decoder": DECODERS[decoder]}).eval()
    for parameter in model.foundation.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=(parameter.numel() / len(parameter)) ** -0.5)
    renderer = TemplateRenderer(
        PROCESSORS["qwen2_vl" if name == "qwen2_5_vl" else name]()[0],
        model.native_inputs,
        starts=ChatFormat(image=START, video=START),
    )
    return model, OmniProcessor(renderer, *model.media_adapters())


def row(decoder: str, width: int, height: int, seed: int = 0, *, reads: bool = True) -> Row:
    """An image and a question; the answer has an image or a film, and text."""
    made = drawing(width, height, seed)
    asked, kind = [*[part("image")] * reads, part("text", "draw" + seed * "x")], modality(decoder)
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [part(kind), part("text", "so")]},
    ]
    images = [*[png(seed)] * reads, *made.media["image"] * (kind == "image")]
    return replace(
        made, messages=messages, media=made.media | {"image": images, "video": [webp(seed)] * (kind == "video")}
    )


def modality(decoder: str) -> str:
    return "video" if decoder.startswith("film") else "image"


def of_a_read_image(model: OmniModel, sample: Sample) -> torch.Tensor:
    """The positions that the model gives the sample if it reads the image that it writes."""
    written = next(span for span in sample.spans if span.is_target)
    _, frames, rows, columns = grid = written.item.grid
    ids = torch.from_numpy(sample.input_ids)
    ids[written.start + grid.before : written.start + written.item.num_tokens] = 2
    grids = [span.item.features["image_grid_thw"][0] for span in sample.spans if not span.is_target]
    merge = model.foundation.config.vision_config.spatial_merge_size
    grids.append(np.array([frames, rows * merge, columns * merge]))
    types = (ids == 2).int()[None]
    positions, _ = model.foundation.model.get_rope_index(ids[None], types, torch.tensor(np.stack(grids)))
    return positions[:, 0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_written_image_has_the_positions_of_the_same_image_read(name: str, decoder: str) -> None:
    model, processor = built(name, decoder)
    for size, reads in (((8, 8), True), ((12, 8), True), ((8, 16), False)):
        sample = processor.sample(row(decoder, *size, reads=reads))
        found, expected = torch.from_numpy(sample.position_ids), of_a_read_image(model, sample)
        assert torch.equal(found, expected)
        assert not torch.equal(found[1], found[2]) and found[0, -1] < len(sample) - 1
        assert (found[0].diff() < 0).any() == (modality(decoder) == "video")  # text goes on before its last frames


def prompted(decoder: str) -> tuple[OmniModel, OmniProcessor, list[Sample]]:
    """Prompts that the model answers with an image at once, and others."""
    model, processor = built("qwen2_5_vl", decoder)
    prompts = [processor.prompt(row(decoder, 8, 16, seed, reads=seed % 2 == 0), seed) for seed in range(3)]
    first = generate(model, processor, prompts, max_new_tokens=1)[0].tokens[0][1]
    processor.start_tokens = {modality(decoder): first}
    return model, processor, prompts


OPTIONS: dict[str, Any] = {"max_new_tokens": 36, "sampling": {"image_decoder": Sampling(size="8x16")}}


def options(decoder: str) -> dict[str, Any]:
    return OPTIONS if decoder == "codes" else {"max_new_tokens": 24 if modality(decoder) == "video" else 8}


@pytest.mark.parametrize("decoder", DECODERS)
def test_generation_gives_the_positions_of_training(decoder: str) -> None:
    model, processor, prompts = prompted(decoder)
    seen: list[torch.Tensor] = []
    model.foundation.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["position_ids"]), with_kwargs=True
    )
    (answer,) = generate(model, processor, prompts[:1], use_cache=False, **options(decoder))
    sample = processor.sample(row(decoder, 8, 16, 0))
    assert isinstance(answer.parts[0], Clip if modality(decoder) == "video" else Image.Image)
    item = next(span for span in sample.spans if span.is_target).item
    length = len(prompts[0]) + 1 + item.num_tokens + 1  # with the first token of the text after it
    assert len(sample) > length
    assert torch.equal(seen[-1][:, 0, :length], torch.from_numpy(sample.position_ids[:, :length]))
    shown = len(seen)
    (cached,) = generate(model, processor, prompts[:1], **options(decoder))
    assert_same([cached], [answer])
    steps = torch.cat([one[:, 0] for one in seen[shown:]], dim=1)
    if "in context" not in decoder:  # whose steps run again
        assert torch.equal(steps[:, :length], torch.from_numpy(sample.position_ids[:, :length]))


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for answer, other in zip(answers, expected, strict=True):
        assert [mode for mode, _ in answer.tokens] == [mode for mode, _ in other.tokens]
        values = [np.concatenate([np.atleast_1d(token) for _, token in one.tokens]) for one in (answer, other)]
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decoder", ["codes", "in context", "film in context"])
def test_a_batch_writes_what_each_prompt_alone_writes(decoder: str) -> None:
    model, processor, prompts = prompted(decoder)
    alone = [generate(model, processor, [one], numbers=[n], **options(decoder))[0] for n, one in enumerate(prompts)]
    assert_same(generate(model, processor, prompts, **options(decoder)), alone)


def written(decoder: str, plan: dict[str, int]) -> list[Answer]:
    model, processor, prompts = prompted(decoder)
    build_parallelize_model(model, parallel_state=init_parallel_state(**plan), enable_mixed_precision=False)
    return generate(model, processor, prompts, **options(decoder))


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("plan", [{"pp_size": 2}, {"tp_size": 2}], ids=["pp2", "tp2"])
def test_ranks_write_what_one_process_writes(ranks: RankPool, decoder: str, plan: dict[str, int]) -> None:
    expected = generate(*prompted(decoder), **options(decoder))
    for answers in ranks.run(written, decoder, plan, timeout_s=120, world=2):
        assert_same(answers, expected)
