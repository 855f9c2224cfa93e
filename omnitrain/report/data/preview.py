"""Packs of a recipe as people look at them: in a terminal, in a notebook, on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup
from PIL import Image
from rich.console import RenderableType
from rich.text import Text

from omnitrain.data.chat.parts import MediaPart
from omnitrain.data.sources.clips import Choose, Clip
from omnitrain.data.sources.media import MediaFile, Waveform, decode_medium
from omnitrain.data.sources.rows import Row
from omnitrain.report.data.pack_view import GapView, ItemView, PackView, RejectedView, SampleView, TokenView
from omnitrain.report.html import Shown, rendered, tag
from omnitrain.report.media import MediaBudget
from omnitrain.report.svg import Bar, Curve, draw_bars, draw_curves

FramesOf = Callable[[MediaPart, MediaFile], Choose]


@dataclass(frozen=True)
class ShownMedium:
    """An image, a sound, or the frames of a video; ``words`` say what it is and how large."""

    content: Image.Image | Waveform | Clip
    words: str


def medium_of(row: Row, part: MediaPart, frames: FramesOf) -> ShownMedium:
    """Decode the medium of a part of a row; ``frames`` chooses frames of a video. ValueError: missing or damaged."""
    with row.open_media(part.modality, part.position) as file:
        content = decode_medium(part.modality, file, frames(part, file))
    if isinstance(content, Image.Image):
        words = f"image of {content.width} x {content.height} pixels"
    elif isinstance(content, Waveform):
        words = f"sound of {len(content.samples) / content.rate:.2f} s, {content.rate:,} Hz"
    else:
        shown, times = content.frames, content.times
        span = f", {times[0]:.1f} to {times[-1]:.1f} s" if times else ""
        words = f"video of {len(shown)} frames of {shown[0].width} x {shown[0].height} pixels{span}"
    return ShownMedium(content, words)


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
    """The description of a medium, or why it cannot be read now."""
    try:
        return medium_of(row, part, frames).words
    except ValueError as error:
        return str(error)


_MEDIA_ROOM = 3_000_000  # bytes of a page for media


def preview_html(
    packs: Sequence[PackView], rejected: Sequence[RejectedView], frames: FramesOf, unread: Sequence[str]
) -> Markup:
    """Return the chapters about packs, rejected rows (whose media have room first), and keys that nothing reads."""
    budget = MediaBudget(_MEDIA_ROOM)

    def medium(row: Row, part: MediaPart) -> Markup:
        try:
            found = medium_of(row, part, frames)
        except ValueError as error:
            return tag("span", str(error), **{"class": "bad"})
        if isinstance(found.content, Image.Image):
            return budget.image(found.content, found.words)
        if isinstance(found.content, Waveform):
            return budget.sound(found.content.samples, found.content.rate, found.words)
        return budget.frames(found.content.frames, found.words)

    return rendered(
        "preview.html",
        packs=packs,
        rejected=rejected,
        unread=unread,
        medium=medium,
        lanes=_lanes,
        positions=_positions,
        token=_token,
        where=_where,
        kind=lambda piece: type(piece).__name__,
    )


def _lanes(pack: PackView, title: str) -> Markup:
    """The pack from its first token to the last that it could have."""
    bars = [Bar(0, sample.start, sample.num_tokens, i) for i, sample in enumerate(pack.samples)]
    for lane, stretches in enumerate(pack.lanes.values(), 1):
        for i, sample in enumerate(pack.samples):
            end = sample.start + sample.num_tokens
            cut = [(max(start, sample.start), min(stop, end)) for start, stop in stretches]
            bars += [Bar(lane, start, stop - start, i) for start, stop in cut if start < stop]
    return draw_bars(bars, ["samples", *pack.lanes], title, "token", pack.capacity)


def _positions(pack: PackView, title: str) -> Markup:
    curves = [
        Curve(0, f"axis {axis}", [(index, float(value)) for index, value in enumerate(values.tolist())])
        for axis, values in enumerate(pack.position_ids)
    ]
    return draw_curves(curves, title, x="token")


def _token(token: TokenView) -> Markup:
    ids = ", ".join(map(str, token.ids))
    where = f"token {token.start}: id {ids}, position {_words(token.position)}" if token.is_read else f"label: id {ids}"
    unread = {} if token.is_read else {"class": "unread"}
    return tag("b" if token.is_predicted else "span", "".join(_letters(token.text)), **unread, title=where)


def _letters(text: str) -> Iterator[str]:
    """Yield each character as it is shown: a sign for a line break, the number of an invisible character."""
    for letter in text:
        if letter == "\n":
            yield "\u21b5\n"
        else:
            yield letter if letter.isprintable() else f"\\u{ord(letter):04x}"


def _where(item: ItemView) -> str:
    features = "".join(f"; {name} {words}" for name, words in item.features.items())
    last = item.start + item.num_tokens - 1
    return f"tokens {item.start} to {last}, from position {_words(item.position)}{features}"


def _words(position: Sequence[int]) -> str:
    return str(position[0]) if len(position) == 1 else str(tuple(position))


@dataclass(frozen=True, repr=False)
class DataPreview(Shown):
    """The first packs of a recipe. A notebook shows it as HTML, a terminal as text."""

    name: str  # name of the recipe
    packs: tuple[PackView, ...]  # the packs, as the model gets them
    rejected: tuple[RejectedView, ...]  # rows that were read for these packs, and that training skips
    frames: FramesOf  # chooses the frames of a video, as the model reads them
    unread: tuple[str, ...] = ()  # keys of the data sets that nothing reads, in words
    title: ClassVar[str] = "preview of the data"

    def lines(self) -> Iterator[RenderableType]:
        """Yield the lines for a terminal."""
        for number, pack in enumerate(self.packs, 1):
            yield from pack_lines(number, pack, self.frames)
        yield from rejected_lines(self.rejected)
        yield from (Text(f"note: {line}") for line in self.unread)

    def chapters(self) -> Markup:
        """Return the chapters of a page."""
        return preview_html(self.packs, self.rejected, self.frames, self.unread)
