"""Videos with their sound, from messages to logits, against transformers' processor and model on the same files."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel, ProcessorMixin

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render import expansion
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.media import MediaFile, Waveform, decode_audio, decode_clip
from omnitrain.data.sources.rows import Row
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from tests.families import FAMILIES
from tests.films import film
from tests.models.plain import our_logits
from tests.tiny import part, wav, webp
from tests.tiny_processors import qwen2_5_omni

SOUND = Waveform(np.sin(np.arange(20_000, dtype=np.float32) ** 1.1), 16_000)
TOKENS = ("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id", "vision_end_token_id")
TOKENS += ("audio_start_token_id", "audio_end_token_id")  # ids 2, 3, ... of the tiny processor


def models() -> tuple[PreTrainedModel, OmniModel, ProcessorMixin]:
    """The thinker as it is, the same one as omnitrain trains it, and the family's processor."""
    config = FAMILIES["qwen2_5_omni_thinker"]().to_dict()
    config["text_config"]["vocab_size"] = 272
    config["vision_config"] |= {"patch_size": 2, "window_size": 8}
    config["audio_config"]["num_mel_bins"] = 8
    config |= {name: 2 + place for place, name in enumerate(TOKENS)}
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    model = foundation_class(config)(config)
    init_peaked_(model)
    plain = copy.deepcopy(model).eval()
    return plain, build_omni_model(foundation=model).eval(), qwen2_5_omni()[0]


def conversation(*shown: str) -> Row:
    """A question about these media in this order, and its answer."""
    asked = [part(modality) for modality in shown] + [part("text", "what?")]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": [part("text", "so")]}]
    videos = [webp(i, 4 + 2 * i) for i in range(shown.count("video"))]
    clips = [wav(i, 0.5) for i in range(shown.count("audio"))]
    return Row(" ".join(shown), "s", messages, {"image": [], "audio": clips, "video": videos}, {})


def by_transformers(processor: ProcessorMixin, row: Row) -> dict[str, Any]:
    """The processor's own output for the whole conversation, videos mixed with their sound."""
    asked = [p["type"] for p in row.messages[0]["content"]]
    clips = [decode_clip(MediaFile.of(data), 99) for data in row.media["video"]]
    own = iter([decode_audio(MediaFile.of(data)).resampled(16_000).samples for data in row.media["audio"]])
    heard = [next(own) if kind == "audio" else SOUND.samples for kind in asked if kind != "text"]
    videos = iter(range(len(clips)))
    sources = [None if kind == "audio" else next(videos) for kind in asked if kind != "text"]
    frames = [np.stack([np.asarray(frame) for frame in clip.frames]) for clip in clips]
    output = processor(
        text=[processor.apply_chat_template(row.messages, tokenize=False)],
        videos=[frames],
        video_metadata=[[expansion.video_metadata(clip) for clip in clips]],
        videos_kwargs={"fps": clips[0].rate},
        audio=heard,
        sampling_rate=16_000,
        load_audio_from_video=True,
        audio_from_video_indices=sources,
        return_tensors="pt",
    )
    return {name: torch.as_tensor(value) for name, value in output.items()}


@torch.no_grad()
@pytest.mark.parametrize("shown", [("video",), ("video", "audio"), ("audio", "video", "video")], ids=" ".join)
def test_a_video_with_its_sound_has_the_positions_rows_and_logits_of_transformers(
    shown: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expansion, "decode_soundtrack", lambda data: SOUND)
    plain, ours, made = models()
    processor = OmniProcessor(TemplateRenderer(made, ours.native_inputs, audio_in_video=True), {}, {})
    row = conversation(*shown)
    inputs = by_transformers(made, row)
    sample = processor.sample(row)
    assert isinstance(sample, Sample), sample
    assert sample.input_ids.tolist() == inputs["input_ids"][0].tolist()

    positions = {}
    for mixes in (True, False):
        lengths = inputs["feature_attention_mask"].sum(-1)
        times = inputs["video_second_per_grid"]
        positions[mixes] = plain.get_rope_index(
            inputs["input_ids"], None, inputs["video_grid_thw"], inputs["attention_mask"], mixes, lengths, times
        )[0][:, 0]
    assert torch.equal(torch.from_numpy(sample.position_ids), positions[True].long())
    assert not torch.equal(positions[True], positions[False])

    expected = plain(**inputs, use_audio_in_video=True, use_cache=False).logits[0]
    (alone,) = our_logits(ours, Pack.from_samples([sample])).values()
    assert (alone - expected).abs().max() <= 1e-5 * expected.abs().max()
    other = processor.sample(conversation("video", "audio", "video"), index=1)
    together = our_logits(ours, Pack.from_samples([sample, other]))[sample.index]
    assert (together - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("begins", [0.0, 1.5])
def test_positions_tell_when_pictures_and_sound_are_seen_and_heard(begins: float) -> None:
    """Of a film of 4 s at 10 fps, whose click at 2 s is heard beside the picture of that time."""
    _, ours, made = models()
    processor = OmniProcessor(TemplateRenderer(made, ours.native_inputs, audio_in_video=True), {}, {})
    clip = film([index / 10 for index in range(40)], heard=(begins, 4.0), click=2.0)
    row = replace(conversation("video"), media={"image": [], "audio": [], "video": [clip]})
    sample = processor.sample(row)
    assert isinstance(sample, Sample), sample
    seen, heard = (sample.position_ids[0, span.positions] for span in sample.spans)
    start, per_second = seen[0], ours.foundation.config.position_id_per_seconds
    steps = (seen.reshape(20, -1) - start) / per_second
    np.testing.assert_allclose(steps, np.arange(20)[:, None].repeat(steps.shape[1], 1) * 0.2, atol=1 / per_second)
    np.testing.assert_allclose((heard - start) / per_second, np.arange(len(heard)) / 25, atol=1 / per_second)
    loud = sample.spans[1].item.features["input_features"][0].mean(axis=0).argmax() / 100
    at_click = heard[min(len(heard) - 1, round(loud * 25))]
    assert abs(np.abs(seen - at_click).argmin() // steps.shape[1] * 0.2 - 2.0) <= 0.2
