"""Record the routers' decisions of one run per sample, and replay them in another run of the same samples.

Two runs that differ only in rounding may route a token differently if two experts are nearly tied, and then later
results are not comparable. With replay, both runs send every token to the same experts; each computes its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from omnitrain.ops.experts.routing_tape import is_top_k, top_k_at
from omnitrain.ops.experts.weights import experts_in

NEAR = 1e-4  # relative to a token's largest score: the most that rounding changes a difference of scores

# (layer, number of the `topk` in it, sample) -> [tokens of the sample, k] experts, or groups of them
Decisions = dict[tuple[str, int, str], Tensor]


@dataclass
class Replayed:
    """The decisions that a replay changed. The counts stay on the device until they are read.

    Attributes:
        near_ties: number of tokens of a layer whose choice had nearly the same score.
        others: number of tokens whose choice had another score: the runs do not compute the same.
    """

    near_ties: Tensor | int = 0
    others: Tensor | int = 0


@dataclass
class Recording:
    """Decisions of all layers about the tokens of any number of samples; -1 for tokens that are on other ranks."""

    decisions: Decisions = field(default_factory=dict)

    @contextmanager
    def recorded(
        self, model: nn.Module, ids: Sequence[str], lengths: Sequence[int], rows: Tensor | None = None
    ) -> Iterator[None]:
        """Record the decisions of the forward inside, on a row of these samples end to end; see :meth:`replayed`."""
        kept: list[tuple[tuple[str, int], Tensor]] = []
        here = _here(lengths, rows)

        def keep(key: tuple[str, int], own: Tensor, scores: Tensor) -> Tensor:
            kept.append((key, own))
            return own

        with _LayersOf(model, len(here), keep):
            yield
        for key, own in kept:  # after the forward, so it waits for the device only once
            row = _row(lengths, here, own.size(-1))
            row[here] = own.cpu()
            for sample, part in zip(ids, row.narrow(0, 0, sum(lengths)).split(list(lengths)), strict=True):
                self.decisions[*key, sample] = part

    @contextmanager
    def replayed(
        self, model: nn.Module, ids: Sequence[str], lengths: Sequence[int], rows: Tensor | None = None
    ) -> Iterator[Replayed]:
        """Replay the recorded decisions in the forward inside; samples without a recording are routed as usual.

        Args:
            model: the recorded model, on any layout.
            ids: ids of the samples of the row.
            lengths: numbers of tokens of the samples.
            rows: ``[t]`` int64, the tokens of the row on this rank; None: all.
        """
        found = Replayed()
        here = _here(lengths, rows)

        def replace(key: tuple[str, int], own: Tensor, scores: Tensor) -> Tensor:
            taken = self._at(key, ids, lengths, here, own)
            differs = (taken.sort(-1)[0] != own.sort(-1)[0]).any(-1)
            gap = scores.gather(-1, own).sort(-1)[0] - scores.gather(-1, taken).sort(-1)[0]
            is_near = gap.abs().amax(-1) <= NEAR * scores.where(scores.isfinite(), 0).abs().amax(-1)
            found.near_ties += (differs & is_near).sum()
            found.others += (differs & ~is_near).sum()
            return taken

        with _LayersOf(model, len(here), replace):
            yield found

    def _at(
        self, key: tuple[str, int], ids: Sequence[str], lengths: Sequence[int], here: Tensor, own: Tensor
    ) -> Tensor:
        """What was recorded for the tokens ``here`` of a row, and ``own`` for the others."""
        whole = _row(lengths, here, own.size(-1))
        for sample, rows in zip(ids, whole.narrow(0, 0, sum(lengths)).split(list(lengths)), strict=True):
            if (recorded := self.decisions.get((*key, sample))) is not None:
                rows.copy_(recorded)
        taken = whole[here].to(own.device)
        return taken.where(taken >= 0, own)


def _here(lengths: Sequence[int], rows: Tensor | None) -> Tensor:
    """``[t]`` int64 on the host: the tokens of a row that are here."""
    return torch.arange(sum(lengths)) if rows is None else rows.cpu()


def _row(lengths: Sequence[int], here: Tensor, num_slots: int) -> Tensor:
    """``[T, k]`` for the experts of a row's tokens, all unknown; a row that was filled up has more than its samples."""
    return torch.full((max(sum(lengths), int(here.max()) + 1), num_slots), -1)


class _LayersOf(TorchFunctionMode):
    """Shows ``decide`` each ``topk`` over scores of all tokens, inside modules that have experts; its result is taken.

    ``decide((layer, number), own, scores)``: own choice ``[T, k]`` and scores ``[T, n]`` -> ``[T, k]``.
    """

    def __init__(self, model: nn.Module, num_tokens: int, decide: Any) -> None:
        super().__init__()
        self._model, self._num_tokens, self._decide = model, num_tokens, decide
        self._layer: list[tuple[str, Iterator[int]]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> _LayersOf:
        for name in {name.rpartition(".")[0] for name, _ in experts_in(self._model)}:
            layer = self._model.get_submodule(name)
            self._hooks.append(layer.register_forward_pre_hook(lambda *_, name=name: self._enter_layer(name)))
            self._hooks.append(layer.register_forward_hook(lambda *_: self._leave_layer(), always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _enter_layer(self, name: str) -> None:
        self._layer.append((name, iter(range(1_000))))

    def _leave_layer(self) -> None:
        self._layer.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not self._layer or not is_top_k(func):
            return func(*args, **given)
        with torch.no_grad():
            own = func(*args, **given).indices
            scores: Tensor = args[0] if args else given["input"]
            if scores.size(-1) * self._num_tokens != scores.numel() or own.numel() % self._num_tokens:
                return func(*args, **given)  # no decision about tokens
            name, numbers = self._layer[-1]
            flat = own.reshape(self._num_tokens, -1), scores.reshape(self._num_tokens, -1)
            taken = self._decide((name, next(numbers)), *flat).view_as(own)
        return top_k_at(taken, *args, **given)
