"""Images from a file to an update: a Qwen3-VL on packs of the real loader, against the same packs when they are ready.

The widths are those of Qwen3-VL-4B, with as many layers as fit, at most :data:`MOST_LAYERS`; text and pictures are
those of this repository. The loader's data process reads rows, decodes, resizes and packs.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from omni_step import OmniStep
from repo_samples import UNIT, mosaic, texts
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from gpu.measured import WARM_UP, Figures, Load, synchronize
from gpu.sides import laid_out
from gpu.sizes import config_of, layers_that_fit, sizes_of
from omnitrain.data.loading.loader import StepLoader
from omnitrain.data.packing.pack import Pack
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.rows import open_sources
from omnitrain.recipe import Data, Ops
from omnitrain.recipe.parallel import ComponentPlan
from tests.tiny_processors import byte_tokenizer, chatml, processor_class

MOST_LAYERS, TOKENS, ROWS = 8, 8192, 256
SPECIAL = ("<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def processor() -> Any:
    """Return Qwen3-VL's processor of images, around a tokenizer of bytes; that of videos would need torchvision."""
    images = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=UNIT**2, max_pixels=UNIT**2 * 64**2)
    shown = {"image": "<|vision_start|><|image_pad|><|vision_end|>"}
    tokenizer = byte_tokenizer([*SPECIAL], eos_token=SPECIAL[0])
    return processor_class(Qwen3VLProcessor)(images, tokenizer, None, chat_template=chatml(**shown))


def write_rows(folder: Path, sides: tuple[int, int], letters: int) -> Path:
    """Write messages, every other one with a picture, and the pictures as JPEG files."""
    generator = np.random.default_rng(0)
    with open(folder / "rows.jsonl", "w") as lines:
        for i, text in enumerate(islice(texts(), ROWS)):
            content, images = [{"type": "text", "text": "What is this?"}], []
            if i % 2 == 0:
                height, width = (UNIT * generator.integers(*sides, 2, endpoint=True)).tolist()
                path = folder / f"{i}.jpg"
                mosaic(generator, height, width).save(path, quality=90)
                content, images = [{"type": "image"}, *content], [str(path)]
            answer = [{"type": "text", "text": text[:letters]}]
            messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
            lines.write(json.dumps({"messages": messages, "images": images}) + "\n")
    return folder / "rows.jsonl"


def speed(step: OmniStep, packs: Iterable[Pack], load: Load) -> float:
    """Return tokens per second, loading included, after the warm-up."""
    taken: Iterator[Pack] = iter(packs)
    for pack in islice(taken, WARM_UP):
        step.run([pack])
    synchronize(load.device)
    began, tokens = time.perf_counter(), 0
    for pack in islice(taken, load.rounds * load.steps):
        step.run([pack])
        tokens += pack.num_tokens
    synchronize(load.device)
    return tokens / (time.perf_counter() - began)


def run(tiny: bool, folder: Path) -> Figures:
    """Yield tokens per second with the loader and with ready packs, and the share of its time that the GPU is idle."""
    load = Load.of(tiny, TOKENS)
    sizes = replace(sizes_of("mixed", tiny), special=(2, 3, 4, 5))  # ids of the processor's tokens
    layers = layers_that_fit("mixed", sizes, load, MOST_LAYERS)
    yield "layers", float(layers)
    number = WARM_UP + load.rounds * load.steps
    data = {"workers": 0 if tiny else 4, "pack_tokens": load.tokens}
    with (
        tempfile.TemporaryDirectory() as own,
        laid_out(config_of("mixed", sizes, layers), load.device, ComponentPlan(), Ops()) as step,
    ):
        path = write_rows(Path(own), sizes.sides, sizes.longest)
        recipe = Data.model_validate(data | {"train": [{"path": str(path)}]})
        native = NativeInputs({"image": sizes.special[0]}, ("mm_token_type_ids",))
        made = OmniProcessor(TemplateRenderer(processor(), native), {}, {})
        loader = StepLoader(open_sources(recipe.train), made, recipe)
        with closing(iter(loader)) as steps:
            seen: list[Pack] = []
            loaded = speed(step, (seen.append(pack) or pack for (pack,) in islice(steps, number)), load)
        ready = speed(step, seen, load)
    yield "tokens/s, loader", loaded
    yield "tokens/s, ready packs", ready
    yield "idle share", max(0.0, 1 - loaded / ready)
