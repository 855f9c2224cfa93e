"""Ten thousand random conversations: tokens, loss masks and media are those of a reference (``conversations``)."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from omnitrain.data.packing.sample import Sample
from omnitrain.data.render import expansion
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.clips import Clip, evenly
from omnitrain.data.sources.media import MediaFile, decode_audio, decode_clip, decode_image, decode_medium
from omnitrain.data.sources.rows import Row
from tests.data.chat.tool_templates import SPECIAL, TEMPLATES, TURNS
from tests.data.render.conversations import Fuzzer, expected, parts_of
from tests.tiny import part, tiny_model, tiny_processor
from tests.tiny_processors import FAMILIES, ROWS, byte_tokenizer

MEDIA = ["<|image|>", "<|audio|>", "<|video|>"]


@functools.cache
def adapters() -> Any:
    return tiny_model().media_adapters()


@functools.cache
def with_tools(family: str) -> OmniProcessor:
    owner = byte_tokenizer([*SPECIAL, *MEDIA, "<|end|>"], bos_token="<s>", eos_token="</s>")
    owner.chat_template = TEMPLATES[family]
    return OmniProcessor(TemplateRenderer(owner), *adapters())


@functools.cache
def features_of(modality: str, data: bytes, is_written: bool) -> tuple[str, dict[str, np.ndarray], int]:
    """Component, features and number of tokens of a file."""
    readers, writers = adapters()
    (found,) = [(n, a) for n, a in (writers if is_written else readers).items() if modality in a.modalities]
    name, adapter = found
    medium = decode_medium(modality, MediaFile.of(data), evenly(adapter.max_frames))
    return name, *adapter.prepare(modality, medium.frames if isinstance(medium, Clip) else medium)


def size_of(modality: str, data: bytes, is_written: bool) -> tuple[str, int]:
    return f"<|{modality}|>", features_of(modality, data, is_written)[2]


def check_with_tools(family: str, number: int) -> None:
    fuzzer = Fuzzer(random.Random(number), ("image", "audio", "video"), ("image", "audio"))
    row, processor = fuzzer.row(number), with_tools(family)
    sample = processor.sample(row, may_ask=True)
    assert isinstance(sample, Sample), (row.messages, sample)
    told = expected(
        row, processor.tokenizer, TURNS[family], size_of, text_arguments=family == "deepseek", parts=family == "gemma"
    )
    assert sample.input_ids.tolist() == told.ids
    np.testing.assert_array_equal(sample.loss_mask, told.mask)
    assert [span.positions.tolist() for span in sample.spans] == told.media
    for span, held in zip(sample.spans, told.files, strict=True):
        name, features, _ = features_of(*held)
        assert (span.component, span.is_target) == (name, held[2])
        assert all(np.array_equal(span.item.features[key], value) for key, value in features.items())


NATIVE = {
    **dict.fromkeys(("qwen2_vl", "qwen3_vl"), ("image", "video")),
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni"), ("image", "audio", "video")),
    "qwen2_audio": ("audio",),
    **dict.fromkeys(("gemma3", "internvl", "llava"), ("image",)),
}
NATIVE_TURNS = dict.fromkeys(NATIVE, r"<\|im_start\|>assistantĊ(.*?<\|im_end\|>)") | {
    "llava": r"ASSISTANT:(.*?</s>)",
    "gemma3": r"<start_of_turn>modelĊ(.*?<end_of_turn>)",
}


@functools.cache
def native(family: str) -> tuple[Any, Any, OmniProcessor]:
    made, inputs = FAMILIES[family]()
    return made, inputs, OmniProcessor(TemplateRenderer(made, inputs), {}, {})


def by_transformers(made: Any, row: Row) -> dict[str, np.ndarray]:
    """What transformers makes of the whole conversation in one call."""
    waiting = {modality: map(functools.partial(decoded, modality), files) for modality, files in row.media.items()}
    messages, details = [], []
    for message in row.messages:
        content = parts_of(message) or [part("text", message["content"] or "")]
        shown = [
            {"type": "text", "text": p["text"]}
            if p["type"] == "text"
            else {"type": p["type"], p["type"]: next(waiting[p["type"]])}
            for p in content
        ]
        details += [p["video"][1] for p in shown if "video" in p]
        shown = [p | {"video": p["video"][0]} if "video" in p else p for p in shown]
        messages.append({"role": message["role"], "content": shown})
    options: dict[str, Any] = {"return_tensors": "pt"} | ({"video_metadata": [details]} if details else {})
    if details:
        options["videos_kwargs"] = {"fps": details[0]["fps"]}
    whole = made.apply_chat_template(messages, tokenize=True, return_dict=True, processor_kwargs=options)
    return {name: np.asarray(value) for name, value in whole.items()}


@functools.cache
def decoded(modality: str, data: bytes) -> Any:
    file = MediaFile.of(data)
    if modality == "video":
        clip = decode_clip(file, 99)
        frames = np.stack([np.asarray(frame) for frame in clip.frames])
        return frames, expansion.video_metadata(clip)
    return decode_image(file) if modality == "image" else decode_audio(file).resampled(16_000).samples


def check_native(family: str, number: int) -> None:
    made, inputs, processor = native(family)
    fuzzer = Fuzzer(random.Random(number), NATIVE[family], spells=False, tools=False, system=family != "llava")
    row = fuzzer.row(number)
    sample = processor.sample(row, may_ask=True)
    assert isinstance(sample, Sample), (row.messages, sample)
    told = by_transformers(made, row)
    assert sample.input_ids.tolist() == told["input_ids"][0].tolist()
    pieces = processor.tokenizer.convert_ids_to_tokens(sample.input_ids.tolist())
    starts = np.cumsum([0, *map(len, pieces[:-1])])
    spans = [match.span(1) for match in re.finditer(NATIVE_TURNS[family], "".join(pieces))]
    weights = [message.get("weight") for message in row.messages if message["role"] == "assistant"]
    assert len(spans) == len(weights)
    kept = [span for span, weight in zip(spans, weights, strict=True) if weight is None or weight]
    assert sample.loss_mask.tolist() == [any(a <= start < b for a, b in kept) for start in starts]
    placeholders = np.flatnonzero(np.isin(sample.input_ids, list(inputs.placeholders.values())))
    filled = [position for span in sample.spans for position in span.positions.tolist()]
    assert sorted(filled) == placeholders.tolist()
    shown = [f"foundation.{p['type']}" for message in row.messages for p in parts_of(message) if p["type"] != "text"]
    assert [span.component for span in sample.spans] == shown
    features: dict[str, list[np.ndarray]] = {}
    for span in sample.spans:
        for name, values in span.item.features.items():
            features.setdefault(name, []).append(values)
        if family in ROWS:
            assert ROWS[family](span.component.removeprefix("foundation."), span.item.features) == len(span.positions)
    for name, items in features.items():
        if {values.shape[1:] for values in items} == {told[name].shape[1:]}:  # others are padded by transformers
            np.testing.assert_array_equal(np.concatenate(items), told[name])


def check_format_of_ones_own(number: int) -> None:
    """Each text is its bytes, whatever control tokens it spells."""
    fuzzer = Fuzzer(random.Random(number), ("image", "audio", "video"), ("image", "audio"), tools=False)
    row, processor = fuzzer.row(number), own_format()
    sample = processor.sample(row, may_ask=True)
    assert isinstance(sample, Sample), (row.messages, sample)
    token, waiting = processor.tokenizer.convert_tokens_to_ids, {m: iter(files) for m, files in row.media.items()}
    ids: list[int] = []
    mask: list[bool] = []
    media: list[list[int]] = []
    for message in row.messages:
        is_written = message["role"] == "assistant"
        is_trained = is_written and message.get("weight") in (None, 1)
        ids, mask = [*ids, token(f"<|{message['role']}|>")], [*mask, False]
        for p in parts_of(message) or [part("text", message["content"] or "")]:
            if p["type"] == "text":
                new = [token(bytes_to_unicode()[byte]) for byte in p["text"].encode()]
                ids, mask = ids + new, mask + [is_trained] * len(new)
                continue
            start, size = size_of(p["type"], next(waiting[p["type"]]), is_written)
            media.append(list(range(len(ids) + 1, len(ids) + 1 + size)))
            ids, mask = ids + [token(start)] * (1 + size), [*mask, is_written] + [False] * size
        ids, mask = [*ids, token("<|end|>")], [*mask, is_trained]
    assert sample.input_ids.tolist() == ids and sample.loss_mask.tolist() == mask
    assert [span.positions.tolist() for span in sample.spans] == media


@functools.cache
def own_format() -> OmniProcessor:
    return tiny_processor(tiny_model())


CHECKS = [*(functools.partial(check_with_tools, family) for family in sorted(TEMPLATES))]
CHECKS += [*(functools.partial(check_native, family) for family in sorted(NATIVE)), check_format_of_ones_own]


@pytest.mark.parametrize("check", CHECKS, ids=[*sorted(TEMPLATES), *sorted(NATIVE), "own"])
def test_tokens_masks_and_media_are_those_of_the_reference(check: Callable[[int], None]) -> None:
    for number in range(10):
        check(number)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=[*sorted(TEMPLATES), *sorted(NATIVE), "own"])
def test_tokens_masks_and_media_of_ten_thousand_conversations(check: Callable[[int], None]) -> None:
    for number in range(10, 10 + 10_000 // len(CHECKS)):
        check(number)
