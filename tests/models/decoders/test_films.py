"""A decoder of films: codes or latents of its frames, the files it becomes, and what is refused."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from omnitrain.data.sources.clips import Clip, evenly
from omnitrain.data.sources.media import MediaFile, decode_clip
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import to_tensors
from omnitrain.models.decoders.codec_decoder import CodecDecoder
from omnitrain.models.omni.build import build_omni_model
from omnitrain.recipe import Decoder
from omnitrain.train.evaluate.media_files import write_parts
from omnitrain.train.verbs.answer import Answerer
from omnitrain.train.verbs.chat import Conversation
from tests.models.decoders.continuous import CONTEXT, FLOW
from tests.models.decoders.test_decoders import IMAGE_TOKENIZERS
from tests.tiny import FOUNDATION, MEL_VQ, Row, part, tiny_model, tiny_processor, webp

EMU3 = {"tokenizer": {"config": IMAGE_TOKENIZERS["emu3"]}, "image_size": 8}


def decoder(settings: dict) -> CodecDecoder:
    torch.manual_seed(0)
    return build_omni_model(foundation=FOUNDATION, decoders={"decoder": settings}).decoders["decoder"]


def frames(count: int, side: int = 8) -> list[Image.Image]:
    drawn = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return [Image.fromarray(pixels) for pixels in drawn]


@pytest.mark.parametrize("settings", [EMU3, FLOW, CONTEXT], ids=["codes", "flow head", "in context"])
def test_the_tokens_of_a_film_are_those_of_its_frames(settings: dict) -> None:
    images, films = decoder(settings), decoder(settings | {"num_frames": 3, "fps": 4})
    features, num_tokens = films.adapter().prepare("video", frames(3))
    alone = [images.adapter().prepare("image", frame) for frame in frames(3)]
    assert films.modality == "video" and num_tokens == sum(count for _, count in alone)
    _, labels = films.lm_encode(to_tensors(features), (num_tokens,))
    of_images = torch.cat([images.lm_encode(to_tensors(one), (count,))[1] for one, count in alone])
    channels = slice(None) if labels.ndim == 1 else slice(0, 48)  # noise of the same seed is not that of each frame
    if settings is not CONTEXT:
        assert torch.equal(labels[..., channels], of_images[..., channels])
    tokens = films.codec.encode(to_tensors(features), *[(num_tokens,)] * (settings is EMU3)).tolist()
    assert films.is_complete(tokens) and not films.is_complete(tokens[:-1])
    film = films.lm_generate(tokens)
    assert isinstance(film, Clip) and film.rate == 4 and film.seconds == 0.75
    if settings is not EMU3:
        assert all(np.array_equal(*pair) for pair in zip(film.frames, frames(3), strict=True))


def test_frames_are_evenly_spaced_in_a_longer_film_and_repeat_in_a_shorter_one() -> None:
    adapter = decoder(CONTEXT | {"num_frames": 3}).adapter()
    for count, kept in {3: [0, 1, 2], 5: [0, 2, 4], 2: [0, 0, 1], 1: [0, 0, 0]}.items():
        features, _ = adapter.prepare("video", frames(count))
        expected = np.concatenate(
            [adapter.frames.prepare("image", frames(count)[place])[0]["pixel_values"] for place in kept]
        )
        assert np.array_equal(features["pixel_values"], expected), count


def test_a_row_reads_its_film_evenly_and_no_limit_lowers_it() -> None:
    model = tiny_model(encoders={}, decoders={"film_decoder": CONTEXT | {"num_frames": 3}})
    messages = [{"role": "user", "content": [part("text", "go")]}, {"role": "assistant", "content": [part("video")]}]
    row = Row("0", "films", messages, {"image": [], "audio": [], "video": [webp(1, 9)]}, {})
    sample = tiny_processor(model).sample(row)
    (span,) = sample.spans
    chosen = decode_clip(MediaFile.of(webp(1, 9)), evenly(3)).frames
    expected, _ = model.film_decoder.adapter().prepare("video", chosen)
    assert np.array_equal(span.item.features["pixel_values"], expected["pixel_values"])
    assert span.item.num_tokens == 12 and not span.item.is_lowered and span.item.is_block


@pytest.mark.parametrize("side", [8, 9])
def test_a_film_is_written_as_webp_without_loss_and_as_mp4(tmp_path: Path, side: int) -> None:
    film = Clip(frames(4, side), (0.0, 0.25, 0.5, 0.75), 4, 1.0)
    said, lossless = write_parts(["see", film], tmp_path, "answer")
    read = decode_clip(MediaFile.of(Path(lossless).read_bytes()), 9)
    assert (said, Path(lossless).name, read.rate) == ("see", "answer_1.webp", 4)
    assert all(np.array_equal(*pair) for pair in zip(read.frames, film.frames, strict=True))
    (packed,) = write_parts([film], tmp_path, "answer", "mp4")
    read = decode_clip(MediaFile.of(Path(packed).read_bytes()), 9)
    assert (Path(packed).name, read.rate, read.frames[0].size) == ("answer_0.mp4", 4, (side, side))
    assert len(read.frames) == 4
    conversation = Conversation().answered([said, Path(lossless), Path(packed)])
    assert conversation.media["video"] == [str(lossless), str(packed)]


def test_a_film_that_stands_still_can_be_read_again(tmp_path: Path) -> None:
    film = Clip(frames(1) * 3, (0.0, 0.25, 0.5), 3, 0.75)
    (file,) = write_parts([film], tmp_path, "still")
    assert Image.open(io.BytesIO(Path(file).read_bytes())).n_frames == 1  # equal frames are one in a WebP
    read = decode_clip(MediaFile.of(Path(file).read_bytes()), 9)
    features, _ = decoder(CONTEXT | {"num_frames": 3}).adapter().prepare("video", read.frames)
    assert len(features["pixel_values"]) == 3


def test_what_no_decoder_of_films_can_do_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"num_frames: the frames of a film .* one size, .* writes audio; leave"):
        decoder({"tokenizer": {"config": MEL_VQ}, "num_frames": 2})
    with pytest.raises(UserError, match=r"decoder: num_frames: .* this decoder writes images of several sizes"):
        decoder({"tokenizer": EMU3["tokenizer"], "image_sizes": ["8x8", "8x16"], "num_frames": 2})
    with pytest.raises(UserError, match=r"an image decoder needs image_size, a multiple of 2 .* found 7"):
        decoder(EMU3 | {"image_size": 7, "num_frames": 2})
    with pytest.raises(ValidationError, match=r"num_frames\n.*greater than or equal to 1"):
        Decoder.model_validate(EMU3 | {"num_frames": 0})
    with pytest.raises(ValidationError, match=r"found 4\.0, but without `num_frames` the decoder writes no films"):
        Decoder.model_validate(EMU3 | {"fps": 4.0})
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"an MP4 needs PyAV .*pip install 'omnitrain\[video\]', or write WebP"):
        Answerer("nowhere", films="mp4")
