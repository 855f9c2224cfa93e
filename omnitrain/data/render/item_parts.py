"""Find the part of a data row that each item of its sample shows."""

from __future__ import annotations

from collections.abc import Sequence

from omnitrain.data.chat.parts import MediaPart, media_parts
from omnitrain.data.packing.sample import NATIVE_PREFIX
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import Row


def parts_of_items(components: Sequence[str], row: Row, processor: OmniProcessor) -> list[MediaPart | None]:
    """Return the part that each item of the sample of ``row`` shows. None: it is not known, as for a video's sound.

    ``components`` has the component of each item, in the order of the sample.
    """
    by_component: dict[str, list[MediaPart]] = {}
    for part in media_parts(row.messages):
        attached = (processor.writers if part.is_target else processor.readers).get(part.modality)
        name = attached[0] if attached is not None else f"{NATIVE_PREFIX}{part.modality}"
        by_component.setdefault(name, []).append(part)
    parts = {
        name: iter(of_name if len(of_name) == components.count(name) else ()) for name, of_name in by_component.items()
    }
    return [next(parts.get(name, iter(())), None) for name in components]


def modality_of(component: str, part: MediaPart | None) -> str:
    """Return the modality of an item: from its part, else from its component's name."""
    return part.modality if part is not None else component.removeprefix(NATIVE_PREFIX)
