"""Flatten the output of a feature method to features ``[n, hidden]``, and rebuild the object the forward expects."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from omnitrain.errors import UserError
from omnitrain.ops.host_values import to_device
from omnitrain.torch_private import tree_iter


@dataclass(frozen=True)
class _Rows:
    """Marks a tensor of features: its name, number of dims, and the type of the sequence that holds its pieces."""

    name: str
    ndim: int
    pieces: type | None


@dataclass(frozen=True)
class _Validity:
    """Marks a mask over features; ``valid`` is its value for valid ones. Flat features are all valid."""

    valid: bool
    dtype: torch.dtype
    ndim: int


@dataclass(frozen=True)
class _Shared:
    """Marks a tensor that is not per feature (the same for all items of a call)."""

    name: str


@dataclass(frozen=True)
class RowLayout:
    """How to rebuild a feature method's output from flat features."""

    output: type | None  # class of the output (``None``: it is no :class:`ModelOutput`)
    fields: dict[str, Any]  # field -> nested lists and tuples, in which marks stand for tensors
    names: tuple[str, ...]  # names of the tensors with one row per placeholder, the main one first
    shared: tuple[str, ...]  # names of the tensors that are not per feature
    joined: bool = True  # whether all items form one piece (False: one piece per item)


@dataclass(frozen=True)
class MediaFeatures:
    """The features of some items of one modality."""

    main: Tensor  # ``[rows, hidden]``, the features that replace the placeholders
    side: dict[str, Tensor]  # further tensors ``[rows, ...]`` by name (deepstack levels, labels of a decoder, ...)
    shared: dict[str, Tensor]  # tensors that are not per feature, by name (the same for every call)
    counts: tuple[int, ...]  # number of features of each item; their sum is ``rows``
    layout: RowLayout  # how the model's forward expects them

    def __post_init__(self) -> None:
        assert sum(self.counts) == self.main.size(0)

    @staticmethod
    def cat(calls: Sequence[MediaFeatures]) -> MediaFeatures:
        """Concatenate the features of several calls, in order, in the layout of the first."""
        assert calls
        if len(calls) == 1:
            return calls[0]
        tensors = [torch.cat(rows) for rows in zip(*(call.tensors() for call in calls), strict=True)]
        return calls[0].with_tensors(tensors, [count for call in calls for count in call.counts])

    def at(self, index: Tensor) -> MediaFeatures:
        """Select features as one item. ``index``: ``[n]`` int64, on the host, may be empty."""
        index = to_device(index, self.main.device)
        return replace(
            self,
            main=self.main.index_select(0, index),
            side={name: tensor.index_select(0, index) for name, tensor in self.side.items()},
            counts=(index.numel(),),
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors with one row per placeholder: ``main``, then the values of ``side``."""
        return [self.main, *self.side.values()]

    def with_tensors(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> MediaFeatures:
        """Return the same layout with other tensors (in the order of ``tensors()``), such as received from ranks."""
        return replace(self, main=tensors[0], side=dict(zip(self.side, tensors[1:], strict=True)), counts=tuple(counts))

    def with_rows(self, tensors: Sequence[Tensor]) -> MediaFeatures:
        """Return the same layout with other tensors, as one item; see :meth:`with_tensors`."""
        return self.with_tensors(tensors, (len(tensors[0]),))

    def without_items(self) -> MediaFeatures:
        """Return the form of these features without any item."""
        return self.with_tensors([tensor.new_empty(0, *tensor.shape[1:]) for tensor in self.tensors()], ())

    def only(self, names: Collection[str]) -> MediaFeatures:
        """Return features in which zeros without memory replace all tensors but these (names of the layout)."""
        kept = [
            tensor if name in names else tensor.detach().new_zeros(()).expand(tensor.shape)
            for name, tensor in zip(self.layout.names, self.tensors(), strict=True)
        ]
        return self.with_tensors(kept, self.counts)

    def as_output(self) -> Any:
        """Return the output of the feature method for these items in one call."""
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
    """Raise UserError unless each item has as many features as placeholders; transformers accepts surplus ones."""
    if len(expected) != len(got):
        raise UserError(f"{len(got)} {modality} items were encoded, but the samples have {len(expected)}")
    wrong = [
        f"  sample {sample}: {num_placeholders} {modality} placeholders, {num_features} features"
        for sample, num_placeholders, num_features in zip(samples, expected, got, strict=True)
        if num_placeholders != num_features
    ]
    if wrong:
        raise UserError(f"{modality} features do not match their placeholders:\n" + "\n".join(wrong))


def describe(output: Any, used: Sequence[str], rows: int, *, joined: bool = True) -> RowLayout | None:
    """Return the layout of an output with ``rows`` features; None: no tensor in the fields ``used`` has as many."""
    values = _fields(output, used)
    masks: dict[torch.Size, _Validity] = {}
    for value, valid in product(filter(_is_mask, values.values()), (True, False)):
        if int((value.bool() == valid).sum()) == rows:
            masks.setdefault(value.shape, _Validity(valid, value.dtype, value.ndim))
    fields = {name: _node(value, name, rows, masks) for name, value in values.items()}
    names, shared = (tuple(m.name for m in tree_iter(fields) if isinstance(m, kind)) for kind in (_Rows, _Shared))
    kind = type(output) if isinstance(output, ModelOutput) else None
    return RowLayout(kind, fields, names, shared, joined) if names else None


def flatten(output: Any, layout: RowLayout) -> MediaFeatures:
    """Flatten an output of this layout; if it has no pieces per item, all features count as one item."""
    values = _fields(output, tuple(layout.fields))
    tensors: dict[str, Tensor] = {}
    splits: list[tuple[int, ...]] = []
    nodes = ((values[name], node) for name, node in layout.fields.items() if isinstance(node, _Validity))
    mask = next((value.bool() == node.valid for value, node in nodes), None)
    for name, node in layout.fields.items():
        _collect(values[name], node, mask, tensors, splits)
    main, *side = layout.names
    rows = tensors[main].size(0)
    counts = next((split for split in splits if sum(split) == rows), (rows,))
    return MediaFeatures(
        tensors[main],
        {name: tensors[name] for name in side},
        {name: tensors[name] for name in layout.shared},
        counts,
        layout,
    )


def row_numbers(output: Any, used: Sequence[str]) -> Iterator[int]:
    """Yield the numbers of features that an output may have, the likeliest first."""
    values = _fields(output, used).values()
    for value in values:
        yield from _row_numbers(value)
    for mask in filter(_is_mask, values):
        yield int(mask.bool().sum())
        yield int((~mask.bool()).sum())


def _row_numbers(value: Any) -> Iterator[int]:
    if _is_rows(value):
        yield _num_rows(value)
    elif isinstance(value, (list, tuple)) and value:
        if all(_is_rows(item) for item in value):
            yield sum(_num_rows(item) for item in value)
        for item in value:
            yield from _row_numbers(item)


def _with_fields(output: type, values: dict[str, Any]) -> Any:
    """Build an output object; some models add attributes that its class does not declare."""
    declared = values.keys() & inspect.signature(output).parameters.keys()
    result = output(**{name: values[name] for name in declared})
    for name in set(values) - declared:
        setattr(result, name, values[name])
    return result


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


def _node(value: Any, name: str, rows: int, masks: dict[torch.Size, _Validity]) -> Any:
    if isinstance(value, Tensor):
        if _is_rows(value) and (_num_rows(value) == rows or value.shape[:-1] in masks):
            return _Rows(name, value.ndim, None)
        return masks[value.shape] if value.shape in masks and _is_mask(value) else _Shared(name)
    if isinstance(value, (list, tuple)) and value:
        if all(_is_rows(item) for item in value) and sum(_num_rows(item) for item in value) == rows:
            return _Rows(name, value[0].ndim, tuple if isinstance(value, tuple) else list)
        return type(value)(_node(v, f"{name}.{i}", rows, masks) for i, v in enumerate(value))
    return value


def _collect(
    value: Any, node: Any, mask: Tensor | None, tensors: dict[str, Tensor], splits: list[tuple[int, ...]]
) -> None:
    """Add flat tensors to ``tensors``, and the numbers of features per piece to ``splits``."""
    if isinstance(node, _Shared):
        tensors[node.name] = value
    elif isinstance(node, _Rows):
        if node.pieces is not None:
            pieces = [piece.reshape(-1, piece.size(-1)) for piece in value]
            splits.append(tuple(piece.size(0) for piece in pieces))
            tensors[node.name] = torch.cat(pieces)
        elif mask is not None and value.shape[:-1] == mask.shape:
            splits.append(tuple(mask.sum(-1).tolist()))
            tensors[node.name] = value[mask]
        else:
            tensors[node.name] = value.reshape(-1, value.size(-1))
            if value.ndim > 2:
                splits.append((_num_rows(value[0]),) * value.size(0))
    elif isinstance(node, (list, tuple)):
        for inner, child in zip(value, node, strict=True):
            _collect(inner, child, mask, tensors, splits)


def watched(output: Any) -> tuple[Any, list[str]]:
    """Return an output to pass to the model instead of this one, and the names of its fields read so far, in order."""
    read: list[str] = []
    if not isinstance(output, ModelOutput):
        return output, read
    values = {name: getattr(output, name) for name in {**vars(output), **output}}
    watching = _with_fields(type(output), values)
    # Change the class last: the constructor reads the fields, and transformers registers the class.
    object.__setattr__(watching, "__class__", _watching(type(output), values.keys(), read))
    return watching, read


def _watching(kind: type[ModelOutput], known: Set[str], read: list[str]) -> type[ModelOutput]:
    """A subclass that adds to ``read`` the name of each field in ``known`` that is read, once."""

    def getattribute(self: Any, name: str) -> Any:
        if name in known and name not in read:
            read.append(name)
        return object.__getattribute__(self, name)

    def getitem(self: Any, key: Any) -> Any:
        return getattr(self, key if isinstance(key, str) else list(self.keys())[key])

    return type(f"Watched{kind.__name__}", (kind,), {"__getattribute__": getattribute, "__getitem__": getitem})
