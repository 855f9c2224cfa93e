"""Run a HF processor on one medium: it gives the text with placeholders, and the features."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase, ProcessorMixin
from transformers.processing_utils import OmniModalProcessorMixin

from omnitrain.data.packing.sample import Features
from omnitrain.data.render.hf_visuals import FrameChoice, pixel_arguments
from omnitrain.data.sources.clips import Clip
from omnitrain.data.sources.media import (
    MediaFile,
    costing_one_row,
    decode_audio,
    decode_clip,
    decode_image,
    decode_soundtrack,
)
from omnitrain.data.sources.reading import Reading
from omnitrain.errors import UserError

# Names of per-token arguments that processors make, in addition to the outputs of their tokenizer.
_PER_TOKEN = {"mm_token_type_ids", "token_type_ids"}
_KEPT_TEXTS = 128
_ANY_TEXT = "any text"
_MAX_DROPPED_SECONDS = 0.1  # the end of a clip that fills no whole frame is at most this long
_ARGUMENT = {"image": "images", "audio": "audio", "video": "videos"}
_GROUP = {"image": "images_kwargs", "video": "videos_kwargs"}


@dataclass(frozen=True)
class Medium:
    """A decoded image, sound or video, as a HF processor takes it."""

    modality: str
    value: Any  # an RGB ``PIL.Image``, a sound ``[samples]`` float32, or a video ``[frames, height, width, 3]`` uint8
    metadata: Mapping[str, Any] | None = None  # of transformers' VideoMetadata, if the times of a video are known
    sound: np.ndarray | None = None  # [samples] float32, of a video that is read with it, from its first frame on
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the image or video processor for this medium
    is_lowered: bool = False  # a limit of frames lowered the rate at which a video is read


@dataclass(frozen=True)
class Expansion:
    """The output of a processor for one medium."""

    text: str  # with placeholders; it replaces the template's text for the medium
    features: dict[str, Features]  # modality -> arguments of the forward; two modalities for a video with sound
    token_inputs: frozenset[str]  # names of the per-token types that the processor returns


class MediaExpander:
    """Calls a HF processor for one medium at a time. ``tokens``: modality -> what the chat template writes for one."""

    def __init__(
        self,
        processor: ProcessorMixin,
        modalities: frozenset[str],
        *,
        arguments: Mapping[str, Any],
        audio_in_video: bool,
        reading: Reading,
    ) -> None:
        """Check the processor; UserError: it lacks a modality's token, or cannot read as it should."""
        self._processor, self.name = processor, type(processor).__name__
        self._arguments = {**arguments, "return_tensors": "pt"}
        self._audio_in_video, self._reading = audio_in_video, reading
        self._kept: dict[str, BatchEncoding] = {}
        self.tokens = shown_by(processor, modalities)
        if missing := sorted(modalities - self.tokens.keys()):
            raise UserError(
                f"{self.name} has no token for {missing}, which the foundation reads; set data.processor to the "
                "processor of the foundation"
            )
        if audio_in_video and not isinstance(processor, OmniModalProcessorMixin):
            raise UserError(f"data.audio_in_video: {self.name} cannot read videos with their sound; remove the setting")
        if "video" in modalities:
            self.frame_choice(None).choose()
        self._require_read(reading, sorted(_GROUP.keys() & modalities))

    def _require_read(self, reading: Reading, modalities: Sequence[str]) -> None:
        """Raise for limits of pixels that the processor reads of none of its modalities."""
        problems = []
        for modality in modalities:
            try:
                self._pixel_arguments(modality, reading, num_frames=2 * (modality == "video"))
            except UserError as error:
                problems.append(error)
        if problems and len(problems) == len(modalities):
            raise problems[0]

    def decode(self, modality: str, file: MediaFile) -> Medium:
        """Decode the medium of an encoded file; ValueError: it is damaged."""
        if modality == "audio":
            return Medium("audio", decode_audio(file).resampled(self._sampling_rate).samples)
        reading = file.reading.over(self._reading)
        if modality == "image":
            return Medium("image", decode_image(file), arguments=self._pixel_arguments("image", reading))
        choice = self.frame_choice(file)
        clip = decode_clip(file, choice.choose())
        track = decode_soundtrack(file) if self._audio_in_video else None
        return Medium(
            "video",
            np.stack([np.asarray(frame) for frame in clip.frames]),
            video_metadata(clip),
            None if track is None else track.resampled(self._sampling_rate).samples,
            {
                "do_sample_frames": False,
                **({} if clip.rate is None else {"fps": clip.rate}),
                **self._pixel_arguments("video", reading, len(clip.frames)),
            },
            choice.is_lowered(clip),
        )

    def frame_choice(self, file: MediaFile | None) -> FrameChoice:
        """Return how the processor chooses the frames of a video; None: of any."""
        reading = self._reading if file is None else file.reading.over(self._reading)
        component = getattr(self._processor, "video_processor", None)
        return FrameChoice(component, self._arguments.get("videos_kwargs", {}), reading)

    def _pixel_arguments(self, modality: str, reading: Reading, num_frames: int = 0) -> dict[str, Any]:
        component = getattr(self._processor, f"{modality}_processor", None)
        return pixel_arguments(component, self._arguments.get(_GROUP[modality], {}), reading, num_frames)

    def expand(self, medium: Medium) -> Expansion:
        """Run the processor on ``medium`` alone; ValueError: the processor refuses the medium, or would cut it."""
        with costing_one_row(f"{self.name} cannot prepare this {medium.modality}"):
            output, text, per_token = self.run(self.tokens[medium.modality], [medium])
        text = text.removeprefix(self.around[0]).removesuffix(self.around[1])
        if not text:
            raise ValueError(f"{self.name} makes no tokens for this {medium.modality}: it is too short or too small")
        features = {name: np.asarray(value) for name, value in output.items() if name not in per_token}
        by_modality = {medium.modality: features}
        if medium.sound is not None:
            sound = self.expand(Medium("audio", medium.sound)).features["audio"]
            pictures = {name: value for name, value in features.items() if name not in sound}
            by_modality = {"video": pictures, "audio": sound}
        elif medium.modality == "audio":
            self._check_uncut([medium.value], features)
        return Expansion(text, by_modality, frozenset(_PER_TOKEN & output.keys()))

    @cached_property
    def around(self) -> tuple[str, str]:
        """The texts that the processor puts before and after every text, and no argument turns off; most put none."""
        try:
            before, _, after = self.run(_ANY_TEXT, [])[1].partition(_ANY_TEXT)
        except Exception:  # each class fails differently where it needs media
            return "", ""
        return before, after

    def require_uncut(self, media: Sequence[Medium], output: Mapping[str, Any]) -> None:
        """Raise ValueError if the processor cut any sound. ``output`` is its output for all ``media``."""
        clips = [medium.value for medium in media if medium.modality == "audio"]
        if clips:
            names = getattr(self._audio_extractor, "model_input_names", ())
            self._check_uncut(clips, {name: np.asarray(output[name]) for name in names if name in output})

    def run(self, text: str, media: Sequence[Medium]) -> tuple[Mapping[str, Any], str, set[str]]:
        """Run the processor; return its output, the text that its tokenizer got, and names of per-token outputs."""
        bos = self._processor.tokenizer.bos_token
        options = {**self._arguments, **self._media_arguments(media)}
        with _recorded(self._processor, self._kept) as recorder:
            output = self._processor(text=[text], **options, add_special_tokens=not (bos and text.startswith(bos)))
        return output, recorder.text, recorder.returned | _PER_TOKEN

    def _media_arguments(self, media: Sequence[Medium]) -> dict[str, Any]:
        """Return the arguments of a call that media need, with their keys."""
        arguments: dict[str, Any] = {}
        for medium in media:
            arguments.setdefault(_ARGUMENT[medium.modality], []).append(medium.value)
        for visual in {"images", "videos"} & arguments.keys():
            arguments[visual] = [arguments[visual]]
        videos = [medium for medium in media if medium.modality == "video"]
        if any(video.metadata is not None for video in videos):
            lengths = [len(video.value) for video in videos]
            untimed = [{"total_num_frames": length, "frames_indices": list(range(length))} for length in lengths]
            arguments["video_metadata"] = [[one.metadata or other for one, other in zip(videos, untimed, strict=True)]]
        for modality, group in _GROUP.items():
            if said := shared_arguments([medium for medium in media if medium.modality == modality]):
                arguments[group] = {**self._arguments.get(group, {}), **said}
        arguments |= self._with_sound(media)
        if "audio" in arguments:
            arguments["sampling_rate"] = self._sampling_rate
        return arguments

    def _with_sound(self, media: Sequence[Medium]) -> dict[str, Any]:
        if all(medium.sound is None for medium in media):
            return {}
        sounds: list[np.ndarray] = []
        sources: list[int | None] = []  # index of the video that a sound belongs to
        videos = 0
        for medium in media:
            sound = medium.value if medium.modality == "audio" else medium.sound
            if sound is not None:
                sounds.append(sound)
                sources.append(None if medium.modality == "audio" else videos)
            videos += medium.modality == "video"
        return {"audio": sounds, "load_audio_from_video": True, "audio_from_video_indices": sources}

    @property
    def _audio_extractor(self) -> Any:
        return getattr(self._processor, "audio_processor", None) or self._processor.feature_extractor

    @property
    def _sampling_rate(self) -> int:
        return int(getattr(self._audio_extractor, "sampling_rate", 16_000))

    def _check_uncut(self, clips: Sequence[np.ndarray], features: Features) -> None:
        """Count the frames that the extractor kept, because many cut long clips silently (Whisper's after 30 s)."""
        extractor = self._audio_extractor
        hop, bins = getattr(extractor, "hop_length", None), getattr(extractor, "feature_size", None)
        if hop is None or bins is None:
            return
        rate = self._sampling_rate
        floats = [array for array in features.values() if np.issubdtype(array.dtype, np.floating)]
        largest = max(floats, key=np.size, default=np.zeros(0))
        is_stacked = len(largest) == len(clips)
        kept = largest.size // bins // (len(clips) if is_stacked else 1)
        needed = max(map(len, clips)) if is_stacked else sum(map(len, clips))
        if kept * hop < needed - _MAX_DROPPED_SECONDS * rate:
            raise ValueError(
                f"{type(extractor).__name__} keeps only {kept * hop / rate:.1f} s of an audio of "
                f"{needed / rate:.1f} s; split it"
            )


def shown_by(processor: Any, modalities: Collection[str]) -> dict[str, str]:
    """Return modality -> the text that a HF processor's chat template writes for a medium, if it has one."""
    tokens = {modality: getattr(processor, f"{modality}_token", None) for modality in sorted(modalities)}
    return {modality: str(token) for modality, token in tokens.items() if token is not None}


class _Recorder:
    """A tokenizer that records its input, and keeps the tokens of some texts: media of one size have the same."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kept: dict[str, BatchEncoding]) -> None:
        self._tokenizer, self._kept = tokenizer, kept
        self.text = ""
        self.returned: set[str] = set()

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        key = repr((text, args, kwargs))
        if (output := self._kept.get(key)) is None:
            output = self._tokenizer(text, *args, **kwargs)
            if len(self._kept) < _KEPT_TEXTS:
                self._kept[key] = output
        self.text = text if isinstance(text, str) else text[0]
        self.returned = set(output)
        return BatchEncoding(dict(output), output.encodings)  # the processor may add to it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@contextmanager
def _recorded(processor: ProcessorMixin, kept: dict[str, BatchEncoding]) -> Iterator[_Recorder]:
    tokenizer = processor.tokenizer
    processor.tokenizer = recorder = _Recorder(tokenizer, kept)
    try:
        yield recorder
    finally:
        processor.tokenizer = tokenizer


def has_one_call(media: Sequence[Medium]) -> bool:
    """Whether all images, and all videos, have the same arguments, so that one call can prepare the conversation."""
    arguments = {modality: [one.arguments for one in media if one.modality == modality] for modality in _GROUP}
    return all(one == found[0] for found in arguments.values() for one in found)


def shared_arguments(media: Sequence[Medium]) -> dict[str, Any]:
    """Return the arguments of one call for images, or for videos. A rate is left out if videos have several."""
    shared: dict[str, Any] = {}
    for name in {name for medium in media for name in medium.arguments}:
        values = [medium.arguments.get(name) for medium in media]
        if all(value == values[0] for value in values):
            shared[name] = values[0]
        elif name != "fps":
            raise ValueError("media of one conversation that have different sizes cannot be prepared in one call")
    return shared


def video_metadata(clip: Clip) -> dict[str, Any] | None:
    """Return transformers' ``VideoMetadata`` of the kept frames: `frames_indices` over `fps` are their true seconds."""
    if clip.times is None:
        return None
    num_frames, rate = len(clip.frames), clip.rate or 1.0
    indices = [_index_not_before(time, rate) for time in clip.times]
    return {"total_num_frames": num_frames, "fps": rate, "duration": num_frames / rate, "frames_indices": indices}


def _index_not_before(time: float, rate: float) -> float:
    """Return an index whose ``index / rate`` is not below ``time``, since processors cut off fractions of seconds."""
    index = time * rate
    return index if index / rate >= time else float(np.nextafter(index, np.inf))
