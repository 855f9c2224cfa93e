"""Media that a row holds as values: base64, `data:` URLs, PIL images, arrays, sounds with their rate."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omnitrain.data.loading.loader import build_dataloader
from omnitrain.data.packing.sample import Rejected
from omnitrain.data.sources.media import Waveform, decode_audio, decode_image
from omnitrain.data.sources.rows import Row, open_sources
from omnitrain.recipe import Columns, DataSource
from tests.tiny import png, tiny_model, tiny_processor

PIXELS = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
SOUND = np.sin(np.arange(400, dtype=np.float32))


def encoded(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return stream.getvalue()


def text(kind: str) -> str:
    return base64.b64encode(encoded(Image.fromarray(PIXELS), kind)).decode()


IMAGES = {
    "base64 of png": text("PNG"),
    "base64 of webp": text("WEBP"),
    "base64 in lines": "\n".join(text("PNG")[i : i + 76] for i in range(0, len(text("PNG")), 76)),
    "data URL": f"data:image/png;base64,{text('PNG')}",
    "path is base64": {"bytes": None, "path": text("PNG")},
    "PIL": Image.fromarray(PIXELS),
    "PIL CMYK": Image.fromarray(PIXELS).convert("CMYK"),
    "array": PIXELS,
    "tensor": torch.from_numpy(PIXELS),
}


@pytest.mark.parametrize("value", IMAGES.values(), ids=IMAGES)
def test_an_image_is_what_the_value_says(value: Any) -> None:
    with Row("r", "s", [], {"image": [value]}, {}).open_media("image", 0) as file:
        assert (np.asarray(decode_image(file)) == PIXELS).all()


def test_base64_of_jpeg_begins_like_a_path_and_is_none() -> None:
    assert text("JPEG").startswith("/9j/")
    with Row("r", "s", [], {"image": [text("JPEG")]}, {}).open_media("image", 0) as file:
        assert decode_image(file).size == (8, 8)


@pytest.mark.parametrize("value", [{"array": SOUND, "sampling_rate": 16000, "path": None}, Waveform(SOUND, 16000)])
def test_a_sound_is_its_samples_at_their_rate(value: Any) -> None:
    with Row("r", "s", [], {"audio": [value]}, {}).open_media("audio", 0) as file:
        heard = decode_audio(file)
    assert heard.rate == 16000 and (heard.samples == SOUND).all()


@pytest.mark.parametrize(
    ("modality", "value", "problem"),
    [
        ("image", PIXELS / 255, r"image 1: found an array of float64 \[8, 8, 3\]; expected pixels \(uint8"),
        ("audio", {"array": SOUND}, r"audio 1: found a sound of \[400\] samples at None Hz; expected \{array"),
        ("image", "data:image/png", r"image 1: found 'data:image/png'; expected data:TYPE;base64,CONTENT"),
        ("image", "a" * 64, r"image 1 cannot be read from its file: .*No such file"),  # a path without a suffix
    ],
)
def test_another_value_is_refused_with_what_is_expected(modality: str, value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem), Row("r", "s", [], {modality: [value]}, {}).open_media(modality, 0):
        pass


def test_columns_and_parts_of_files_and_of_python_rows_have_them(tmp_path: Path) -> None:
    asked = {"type": "text", "text": "what is it"}
    said = {"role": "assistant", "content": "cat"}
    in_column = {"messages": [{"role": "user", "content": [{"type": "image"}, asked]}, said]}
    in_part = [{"role": "user", "content": [{"type": "image", "image": None}, asked]}, said]
    of_image = base64.b64encode(png(0)).decode()
    in_part[0]["content"][0]["image"] = of_image
    lines = [in_column | {"images": [of_image]}, {"messages": in_part, "images": []}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = DataSource(path=str(tmp_path / "rows.jsonl"), columns=Columns(), media_folder=str(tmp_path))
    (rows,) = open_sources([source])
    processor, image = tiny_processor(tiny_model()), Image.open(io.BytesIO(png(0)))
    in_python = [in_column | {"images": [image]}, in_column | {"images": np.asarray(image.convert("RGB"))}]
    loader = build_dataloader(in_python, processor, micro_batch_size=2, shuffle=False)
    ((pack,),) = list(loader)
    expected = processor.sample(Row("r", "s", in_column["messages"], {"image": [png(0)]}, {}))
    assert not isinstance(expected, Rejected) and not loader.rejected
    of_item = expected.spans[0].item.features
    for row in rows:
        sample = processor.sample(row)
        assert not isinstance(sample, Rejected) and (sample.input_ids == expected.input_ids).all()
        assert all((sample.spans[0].item.features[name] == array).all() for name, array in of_item.items())
    assert pack.info.lengths == (len(expected),) * 2
    in_pack = pack.inputs["image_encoder"].groups[0].features
    assert all((np.asarray(in_pack[name]) == np.concatenate([array] * 2)).all() for name, array in of_item.items())
