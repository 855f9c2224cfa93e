"""Packs and rejected rows in a terminal: predicted text is bold and between [[ and ]]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from omnitrain.data.chat.parts import MediaPart
from omnitrain.data.sources.rows import Row
from omnitrain.report.data.medium import FramesOf, medium_of
from omnitrain.report.data.pack_view import GapView, PackView, RejectedView, SampleView, TokenView

_COLORS = ("blue", "dark_orange", "green", "magenta", "yellow", "cyan", "red")
_BAR = 60  # characters of the bar of a full pack
_LETTERS = 400  # of the messages of a rejected row


def pack_lines(number: int, pack: PackView, frames: FramesOf) -> Iterator[RenderableType]:
    """Yield the lines about a pack; ``number``: its place among all, from 1."""
    yield Text.assemble((f"pack {number}", "bold"), f": {pack.words}; predicted: {pack.predicted_words}")
    yield _bar(pack)
    for index, sample in enumerate(pack.samples):
        yield from _sample(sample, _COLORS[index % len(_COLORS)], frames)


def rejected_lines(rows: Sequence[RejectedView]) -> Iterator[RenderableType]:
    """Yield the lines about rows that are skipped."""
    if not rows:
        yield Text("no row was rejected")
    for row in rows:
        rejected = row.rejected
        yield Text.assemble((f"rejected: {rejected.source}: {rejected.id}", "bold red"), f": {rejected.reason}")
        said = " | ".join(row.texts)
        yield Text(f"  {said[:_LETTERS]}{'...' * (len(said) > _LETTERS)}", style="dim")


def _bar(pack: PackView) -> Text:
    """The samples in their colours, and the room that is left."""
    text = Text()
    done = 0
    for index, sample in enumerate(pack.samples):
        end = round(_BAR * (sample.start + sample.num_tokens) / pack.capacity)
        text.append("\u2588" * (end - done), style=_COLORS[index % len(_COLORS)])
        done = end
    return text.append("\u2591" * (_BAR - done), style="dim")


def _sample(sample: SampleView, color: str, frames: FramesOf) -> Iterator[RenderableType]:
    facts = f": {sample.num_tokens:,} tokens, positions {sample.positions_words}"
    yield Text.assemble((sample.name, f"bold {color}"), facts)
    text = Text("  ")
    is_open = False
    for piece in sample.pieces:
        is_predicted = isinstance(piece, TokenView) and piece.is_predicted
        if is_predicted != is_open:
            text.append("[[" if is_predicted else "]]", style="dim")
            is_open = is_predicted
        if isinstance(piece, TokenView):
            text.append(piece.text.replace("\n", "\u21b5"), style=f"bold {color}" if is_predicted else "")
        elif isinstance(piece, GapView):
            text.append(f" ({piece.num_tokens:,} tokens are not shown) ", style="dim")
        else:
            medium = f": {_medium(sample.row, piece.part, frames)}" if piece.part is not None else ""
            text.append(f"<{piece.words}{medium}>", style=f"bold {color}" if piece.is_predicted else color)
    yield text.append("]]" * is_open, style="dim")
    if sample.others:
        words = ", ".join(_medium(sample.row, part, frames) for part in sample.others)
        yield Text(f"  media that the foundation's own forward places: {words}", style=color)


def _medium(row: Row, part: MediaPart, frames: FramesOf) -> str:
    """What a medium is, or why it cannot be read now."""
    try:
        return medium_of(row, part, frames).words
    except ValueError as error:
        return str(error)
