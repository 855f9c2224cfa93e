"""Decode and prepare media for the encoders and decoders that are attached to a foundation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnitrain.data.chat.parts import MediaPart
from omnitrain.data.packing.sample import Features, MediaItem
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
    fps: float | None = None  # frames to read from a second of a video; None: all, up to ``max_frames``

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """Return features and tokens of an image, ``Waveform`` or frames; ValueError: not this item."""
        raise NotImplementedError


class AttachedMedia:
    """The attached components: ``readers``: modality -> name -> adapter of an encoder; ``writers``: of the decoder."""

    def __init__(self, readers: Mapping[str, ComponentAdapter], writers: Mapping[str, ComponentAdapter]) -> None:
        """Index adapters, given by component name; UserError: two decoders write the same modality."""
        self.readers: dict[str, dict[str, ComponentAdapter]] = {}
        for name in sorted(readers):  # not in the order of a recipe, which a saved config does not keep
            for modality in readers[name].modalities:
                self.readers.setdefault(modality, {})[name] = readers[name]
        self.writers = _by_modality(writers)

    @property
    def modalities(self) -> list[str]:
        """All modalities that a component reads or writes."""
        return [m for m in MODALITIES if m in self.readers or m in self.writers]

    def handles(self, part: MediaPart) -> bool:
        """Whether an attached component reads (or writes, for a target) this part."""
        return part.modality in (self.writers if part.is_target else self.readers)

    def adapters_of(self, row: Row, part: MediaPart) -> dict[str, ComponentAdapter]:
        """Return those of the components that get a part that :meth:`handles` accepts: one decoder, or some encoders.

        Raises UserError: the data set of the row names other encoders.
        """
        able = self._able(part)
        if part.is_target or row.encoders is None:
            return able
        if not (chosen := {name: able[name] for name in able if name in row.encoders}):
            raise UserError(
                f"`encoders` of the data set has none that reads {part.modality}: found {', '.join(row.encoders)}; "
                f"expected some of {', '.join(able)}"
            )
        return chosen

    def _able(self, part: MediaPart) -> dict[str, ComponentAdapter]:
        return dict([self.writers[part.modality]]) if part.is_target else self.readers[part.modality]

    def prepare(self, row: Row, part: MediaPart) -> list[tuple[str, MediaItem]]:
        """Return name and item of each component of a part; ValueError: its medium is unusable."""
        return [(name, _item(row, part, name, adapter)) for name, adapter in self.adapters_of(row, part).items()]

    def frame_choice(self, part: MediaPart, file: MediaFile) -> FrameChoice:
        """Return how a component of a part chooses the frames of its video: the first one, if there are several."""
        return _frame_choice(next(iter(self._able(part).values())), file)


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
    return MediaItem(features, num_tokens, is_lowered)


def _frame_choice(adapter: ComponentAdapter, file: MediaFile) -> FrameChoice:
    return FrameChoice(None, {}, file.reading.over(Reading(fps=adapter.fps, max_frames=adapter.max_frames)))


def _by_modality(writers: Mapping[str, ComponentAdapter]) -> dict[str, tuple[str, ComponentAdapter]]:
    owners: dict[str, tuple[str, ComponentAdapter]] = {}
    for name, adapter in writers.items():
        for modality in adapter.modalities:
            if modality in owners:
                raise UserError(f"model.decoders: {owners[modality][0]!r} and {name!r} both write {modality}; keep one")
            owners[modality] = (name, adapter)
    return owners
