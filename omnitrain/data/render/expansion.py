"""Run a HF processor on one medium: it gives the text with placeholders, and the features."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase, ProcessorMixin, processing_utils

from omnitrain.data.packing.sample import Features
from omnitrain.data.sources.media import (
    MediaFile,
    costing_one_row,
    decode_audio,
    decode_clip,
    decode_image,
    decode_soundtrack,
)
from omnitrain.errors import UserError

# Names of per-token arguments that processors make, in addition to the outputs of their tokenizer.
_PER_TOKEN = {"mm_token_type_ids", "token_type_ids"}
_KEPT_TEXTS = 128
_MAX_DROPPED_SECONDS = 0.1  # the end of a clip that fills no whole frame is at most this long
_ARGUMENT = {"image": "images", "audio": "audio", "video": "videos"}


@dataclass(frozen=True)
class Medium:
    """A decoded image, sound or video, as a HF processor takes it.

    Attributes:
        modality: ``image``, ``audio`` or ``video``.
        value: an RGB ``PIL.Image``, a sound ``[samples]`` float32, or a video ``[frames, height, width, 3]`` uint8.
        frame_rate: frames per second of a video, if known.
        sound: ``[samples]`` float32, the sound of a video that is read with its sound.
    """

    modality: str
    value: Any
    frame_rate: float | None = None
    sound: np.ndarray | None = None


@dataclass(frozen=True)
class Expansion:
    """The output of a processor for one medium.

    Attributes:
        text: text with placeholders that replaces the template's text for the medium.
        features: modality -> arguments of the forward; two modalities for a video with sound.
        token_inputs: names of the per-token types that the processor returns.
    """

    text: str
    features: dict[str, Features]
    token_inputs: frozenset[str]


class MediaExpander:
    """Calls a HF processor for one medium at a time.

    Attributes:
        name: name of the processor's class.
        tokens: modality -> the text that the chat template writes for a medium.
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
            processor: processor of the foundation.
            modalities: modalities that the foundation reads.
            arguments: further arguments of every call of ``processor``.
            audio_in_video: read videos together with their sound.
            max_frames: maximum number of frames decoded from a video.

        Raises:
            UserError: the processor has no token for a modality, or cannot read videos with their sound.
        """
        self._processor, self.name = processor, type(processor).__name__
        self._arguments = {**arguments, "return_tensors": "pt"}
        self._audio_in_video, self._max_frames = audio_in_video, max_frames
        self._kept: dict[str, BatchEncoding] = {}
        self.tokens = shown_by(processor, modalities)
        if missing := sorted(modalities - self.tokens.keys()):
            raise UserError(
                f"{self.name} has no token for {missing}, which the foundation reads; set data.processor to the "
                "processor of the foundation"
            )
        if audio_in_video and _sound_arguments(processor) is None:
            raise UserError(f"data.audio_in_video: {self.name} cannot read videos with their sound; remove the setting")

    def decode(self, modality: str, file: MediaFile) -> Medium:
        """Decode the medium of an encoded file.

        Raises:
            ValueError: the medium is damaged.
        """
        if modality == "image":
            return Medium("image", decode_image(file))
        if modality == "audio":
            return Medium("audio", decode_audio(file).resampled(self._sampling_rate).samples)
        clip = decode_clip(file, self._max_frames)
        track = decode_soundtrack(file) if self._audio_in_video else None
        sound = track.resampled(self._sampling_rate).samples if track is not None else None
        return Medium("video", np.stack([np.asarray(frame) for frame in clip.frames]), clip.rate, sound)

    def expand(self, medium: Medium) -> Expansion:
        """Run the processor on ``medium`` alone.

        Raises:
            ValueError: the processor refuses the medium, or would cut it.
        """
        with costing_one_row(f"{self.name} cannot prepare this {medium.modality}"):
            output, text, per_token = self._call(self.tokens[medium.modality], [medium])
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

    def run(self, text: str, media: Sequence[Medium]) -> tuple[Mapping[str, Any], str]:
        """Run the processor on a whole conversation, as transformers does.

        Returns:
            The processor's output, and the text that it gave to its tokenizer.
        """
        output, whole, _ = self._call(text, media)
        return output, whole

    def require_uncut(self, media: Sequence[Medium], output: Mapping[str, Any]) -> None:
        """Check that the processor did not cut any sound. ``output`` is its output for all ``media``.

        Raises:
            ValueError: it did.
        """
        clips = [medium.value for medium in media if medium.modality == "audio"]
        if clips:
            names = getattr(self._audio_extractor, "model_input_names", ())
            self._check_uncut(clips, {name: np.asarray(output[name]) for name in names if name in output})

    def _call(self, text: str, media: Sequence[Medium]) -> tuple[Mapping[str, Any], str, set[str]]:
        """Return the processor's output, the text that it gave to its tokenizer, and the names of per-token outputs."""
        arguments: dict[str, Any] = {}
        for medium in media:
            arguments.setdefault(_ARGUMENT[medium.modality], []).append(medium.value)
        for visual in {"images", "videos"} & arguments.keys():
            arguments[visual] = [arguments[visual]]
        rates = [(len(medium.value), medium.frame_rate) for medium in media if medium.modality == "video"]
        if any(rate is not None for _, rate in rates):
            arguments["video_metadata"] = [[_metadata(count, rate) for count, rate in rates]]
        arguments |= self._with_sound(media)
        if "audio" in arguments:
            arguments["sampling_rate"] = self._sampling_rate
        bos = self._processor.tokenizer.bos_token
        with _recorded(self._processor, self._kept) as recorder:
            output = self._processor(
                text=[text], **arguments, **self._arguments, add_special_tokens=not (bos and text.startswith(bos))
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
    def _audio_extractor(self) -> Any:
        return getattr(self._processor, "audio_processor", None) or self._processor.feature_extractor

    @property
    def _sampling_rate(self) -> int:
        return int(getattr(self._audio_extractor, "sampling_rate", 16_000))

    def _check_uncut(self, clips: Sequence[np.ndarray], features: Features) -> None:
        """Count the frames that the extractor kept, because many cut long clips silently (Whisper's after 30 s).

        Stacked clips all have the same number of frames; otherwise the frames of all clips are counted together.
        """
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
    """A tokenizer that records its input: the text with every medium expanded.

    Media of the same size have the same text, so the tokens of some texts are kept.
    """

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


def _metadata(num_frames: int, rate: float | None) -> dict[str, Any]:
    duration = num_frames / rate if rate else None
    return {
        "total_num_frames": num_frames,
        "fps": rate,
        "duration": duration,
        "frames_indices": list(range(num_frames)),
    }


def _sound_arguments(processor: ProcessorMixin) -> Callable[[list[int | None]], dict[str, Any]] | None:
    """Return a function that makes the arguments for videos with sound, or None if the processor has none.

    The function takes the source of each sound: the index of its video, or None for a separate audio item.
    """
    mixes = getattr(processing_utils, "OmniModalProcessorMixin", None)
    if mixes is not None and isinstance(processor, mixes):
        return lambda sources: {"load_audio_from_video": True, "audio_from_video_indices": sources}
    options = getattr(processor.valid_processor_kwargs, "__annotations__", {}).get("videos_kwargs")
    if "use_audio_in_video" in getattr(options, "__annotations__", {}):  # before transformers 5.23
        return lambda _: {"use_audio_in_video": True}
    return None
