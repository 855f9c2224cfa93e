"""HF-style samples from text and images of this repository: without download, the same on every machine."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice
from typing import Any

import numpy as np
import pyarrow.parquet
from harness import ROOT
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from omnitrain.data.packing.pack import IGNORED

TOKENIZER = "tasks/quickstart/tokenizers/text"
IMAGES = "tasks/quickstart/data/train.parquet"
UNIT = 32  # pixels along a side that become one row: patches of 16, merged 2 x 2


def texts() -> Iterator[str]:
    """Yield sections of the documentation, then top-level blocks of the package's source, endlessly."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    sections = [section for page in pages for section in page.read_text().split("\n## ")]
    modules = sorted((ROOT / "omnitrain").rglob("*.py"))
    blocks = [block for module in modules for block in module.read_text().split("\n\n\n")]
    return cycle([text for text in (*sections, *blocks) if len(text) > UNIT])


def text_samples(number: int, longest: int) -> list[dict[str, Any]]:
    """Return ``number`` text samples, with every token predicted, truncated to ``longest``."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / TOKENIZER)
    ids = (tokenizer(text, add_special_tokens=False)["input_ids"][:longest] for text in texts())
    return [{"input_ids": np.array(row), "labels": np.array(row)} for row in islice(ids, number)]


def mixed_samples(number: int, longest: int, sides: tuple[int, int], config: Any) -> list[dict[str, Any]]:
    """The same; every other one begins with an image, which is not predicted.

    Args:
        number: of samples.
        longest: tokens of a sample's text.
        sides: least and largest side of an image, in units of 32 pixels.
        config: of a Qwen3-VL.
    """
    generator = np.random.default_rng(0)
    processor = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=UNIT**2, max_pixels=UNIT**2 * 64**2)
    made = text_samples(number, longest)
    for sample in made[::2]:
        height, width = generator.integers(*sides, 2, endpoint=True).tolist()
        media = processor(mosaic(generator, height * UNIT, width * UNIT), return_tensors="np")
        placeholders = [config.image_token_id] * (height * width)
        image = np.array([config.vision_start_token_id, *placeholders, config.vision_end_token_id])
        labels = np.concatenate([np.full(len(image), IGNORED), sample["labels"]])
        sample |= {"input_ids": np.concatenate([image, sample["input_ids"]]), "labels": labels, **media}
    return made


def mosaic(generator: np.random.Generator, height: int, width: int) -> Image.Image:
    """Fill a picture with handwritten digits side by side."""
    digits = _digits()
    rows, columns = height // digits.shape[1], width // digits.shape[2]
    chosen = digits[generator.integers(len(digits), size=(rows, columns))]
    return Image.fromarray(chosen.swapaxes(1, 2).reshape(height, width)).convert("RGB")


@cache
def _digits() -> np.ndarray:
    """``[number, 8, 8]`` uint8."""
    column = pyarrow.parquet.read_table(ROOT / IMAGES, columns=["images"])["images"].to_pylist()[:1000]
    return np.stack([np.asarray(Image.open(io.BytesIO(row[0]["bytes"])).convert("L")) for row in column if row])
