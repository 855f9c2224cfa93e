"""Decode and prepare media for the encoders and decoders that are attached to a foundation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnitrain.data.chat.parts import MediaPart
from omnitrain.data.packing.sample import Features, Grid, MediaItem
from omnitrain.data.render.hf_visuals import FrameChoice
from omnitrain.data.sources.clips import Clip
from omnitrain.data.sources.media import MediaFile, costing_one_row, decode_medium
from omnitrain.data.sources.reading import Reading
from omnitrain.data.sources.rows import MODALITIES, Row
from omnitrain.errors import UserError


class ComponentAdapter:
    """Converts media to the inputs of a component; it has no weights and runs in data workers."""

    modalities: tuple[str, ...] = ()  # of ``image``, ``audio``, ``video``
    max_frames: int = 1  # the most frames to read from a video
    num_frames: int | None = None  # frames to read from a video, evenly spaced in time; None: as many as ``fps`` gives
    is_block: bool = False  # of a decoder: the tokens of an item see each other (``MediaItem.is_block``)
    fps: float | None = None  # frames to read from a second of a video; None: all, up to ``max_frames``

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """Return features and tokens of an image, ``Waveform`` or frames; ValueError: not this item."""
        raise NotImplementedError

    def grid(self, features: Features) -> Grid | None:
        """Return where the tokens of an item to write stand; None: one after the other."""
        return None


class AttachedMedia:
    """The attached encoders (``readers``) and decoders (``writers``): modality -> name -> adapter."""

    def __init__(self, readers: Mapping[str, ComponentAdapter], writers: Mapping[str, ComponentAdapter]) -> None:
        """Index adapters, given by component name."""
        self.readers, self.writers = _by_modality(readers), _by_modality(writers)

    @property
    def modalities(self) -> list[str]:
        """All modalities that a component reads or writes."""
        return [m for m in MODALITIES if m in self.readers or m in self.writers]

    def handles(self, part: MediaPart) -> bool:
        """Whether an attached component reads (or writes, for a target) this part."""
        return part.modality in (self.writers if part.is_target else self.readers)

    def adapters_of(self, row: Row, part: MediaPart) -> dict[str, ComponentAdapter]:
        """Return the components of a part: one decoder or some encoders.

        They are those that the part names, else those that its data set names. Raises UserError: these are others.
        """
        key, all_, named = "encoders", self.readers, row.encoders
        if part.is_target:
            key, all_, named = "decoders", self.writers, row.decoders
        able, of = all_[part.modality], "the data set"
        if part.components is not None:
            named, of = part.components, "the part"
        chosen = {name: able[name] for name in able if named is None or name in named}
        if not chosen or (part.is_target and len(chosen) > 1):
            raise UserError(
                f"`{key}` of {of}: found {', '.join(named or ['nothing'])}; expected "
                f"{'one' if part.is_target else 'some'} of {', '.join(able)} for {part.modality}"
            )
        return chosen

    def prepare(self, row: Row, part: MediaPart) -> list[tuple[str, MediaItem]]:
        """Return name and item of each component of a part; ValueError: its medium is unusable."""
        return [(name, _item(row, part, name, adapter)) for name, adapter in self.adapters_of(row, part).items()]

    def frame_choice(self, part: MediaPart, file: MediaFile) -> FrameChoice:
        """Return how the first of the components that handle the modality of a part chooses the frames of its video."""
        able = (self.writers if part.is_target else self.readers)[part.modality]
        return _frame_choice(next(iter(able.values())), file)


def _item(row: Row, part: MediaPart, name: str, adapter: ComponentAdapter) -> MediaItem:
    with row.open_media(part.modality, part.position) as file:
        if file.reading.min_pixels or file.reading.max_pixels:
            raise UserError(
                f"{name} gives all pictures the same limits of pixels; set `min_pixels` and `max_pixels` of the "
                f"encoder, and not those of the data set or of the part"
            )
        choice = _frame_choice(adapter, file)
        media = decode_medium(part.modality, file, choice.choose())
        is_lowered = isinstance(media, Clip) and choice.is_lowered(media)
        with costing_one_row(f"{name} cannot prepare this {part.modality}"):
            content = media.frames if isinstance(media, Clip) else media
            features, num_tokens = adapter.prepare(part.modality, content)
    return MediaItem(features, num_tokens, is_lowered, adapter.is_block, adapter.grid(features))


def _frame_choice(adapter: ComponentAdapter, file: MediaFile) -> FrameChoice:
    own = Reading(fps=adapter.fps, num_frames=adapter.num_frames, max_frames=adapter.max_frames)
    return FrameChoice(None, {}, file.reading.over(own))


def _by_modality(adapters: Mapping[str, ComponentAdapter]) -> dict[str, dict[str, ComponentAdapter]]:
    found: dict[str, dict[str, ComponentAdapter]] = {}
    for name in sorted(adapters):  # not in the order of a recipe, which a saved config does not keep
        for modality in adapters[name].modalities:
            found.setdefault(modality, {})[name] = adapters[name]
    return found
