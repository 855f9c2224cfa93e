"""Each picture of a video has the time that its file gives it, for HF processors that tell time in different ways."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import ProcessorMixin
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from tests.films import STEP, film
from tests.tiny_processors import FAMILIES, TinyVideoProcessor, processor_class, qwen2_vl

CLIPS = {
    "10 fps": [i / 10 for i in range(40)],
    "2 fps": [i / 2 for i in range(12)],
    "1 fps": [float(i) for i in range(8)],
    "variable": [*(i / 10 for i in range(21)), 5.0, 9.0, *(18 + i / 5 for i in range(8))],
    "late": [0.7 + i / 10 for i in range(20)],
}


def qwen2_5_vl() -> tuple[ProcessorMixin, NativeInputs]:
    """As Qwen2-VL, with the seconds of a grid step."""
    made, native = qwen2_vl()
    parts = (made.image_processor, made.tokenizer, made.video_processor)
    return processor_class(Qwen2_5_VLProcessor)(*parts, chat_template=made.chat_template), native


class Choosing(TinyVideoProcessor):
    """Chooses frames as transformers' base class does."""

    fps, num_frames, min_frames, max_frames = 2, None, 4, 768
    temporal_patch_size = 2
    size = {"shortest_edge": 16, "longest_edge": 1 << 20}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Any] = []

    def sample_frames(self, metadata: VideoMetadata, num_frames: int | None = None, fps: Any = None, **_: Any) -> Any:
        num_frames = num_frames or self.num_frames
        return default_sample_indices_fn(metadata, num_frames, fps or self.fps)

    def get_num_of_video_patches(self, frames: int, height: int, width: int, kwargs: dict[str, Any]) -> int:
        """The limit is for all frames, as in Qwen3-VL."""
        return int(kwargs["size"]["longest_edge"] / frames / 4) * (frames // 2)

    def __call__(self, videos: Any, **kwargs: Any) -> Any:
        self.sizes.append(kwargs.get("size"))
        return super().__call__(videos, **kwargs)


def row(data: bytes, *others: bytes, **keys: Any) -> Row:
    shown = [{"type": "video"} for _ in (data, *others)]
    messages = [
        {"role": "user", "content": [*shown, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "x"},
    ]
    return Row(
        "r", "s", messages, {"image": [], "audio": [], "video": [{"bytes": one} | keys for one in (data, *others)]}, {}
    )


def sample_of(made: tuple[ProcessorMixin, NativeInputs], shown: Row, **options: Any) -> Sample:
    sample = OmniProcessor(TemplateRenderer(*made, **options), {}, {}).sample(shown)
    assert isinstance(sample, Sample), sample
    return sample


def pictures(sample: Sample, span: int = 0) -> list[tuple[int, int]]:
    """Which two pictures each grid step shows, by their grey."""
    features = sample.spans[span].item.features
    steps, height, width = features["video_grid_thw"].reshape(3)
    patches = features["pixel_values_videos"].reshape(steps, height * width, 3, 2, -1)
    greys = np.rint(patches[:, 0, 0, :, 0] * 255 / STEP).astype(int)
    return [(int(first), int(second)) for first, second in greys]


def told(family: str, made: tuple[ProcessorMixin, NativeInputs], sample: Sample) -> list[float]:
    """When each grid step begins, in seconds, as the processor tells the model; Qwen3-VL tells the middle."""
    features, text = sample.spans[0].item.features, made[0].tokenizer.decode(sample.input_ids)
    steps = int(features["video_grid_thw"].reshape(3)[0])
    if family == "qwen3_vl":
        return [float(second) for second in re.findall(r"<([\d.]+) seconds>", text)]
    if family == "glm4v":
        return [float(second) for second in re.findall(r"<\|end_of_image\|>(\d+)", text)]
    (step,) = {float(np.ravel(value)[0]) for name, value in features.items() if "second" in name}
    return [index * step for index in range(steps)]


MADE: dict[str, Callable[[], tuple[ProcessorMixin, NativeInputs]]] = {
    "qwen2_5_vl": qwen2_5_vl,
    **{name: FAMILIES[name] for name in ("qwen3_vl", "glm4v", "qwen2_5_omni", "qwen3_omni")},
}


@pytest.mark.parametrize("clip", sorted(CLIPS))
@pytest.mark.parametrize("family", sorted(MADE))
def test_the_time_of_each_picture_is_that_of_the_file(family: str, clip: str) -> None:
    made, times = MADE[family](), np.array(CLIPS[clip])
    sample = sample_of(made, row(film(times.tolist())))
    seconds = times - times[0]
    shown, said = pictures(sample), told(family, made, sample)
    assert len(shown) == len(said) == -(-len(times) // 2)
    for (first, second), time in zip(shown, said, strict=True):
        if family == "qwen3_vl":
            assert time == pytest.approx((seconds[first] + seconds[second]) / 2, abs=0.051)
        elif family == "glm4v":
            assert time == int(seconds[first])
        else:  # times are even steps: no other picture of the file is nearer
            assert abs(seconds[first] - time) <= np.abs(seconds - time).min() + 0.01
    if clip != "variable":
        assert [index for pair in shown for index in pair][: len(times)] == list(range(len(times)))


def choosing(family: str = "qwen3_vl", **own: Any) -> tuple[ProcessorMixin, NativeInputs]:
    made, native = MADE[family]()
    made.video_processor = Choosing()
    for name, value in own.items():
        setattr(made.video_processor, name, value)
    return made, native


@pytest.mark.parametrize(
    ("options", "keys", "expected"),
    [
        ({}, {}, 8),  # 4 s at the processor's own 2 fps
        ({"fps": 5}, {}, 20),
        ({"fps": 30}, {}, 40),
        ({"max_frames": 6}, {}, 6),
        ({"arguments": {"videos_kwargs": {"fps": 1}}}, {}, 4),
        ({"fps": 5}, {"fps": 1}, 4),
        ({"fps": 5, "max_frames": 6}, {"nframes": 10}, 10),
        ({"arguments": {"videos_kwargs": {"do_sample_frames": False}}}, {}, 8),
    ],
    ids=str,
)
def test_a_rate_comes_from_the_part_then_the_recipe_then_the_processor(
    options: dict[str, Any], keys: dict[str, Any], expected: int
) -> None:
    times = CLIPS["10 fps"]
    sample = sample_of(choosing(), row(film(times), **keys), **options)
    shown = [index for pair in pictures(sample) for index in pair]
    assert len(shown) == expected
    spacing = np.diff(shown)
    assert spacing.max() - spacing.min() <= 1 and shown[0] == 0


def test_a_processor_without_a_rate_of_its_own_gets_two_frames_of_a_second() -> None:
    assert len(pictures(sample_of(choosing(fps=None), row(film(CLIPS["10 fps"]))))) == 4
    assert len(pictures(sample_of(choosing(fps=None, num_frames=6), row(film(CLIPS["10 fps"]))))) == 3


def test_a_part_of_a_video_keeps_the_seconds_of_the_whole() -> None:
    made = MADE["qwen3_vl"]()
    sample = sample_of(made, row(film(CLIPS["10 fps"]), video_start=1.0, video_end=1.7))
    assert pictures(sample) == [(10, 11), (12, 13), (14, 15), (16, 17)]
    assert told("qwen3_vl", made, sample) == pytest.approx([1.05, 1.25, 1.45, 1.65], abs=0.051)


def test_videos_of_different_rates_each_have_their_own() -> None:
    made = MADE["qwen2_5_omni"]()
    sample = sample_of(made, row(film(CLIPS["10 fps"]), film(CLIPS["1 fps"])))
    steps = [float(np.ravel(span.item.features["video_second_per_grid"])[0]) for span in sample.spans]
    assert steps == pytest.approx([0.2, 2.0])


def test_a_limit_that_lowers_the_rate_is_told() -> None:
    clip = film(CLIPS["10 fps"])
    assert [sample_of(choosing(), row(clip), **options).num_lowered for options in ({}, {"max_frames": 4})] == [0, 1]
    assert sample_of(choosing(max_frames=4), row(clip)).num_lowered == 1
    assert sample_of(choosing(), row(clip, nframes=4)).num_lowered == 0
    assert sample_of(MADE["qwen3_vl"](), row(clip), max_frames=39).num_lowered == 0
    assert sample_of(MADE["qwen3_vl"](), row(clip), max_frames=20).num_lowered == 1


def test_limits_of_pixels_are_those_of_each_frame() -> None:
    made = choosing()
    sample_of(made, row(film(CLIPS["10 fps"])), max_pixels=4096)
    sample_of(made, row(film(CLIPS["10 fps"]), min_pixels=64), max_pixels=4096)
    sizes = [size for size in made[0].video_processor.sizes if size]
    assert sizes[0] == {"shortest_edge": 16, "longest_edge": 8 * 4096}
    assert sizes[-1] == {"shortest_edge": 8 * 64, "longest_edge": 8 * 4096}


def test_each_image_of_a_conversation_may_have_limits_of_its_own() -> None:
    shown = Image.fromarray(np.zeros((16, 16, 3), np.uint8))
    stream = io.BytesIO()
    shown.save(stream, "PNG")
    files = [{"bytes": stream.getvalue()} | limits for limits in ({}, {"max_pixels": 64}, {"min_pixels": 1024})]
    asked = [*({"type": "image"} for _ in files), {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "x"}]
    media = {"image": files, "audio": [], "video": []}
    sample = sample_of(FAMILIES["qwen2_vl"](), Row("r", "s", messages, media, {}), max_pixels=144)
    grids = [span.item.features["image_grid_thw"].reshape(3).tolist() for span in sample.spans]
    assert grids == [[1, 6, 6], [1, 4, 4], [1, 16, 16]]  # patches of 2 x 2 pixels
    with pytest.raises(UserError, match="max_pixels: TinyVideoProcessor does not choose the size"):
        sample_of(FAMILIES["qwen2_vl"](), row(film([0.0, 1.0])), max_pixels=144)


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (
            choosing(sample_frames=lambda metadata, **_: [0, 1]),
            {"fps": 1},
            "fps: Choosing chooses frames without a rate",
        ),
        (FAMILIES["internvl"](), {"max_pixels": 99}, "max_pixels: GotOcr2ImageProcessorPil does not choose the size"),
        (choosing(), {"min_pixels": 99, "max_pixels": 9}, "min_pixels 99 is above max_pixels 9"),
    ],
    ids=["rate", "tiles", "order"],
)
def test_a_key_that_the_processor_does_not_read_is_named(made: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TemplateRenderer(*made, **options)


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
@pytest.mark.parametrize("heard", [(0.0, 4.0), (1.5, 4.0)], ids=["whole", "late"])
def test_sound_and_pictures_of_one_moment_are_side_by_side(family: str, heard: tuple[float, float]) -> None:
    made = MADE[family]()
    clip = film(CLIPS["10 fps"], heard=heard, click=2.0)
    sample = sample_of(made, row(clip), audio_in_video=True)
    seen, listened = (span.positions for span in sample.spans)
    seconds = 4.0 / len(listened)  # of a token of sound
    chunk = {"qwen2_5_omni": 2.0, "qwen3_omni": seconds}[family]  # within which the processor puts pictures first
    per_step = len(seen) // 20
    for step, time in enumerate(told(family, made, sample)):
        before = np.searchsorted(listened, seen[step * per_step]) * seconds
        assert time - chunk - 0.1 <= before <= time + 0.1
    loudest = sample.spans[1].item.features["input_features"][0].mean(axis=0).argmax() / 100
    assert loudest == pytest.approx(2.0, abs=0.03)


def test_a_film_that_is_cut_costs_its_row() -> None:
    clip = film(CLIPS["10 fps"])
    cut = OmniProcessor(TemplateRenderer(*MADE["qwen3_vl"]()), {}, {}).sample(row(clip[: len(clip) * 6 // 10]))
    assert isinstance(cut, Rejected) and "the file is cut" in cut.reason
