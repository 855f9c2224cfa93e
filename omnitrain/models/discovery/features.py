"""The rows that a feature method makes, flat; and the object that the model's forward expects, made of them again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from omnitrain.errors import UserError
from omnitrain.ops.device import to_device


@dataclass(frozen=True)
class _Rows:
    """Place of a tensor ``[rows, hidden]``: its name, its number of dims, and the tuple or list it was cut into."""

    name: str
    ndim: int
    pieces: type | None


@dataclass(frozen=True)
class _Validity:
    """Place of a mask over rows: what says "valid". Flat rows are all valid."""

    valid: bool
    dtype: torch.dtype
    ndim: int


@dataclass(frozen=True)
class _Shared:
    """Place of a tensor that is not per row (the same for all items of a call)."""

    name: str


@dataclass(frozen=True)
class RowLayout:
    """How a feature method's output is made of flat rows.

    Attributes:
        output: class of the output (``None``: it is no :class:`ModelOutput`).
        fields: field -> nested lists and tuples, in which places of tensors are marked.
        names: of the tensors with one row per placeholder, the main one first.
        shared: names of the tensors that are not per row.
        joined: whether items are put together into one piece (False: kept as one piece per item).
    """

    output: type | None
    fields: dict[str, Any]
    names: tuple[str, ...]
    shared: tuple[str, ...]
    joined: bool = True


@dataclass(frozen=True)
class MediaFeatures:
    """Rows of some items of one modality.

    Attributes:
        main: ``[rows, hidden]``, what goes into the placeholders.
        side: further tensors ``[rows, ...]`` by name (deepstack levels, ...).
        shared: tensors that are not per row, by name (the same for every call).
        counts: rows of each item; they add up to ``rows``.
        layout: how the model wants them.
    """

    main: Tensor
    side: dict[str, Tensor]
    shared: dict[str, Tensor]
    counts: tuple[int, ...]
    layout: RowLayout

    def __post_init__(self) -> None:
        assert sum(self.counts) == self.main.size(0)

    @staticmethod
    def cat(calls: Sequence[MediaFeatures]) -> MediaFeatures:
        """Rows of several calls, in the order of the calls."""
        assert calls
        return replace(
            calls[0],
            main=torch.cat([call.main for call in calls]),
            side={name: torch.cat([call.side[name] for call in calls]) for name in calls[0].side},
            counts=tuple(count for call in calls for count in call.counts),
        )

    def at(self, index: Tensor) -> MediaFeatures:
        """These rows, as one item. ``index``: [n] int64, on the host, may be empty."""
        index = to_device(index, self.main.device)
        return replace(
            self,
            main=self.main.index_select(0, index),
            side={name: tensor.index_select(0, index) for name, tensor in self.side.items()},
            counts=(index.numel(),),
        )

    def tensors(self) -> list[Tensor]:
        """All tensors with one row per placeholder: main, then the side ones."""
        return [self.main, *self.side.values()]

    def with_tensors(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> MediaFeatures:
        """The same layout with other rows, such as those received from other ranks (in the order of ``tensors()``)."""
        return replace(self, main=tensors[0], side=dict(zip(self.side, tensors[1:], strict=True)), counts=tuple(counts))

    def as_output(self) -> Any:
        """What the feature method would have returned for these items in one call."""
        fields = {name: self._built(node) for name, node in self.layout.fields.items()}
        return fields[""] if self.layout.output is None else _with_fields(self.layout.output, fields)

    def _built(self, node: Any) -> Any:
        if isinstance(node, _Rows):
            return self._shaped(self.main if node.name == self.layout.names[0] else self.side[node.name], node)
        if isinstance(node, _Validity):
            size = [1] * (node.ndim - 1) + [self.main.size(0)]
            return torch.full(size, node.valid, dtype=node.dtype, device=self.main.device)
        if isinstance(node, _Shared):
            return self.shared[node.name]
        if isinstance(node, (list, tuple)):
            return type(node)(self._built(child) for child in node)
        return node

    def _shaped(self, rows: Tensor, node: _Rows) -> Any:
        def with_dims(piece: Tensor) -> Tensor:
            return piece[(None,) * (node.ndim - piece.ndim)]

        if node.pieces is not None:
            pieces = [rows] if self.layout.joined else rows.split(list(self.counts))
            return node.pieces(with_dims(piece) for piece in pieces)
        if self.layout.joined:
            return with_dims(rows)
        return torch.stack([with_dims(piece)[0] for piece in rows.split(list(self.counts))])


def check_rows(modality: str, expected: Sequence[int], got: Sequence[int], samples: Sequence[str]) -> None:
    """Each item has as many rows as placeholders; transformers itself would take surplus rows without a word.

    Args:
        modality: for the message.
        expected: placeholders of each item.
        got: rows of each item.
        samples: id of the sample each item belongs to.

    Raises:
        UserError: names the samples, and their numbers of placeholders and rows.
    """
    if len(expected) != len(got):
        raise UserError(f"{len(got)} {modality} items were encoded, but the samples hold {len(expected)}")
    wrong = [
        f"  sample {sample}: {want} {modality} placeholders, {have} rows"
        for sample, want, have in zip(samples, expected, got, strict=True)
        if want != have
    ]
    if wrong:
        raise UserError(f"{modality} rows do not match their placeholders:\n" + "\n".join(wrong))


# From a method's output -----------------------------------------------------------------------------------------------


def describe(output: Any, used: Sequence[str], rows: int, *, joined: bool = True) -> RowLayout | None:
    """The layout of an output with ``rows`` rows, or None if no tensor in it has as many.

    Args:
        output: what the feature method returned.
        used: the fields that the model's forward looks at.
        rows: number of placeholders.
        joined: see :class:`RowLayout`.
    """
    values = _fields(output, used)
    masks = _masks(values, rows)
    names: list[str] = []
    shared: list[str] = []
    fields = {name: _node(value, name, rows, masks, names, shared) for name, value in values.items()}
    if not names:
        return None
    kind = type(output) if isinstance(output, ModelOutput) else None
    return RowLayout(kind, fields, tuple(names), tuple(shared), joined)


def flatten(output: Any, layout: RowLayout) -> MediaFeatures:
    """Flat rows of an output of this layout; those of each item as it is cut, or all as one item."""
    values = _fields(output, tuple(layout.fields))
    found: dict[str, Tensor] = {}
    cuts: list[tuple[int, ...]] = []
    mask = _validity(values, layout)
    for name, node in layout.fields.items():
        _collect(values[name], node, mask, found, cuts)
    main, *side = layout.names
    rows = found[main].size(0)
    cut = next((cut for cut in cuts if sum(cut) == rows), (rows,))
    return MediaFeatures(
        found[main], {name: found[name] for name in side}, {name: found[name] for name in layout.shared}, cut, layout
    )


def row_numbers(output: Any, used: Sequence[str]) -> Iterator[int]:
    """How many rows an output may stand for, the likeliest first."""
    values = _fields(output, used)
    for value in values.values():
        yield from _row_numbers(value)
    for value in values.values():
        if _is_mask(value):
            yield int(value.bool().sum())
            yield int((~value.bool()).sum())


def _row_numbers(value: Any) -> Iterator[int]:
    if _is_rows(value):
        yield _num_rows(value)
    elif isinstance(value, (list, tuple)) and value:
        if all(_is_rows(item) for item in value):
            yield sum(_num_rows(item) for item in value)
        for item in value:
            yield from _row_numbers(item)


def _with_fields(output: type, values: dict[str, Any]) -> Any:
    """An output object; some models add attributes that its class does not declare."""
    declared = values.keys() & inspect.signature(output).parameters.keys()
    made = output(**{name: values[name] for name in declared})
    for name in set(values) - declared:
        setattr(made, name, values[name])
    return made


def _fields(output: Any, used: Sequence[str]) -> dict[str, Any]:
    if isinstance(output, ModelOutput):
        return {name: getattr(output, name, None) for name in used}
    return {"": output}


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2 and value.numel() > 0


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.ndim >= 1


def _num_rows(value: Tensor) -> int:
    return value.numel() // value.size(-1)


def _masks(values: dict[str, Any], rows: int) -> dict[torch.Size, _Validity]:
    found: dict[torch.Size, _Validity] = {}
    for value in values.values():
        if _is_mask(value):
            for valid in (True, False):
                if int((value.bool() == valid).sum()) == rows:
                    found.setdefault(value.shape, _Validity(valid, value.dtype, value.ndim))
    return found


def _node(
    value: Any, name: str, rows: int, masks: dict[torch.Size, _Validity], names: list[str], shared: list[str]
) -> Any:
    if isinstance(value, Tensor):
        if _is_rows(value) and (_num_rows(value) == rows or value.shape[:-1] in masks):
            names.append(name)
            return _Rows(name, value.ndim, None)
        if value.shape in masks and _is_mask(value):
            return masks[value.shape]
        shared.append(name)
        return _Shared(name)
    if isinstance(value, (list, tuple)) and value:
        if all(_is_rows(item) for item in value) and sum(_num_rows(item) for item in value) == rows:
            names.append(name)
            return _Rows(name, value[0].ndim, tuple if isinstance(value, tuple) else list)
        return type(value)(_node(v, f"{name}.{i}", rows, masks, names, shared) for i, v in enumerate(value))
    return value


def _validity(values: dict[str, Any], layout: RowLayout) -> Tensor | None:
    for name, node in layout.fields.items():
        if isinstance(node, _Validity):
            return values[name].bool() == node.valid
    return None


def _collect(value: Any, node: Any, mask: Tensor | None, found: dict[str, Tensor], cuts: list[tuple[int, ...]]) -> None:
    if isinstance(node, _Shared):
        found[node.name] = value
    elif isinstance(node, _Rows):
        if node.pieces is not None:
            pieces = [piece.reshape(-1, piece.size(-1)) for piece in value]
            cuts.append(tuple(piece.size(0) for piece in pieces))
            found[node.name] = torch.cat(pieces)
        elif mask is not None and value.shape[:-1] == mask.shape:
            cuts.append(tuple(mask.sum(-1).tolist()))
            found[node.name] = value[mask]
        else:
            found[node.name] = value.reshape(-1, value.size(-1))
            if value.ndim > 2:
                cuts.append((_num_rows(value[0]),) * value.size(0))
    elif isinstance(node, (list, tuple)):
        for inner, child in zip(value, node, strict=True):
            _collect(inner, child, mask, found, cuts)


class Watched:
    """An output that notes which of its fields are looked at.

    Attributes:
        output: to be handed to the model in place of the given one.
        fields: looked at so far, in that order.
    """

    def __init__(self, output: Any) -> None:
        self.fields: list[str] = []
        self.output = output
        if not isinstance(output, ModelOutput):
            return
        values = {name: getattr(output, name) for name in {**vars(output), **output}}
        self.output = _with_fields(type(output), values)
        # Only now: to make an output, transformers looks at its fields, and keeps a record of its class.
        object.__setattr__(self.output, "__class__", _watching(type(output), values.keys(), self.fields))


def _watching(kind: type[ModelOutput], known: Set[str], looked: list[str]) -> type[ModelOutput]:
    """A subclass that adds to ``looked`` the name of each field in ``known`` that is read, once."""

    def getattribute(self: Any, name: str) -> Any:
        if name in known and name not in looked:
            looked.append(name)
        return object.__getattribute__(self, name)

    def getitem(self: Any, key: Any) -> Any:
        return getattr(self, key if isinstance(key, str) else list(self.keys())[key])

    return type(f"Watched{kind.__name__}", (kind,), {"__getattribute__": getattribute, "__getitem__": getitem})
