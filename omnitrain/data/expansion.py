"""One medium through a HF processor: the text that it becomes, and its features."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, ProcessorMixin, processing_utils

from omnitrain.data.media import costing_one_row, decode_audio, decode_clip, decode_image, decode_soundtrack
from omnitrain.data.parts import MediaPart
from omnitrain.data.rows import Row
from omnitrain.data.sample import Features
from omnitrain.errors import UserError

# What processors call the per-token arguments of a forward, beside whatever their tokenizer returns.
_PER_TOKEN = {"mm_token_type_ids", "token_type_ids"}
_UNHEARD_SECONDS = 0.1  # at most this much of a clip's end fills no whole frame
_ARGUMENT = {"image": "images", "audio": "audio", "video": "videos"}


@dataclass(frozen=True)
class Medium:
    """A decoded part, as a HF processor takes it.

    Attributes:
        modality: ``image``, ``audio`` or ``video``.
        value: RGB ``PIL.Image``; ``[samples]`` float32; ``[frames, height, width, 3]`` uint8.
        frame_rate: of a video, where known.
        sound: ``[samples]`` float32 of a video that is read with its sound.
    """

    modality: str
    value: Any
    frame_rate: float | None = None
    sound: np.ndarray | None = None


@dataclass(frozen=True)
class Expansion:
    """What a processor makes of one medium.

    Attributes:
        text: stands in the conversation's text where the template shows the medium.
        features: modality -> arguments of the forward; two modalities for a video with sound.
        token_inputs: names of the per-token types that the processor returns.
    """

    text: str
    features: dict[str, Features]
    token_inputs: frozenset[str]


class MediaExpander:
    """A HF processor, called for one medium at a time.

    Attributes:
        name: of the processor's class.
        tokens: modality -> the text by which the chat template shows a medium.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        modalities: frozenset[str],
        *,
        arguments: Mapping[str, Any],
        audio_in_video: bool,
        max_frames: int,
    ) -> None:
        """Check that the processor knows the modalities.

        Args:
            processor: of the foundation.
            modalities: what the foundation reads.
            arguments: further arguments of every call of ``processor``.
            audio_in_video: read videos together with their sound.
            max_frames: frames decoded from a video at most.

        Raises:
            UserError: the processor has no token for a modality, or cannot read videos with their sound.
        """
        self._processor, self.name = processor, type(processor).__name__
        self._arguments = {**arguments, "return_tensors": "pt"}
        self._audio_in_video, self._max_frames = audio_in_video, max_frames
        self.tokens = shown_by(processor, modalities)
        if missing := sorted(modalities - self.tokens.keys()):
            raise UserError(
                f"{self.name} names no token for {missing}, which the foundation reads; name the "
                "processor that belongs to the foundation (data.processor)"
            )
        if audio_in_video and _sound_arguments(processor) is None:
            raise UserError(f"data.audio_in_video: {self.name} reads videos without their sound; remove it")

    def decode(self, row: Row, part: MediaPart) -> Medium:
        """The medium of ``part``.

        Raises:
            ValueError: it is missing or damaged.
        """
        data = row.media_bytes(part.modality, part.position)
        if part.modality == "image":
            return Medium("image", decode_image(data))
        if part.modality == "audio":
            return Medium("audio", decode_audio(data).resampled(self._sampling_rate).samples)
        clip = decode_clip(data, self._max_frames)
        track = decode_soundtrack(data) if self._audio_in_video else None
        sound = track.resampled(self._sampling_rate).samples if track is not None else None
        return Medium("video", np.stack([np.asarray(frame) for frame in clip.frames]), clip.rate, sound)

    def expand(self, medium: Medium) -> Expansion:
        """Run the processor on ``medium`` alone.

        Raises:
            ValueError: the processor refuses it, or would cut it.
        """
        with costing_one_row(f"{self.name} cannot prepare this {medium.modality}"):
            output, text, per_token = self._call(self.tokens[medium.modality], [medium])
        if not text:
            raise ValueError(f"{self.name} makes no token of this {medium.modality}: it is too short or too small")
        features = {name: np.asarray(value) for name, value in output.items() if name not in per_token}
        by_modality = {medium.modality: features}
        if medium.sound is not None:
            sound = self.expand(Medium("audio", medium.sound)).features["audio"]
            pictures = {name: value for name, value in features.items() if name not in sound}
            by_modality = {"video": pictures, "audio": sound}
        elif medium.modality == "audio":
            self._check_uncut([medium.value], features)
        return Expansion(text, by_modality, frozenset(_PER_TOKEN & output.keys()))

    def run(self, text: str, media: Sequence[Medium]) -> tuple[Mapping[str, Any], str]:
        """Run the processor on a whole conversation, as transformers does.

        Returns:
            Its output, and the text that it gave to its tokenizer.
        """
        output, whole, _ = self._call(text, media)
        return output, whole

    def require_uncut(self, media: Sequence[Medium], output: Mapping[str, Any]) -> None:
        """Refuse a conversation whose clips the processor would cut. ``output``: what it made of all ``media``.

        Raises:
            ValueError: it would.
        """
        clips = [medium.value for medium in media if medium.modality == "audio"]
        if clips:
            heard = getattr(self._listener, "model_input_names", ())
            self._check_uncut(clips, {name: np.asarray(output[name]) for name in heard if name in output})

    def _call(self, text: str, media: Sequence[Medium]) -> tuple[Mapping[str, Any], str, set[str]]:
        """The processor's output, the text that it gave to its tokenizer, and the names of per-token outputs."""
        given: dict[str, Any] = {}
        for medium in media:
            given.setdefault(_ARGUMENT[medium.modality], []).append(medium.value)
        for visual in {"images", "videos"} & given.keys():
            given[visual] = [given[visual]]
        rates = [(len(medium.value), medium.frame_rate) for medium in media if medium.modality == "video"]
        if any(rate is not None for _, rate in rates):
            given["video_metadata"] = [[_metadata(count, rate) for count, rate in rates]]
        given |= self._with_sound(media)
        if "audio" in given:
            given["sampling_rate"] = self._sampling_rate
        bos = self._processor.tokenizer.bos_token
        with _recorded(self._processor) as recorder:
            output = self._processor(
                text=[text], **given, **self._arguments, add_special_tokens=not (bos and text.startswith(bos))
            )
        return output, recorder.text, recorder.returned | _PER_TOKEN

    def _with_sound(self, media: Sequence[Medium]) -> dict[str, Any]:
        if all(medium.sound is None for medium in media):
            return {}
        arguments = _sound_arguments(self._processor)
        assert arguments is not None
        sounds: list[np.ndarray] = []
        sources: list[int | None] = []  # index of the video that a sound belongs to
        videos = 0
        for medium in media:
            sound = medium.value if medium.modality == "audio" else medium.sound
            if sound is not None:
                sounds.append(sound)
                sources.append(None if medium.modality == "audio" else videos)
            videos += medium.modality == "video"
        return {"audio": sounds, **arguments(sources)}

    @property
    def _listener(self) -> Any:
        return getattr(self._processor, "audio_processor", None) or self._processor.feature_extractor

    @property
    def _sampling_rate(self) -> int:
        return int(getattr(self._listener, "sampling_rate", 16_000))

    def _check_uncut(self, clips: Sequence[np.ndarray], features: Features) -> None:
        """Many extractors cut long clips in silence (Whisper's after 30 s): count the frames that they kept.

        Of several clips it is as many frames of each, where they are stacked, and all frames together else.
        """
        listener = self._listener
        hop, bins = getattr(listener, "hop_length", None), getattr(listener, "feature_size", None)
        if hop is None or bins is None:
            return
        rate = self._sampling_rate
        floats = [array for array in features.values() if np.issubdtype(array.dtype, np.floating)]
        largest = max(floats, key=np.size, default=np.zeros(0))
        is_stacked = len(largest) == len(clips)
        kept = largest.size // bins // (len(clips) if is_stacked else 1)
        needed = max(map(len, clips)) if is_stacked else sum(map(len, clips))
        if kept * hop < needed - _UNHEARD_SECONDS * rate:
            raise ValueError(
                f"audio of {needed / rate:.1f} s, of which {type(listener).__name__} keeps {kept * hop / rate:.1f} s; "
                "split it"
            )


def shown_by(processor: Any, modalities: Collection[str]) -> dict[str, str]:
    """Modality -> the text by which the chat template of a HF processor shows a medium, as far as it names one."""
    named = {modality: getattr(processor, f"{modality}_token", None) for modality in sorted(modalities)}
    return {modality: str(token) for modality, token in named.items() if token is not None}


class _Recorder:
    """A tokenizer that remembers what it was given: the text with every medium expanded."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.text = ""
        self.returned: set[str] = set()

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        output = self._tokenizer(text, *args, **kwargs)
        self.text = text if isinstance(text, str) else text[0]
        self.returned = set(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@contextmanager
def _recorded(processor: ProcessorMixin) -> Iterator[_Recorder]:
    tokenizer = processor.tokenizer
    processor.tokenizer = recorder = _Recorder(tokenizer)
    try:
        yield recorder
    finally:
        processor.tokenizer = tokenizer


def _metadata(num_frames: int, rate: float | None) -> dict[str, Any]:
    duration = num_frames / rate if rate else None
    return {
        "total_num_frames": num_frames,
        "fps": rate,
        "duration": duration,
        "frames_indices": list(range(num_frames)),
    }


def _sound_arguments(processor: ProcessorMixin) -> Callable[[list[int | None]], dict[str, Any]] | None:
    """By which arguments the processor mixes videos with their sound; None: it cannot.

    They are made from the source of each sound: the index of its video, or None for a clip of its own.
    """
    mixes = getattr(processing_utils, "OmniModalProcessorMixin", None)
    if mixes is not None and isinstance(processor, mixes):
        return lambda sources: {"load_audio_from_video": True, "audio_from_video_indices": sources}
    options = getattr(processor.valid_processor_kwargs, "__annotations__", {}).get("videos_kwargs")
    if "use_audio_in_video" in getattr(options, "__annotations__", {}):  # before transformers 5.23
        return lambda _: {"use_audio_in_video": True}
    return None
