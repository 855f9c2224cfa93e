"""Packs and rejected rows as HTML: tokens in the colour of their sample, filled where the loss has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup
from PIL import Image

from omnitrain.data.chat.parts import MediaPart
from omnitrain.data.sources.media import Waveform
from omnitrain.data.sources.rows import Row
from omnitrain.report.curves import Curve
from omnitrain.report.data.medium import FramesOf, medium_of
from omnitrain.report.data.pack_view import ItemView, PackView, RejectedView, TokenView
from omnitrain.report.html import rendered, tag
from omnitrain.report.media import MediaBudget
from omnitrain.report.svg import Bar, draw_bars, draw_curves

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
    """Yield what is seen of each character: line breaks have a sign, and characters without a look their number."""
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
