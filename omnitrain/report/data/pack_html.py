"""Packs and rejected rows as HTML: tokens in the colour of their sample, filled where the loss has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from PIL import Image

from omnitrain.data.chat.parts import MediaPart
from omnitrain.data.sources.media import Waveform
from omnitrain.data.sources.rows import Row
from omnitrain.page.html import Cell, Raw, chapter, figure, note, swatch, table
from omnitrain.page.svg import NUM_COLORS
from omnitrain.report.chapters.plots import Plots, grid
from omnitrain.report.curves import Curve
from omnitrain.report.data.medium import FramesOf, Medium, medium_of
from omnitrain.report.data.pack_view import GapView, ItemView, PackView, Piece, RejectedView, SampleView, TokenView
from omnitrain.report.figures import Bar, draw_bars, draw_curves
from omnitrain.report.media import MediaBudget

_LEGEND = (
    "Each sample has a colour. Filled tokens are predicted: the loss has them. A dashed frame: the last token is "
    "predicted, and the model does not read it. The other tokens are read only. Point at a token for its index, id and "
    "position."
)
_LETTERS = 2000  # of the messages of a rejected row


class PackPages:
    """Makes the chapters about packs and rejected rows.

    Args:
        plots: draws figures.
        budget: room for media.
        frames: chooses the frames of a video.
    """

    def __init__(self, plots: Plots, budget: MediaBudget, frames: FramesOf) -> None:
        self._plots, self._budget, self._frames = plots, budget, frames

    def pack(self, number: int, pack: PackView) -> str:
        """Return the chapter of a pack; ``number``: its place among all, from 1."""
        predicted = ", ".join(f"{name} {count:,}" for name, count in pack.predicted.items() if count) or "none"
        words = (
            f"{len(pack.samples)} samples, {pack.num_tokens:,} of {pack.capacity:,} tokens ({pack.fill:.1%} full). "
            f"Predicted: {predicted}."
        )
        parts = [note(words), self._budget_figure(pack), grid([self._positions(pack)]), note(_LEGEND)]
        parts += [self._sample(index, sample) for index, sample in enumerate(pack.samples)]
        return chapter(f"pack{number}", f"Pack {number}", parts)

    def rejected(self, rows: Sequence[RejectedView]) -> str:
        """Return the chapter of the rows that were skipped."""
        if not rows:
            return chapter("rejected", "Rejected rows", [note("None of the rows that were read for these packs.")])
        cells: list[list[Cell]] = [
            [
                row.rejected.source,
                row.rejected.id,
                Raw(f'<span class="bad">{escape(row.rejected.reason)}</span>'),
                Raw("".join(f"<p>{escape(text[:_LETTERS])}</p>" for text in row.texts)),
                Raw("".join(self._medium(row.row, part) for part in row.parts)),
            ]
            for row in rows
        ]
        words = f"{len(rows)} of the rows that were read for these packs are skipped in training."
        return chapter(
            "rejected", "Rejected rows", [note(words), table(("source", "row", "reason", "messages", "media"), cells)]
        )

    def _budget_figure(self, pack: PackView) -> str:
        """The pack from its first token to the last that it could have."""
        lanes = ["samples", *pack.lanes]
        bars = [Bar(0, s.start, s.num_tokens, i % NUM_COLORS) for i, s in enumerate(pack.samples)]
        for lane, stretches in enumerate(pack.lanes.values(), 1):
            bars += [
                Bar(lane, max(s.start, sample.start), min(s.stop, end) - max(s.start, sample.start), i % NUM_COLORS)
                for i, sample in enumerate(pack.samples)
                for end in (sample.start + sample.num_tokens,)
                for s in stretches
                if s.start < end and s.stop > sample.start
            ]
        title = "Where the pack has what, up to its last possible token"
        svg = draw_bars(bars, lanes, self._plots.name(), title, "token", pack.capacity)
        return figure(svg, title, is_wide=True)

    def _positions(self, pack: PackView) -> str:
        axes = range(len(pack.position_ids))
        names = ["position"] if len(axes) == 1 else [f"axis {axis}" for axis in axes]
        curves = [
            Curve(0, name, [(index, float(value)) for index, value in enumerate(values.tolist())])
            for name, values in zip(names, pack.position_ids, strict=True)
        ]
        legend = "".join(f"{swatch(axis)}{name} " for axis, name in enumerate(names)) if len(axes) > 1 else ""
        title = "Positions, which begin anew with each sample"
        svg = draw_curves(curves, self._plots.name(), title, x="token")
        return f"<div>{figure(svg, title)}{legend}</div>"

    def _sample(self, index: int, sample: SampleView) -> str:
        row = sample.row
        positions = ", ".join(f"{first} to {last}" for first, last in sample.positions)
        predicted = ", ".join(f"{name} {count:,}" for name, count in sample.predicted.items() if count) or "none"
        facts = f"{sample.num_tokens:,} tokens from {sample.start:,}, positions {positions}, predicted: {predicted}"
        shown = "".join(self._piece(row, piece) for piece in sample.pieces)
        others = [self._medium(row, part) for part in sample.others]
        more = note("Media of the row that the foundation's own forward places:") + "".join(others) if others else ""
        return (
            f'<div class="sample" style="--c:var(--c{index % NUM_COLORS})"><h4>{escape(row.source)}: {escape(row.id)}'
            f'</h4>{note(facts)}<div class="tokens">{shown}</div>{more}</div>'
        )

    def _piece(self, row: Row, piece: Piece) -> str:
        if isinstance(piece, GapView):
            return f'<span class="note"> ({piece.num_tokens:,} tokens are not shown) </span>'
        if isinstance(piece, TokenView):
            return _token(piece)
        shown = self._medium(row, piece.part) if piece.part is not None else ""
        return _item(piece, shown)

    def _medium(self, row: Row, part: MediaPart) -> str:
        try:
            return _shown(medium_of(row, part, self._frames), self._budget)
        except ValueError as error:
            return f'<span class="bad">{escape(str(error))}</span>'


def _shown(medium: Medium, budget: MediaBudget) -> str:
    content = medium.content
    if isinstance(content, Image.Image):
        return budget.image(content, medium.words)
    if isinstance(content, Waveform):
        return budget.sound(content.samples, content.rate, medium.words)
    return budget.frames(content.frames, medium.words)


def _token(token: TokenView) -> str:
    ids = ", ".join(map(str, token.ids))
    where = f"token {token.start}: id {ids}, position {_words(token.position)}" if token.is_read else f"label: id {ids}"
    text = escape("".join(_letters(token.text)))
    if not token.is_predicted:
        return f'<span title="{where}">{text}</span>'
    return f'<b title="{where}">{text}</b>' if token.is_read else f'<b class="unread" title="{where}">{text}</b>'


def _letters(text: str) -> Iterator[str]:
    """Yield what is seen of each character: line breaks have a sign, and characters without a look their number."""
    for letter in text:
        if letter == "\n":
            yield "\u21b5\n"
        else:
            yield letter if letter.isprintable() else f"\\u{ord(letter):04x}"


def _item(item: ItemView, shown: str) -> str:
    verb = "writes" if item.is_predicted else "reads"
    kind = "item predicted" if item.is_predicted else "item"
    features = "".join(f"; {name} {words}" for name, words in item.features.items())
    where = (
        f"tokens {item.start} to {item.start + item.num_tokens - 1}, from position {_words(item.position)}{features}"
    )
    words = f"{item.component} {verb} {item.num_tokens:,} tokens"
    return f'<span class="{kind}" title="{escape(where)}">{escape(words)}{shown}</span>'


def _words(position: Sequence[int]) -> str:
    return str(position[0]) if len(position) == 1 else str(tuple(position))
