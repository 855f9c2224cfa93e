"""Record the routers' decisions of one run per sample, and replay them in another run of the same samples.

Two runs that differ only in rounding may route a token differently if two experts are nearly tied, and then later
results are not comparable. With replay, both runs send every token to the same experts; each computes its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
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
    """The numbers of decisions that a replay changed; they stay on the device until they are read."""

    near_ties: Tensor | int = 0  # tokens of a layer whose choice had nearly the same score
    others: Tensor | int = 0  # those whose choice had another score, so the runs do not compute the same


@dataclass
class Recording:
    """Decisions of all layers about the tokens of any number of samples; -1 for tokens that are on other ranks."""

    decisions: Decisions = field(default_factory=dict)

    @contextmanager
    def recorded(
        self, model: nn.Module, ids: Sequence[str], lengths: Sequence[int], tokens: Tensor | None = None
    ) -> Iterator[None]:
        """Record the decisions of the forward inside, on a pack of these samples; see :meth:`replayed`."""
        kept: list[tuple[tuple[str, int], Tensor]] = []
        tokens = _on_host(lengths, tokens)

        def keep(key: tuple[str, int], chosen: Tensor, scores: Tensor) -> Tensor:
            kept.append((key, chosen))
            return chosen

        with _LayersOf(model, len(tokens), keep):
            yield
        for key, chosen in kept:  # after the forward, so it waits for the device only once
            whole = _unknown(lengths, tokens, chosen.size(-1))
            whole[tokens] = chosen.cpu()
            for sample, part in zip(ids, whole.narrow(0, 0, sum(lengths)).split(list(lengths)), strict=True):
                self.decisions[*key, sample] = part

    @contextmanager
    def replayed(
        self, model: nn.Module, ids: Sequence[str], lengths: Sequence[int], tokens: Tensor | None = None
    ) -> Iterator[Replayed]:
        """Replay the recorded decisions in the forward inside; samples without a recording are routed as usual.

        ``ids`` and ``lengths`` (numbers of tokens) describe the pack's samples; ``tokens`` ``[t]`` int64 are the
        tokens of the pack on this rank; None: all.
        """
        changes = Replayed()
        tokens = _on_host(lengths, tokens)

        def replace(key: tuple[str, int], chosen: Tensor, scores: Tensor) -> Tensor:
            replayed_choice = self._at(key, ids, lengths, tokens, chosen)
            differs = (replayed_choice.sort(-1)[0] != chosen.sort(-1)[0]).any(-1)
            gap = scores.gather(-1, chosen).sort(-1)[0] - scores.gather(-1, replayed_choice).sort(-1)[0]
            is_near = gap.abs().amax(-1) <= NEAR * scores.where(scores.isfinite(), 0).abs().amax(-1)
            changes.near_ties += (differs & is_near).sum()
            changes.others += (differs & ~is_near).sum()
            return replayed_choice

        with _LayersOf(model, len(tokens), replace):
            yield changes

    def _at(
        self, key: tuple[str, int], ids: Sequence[str], lengths: Sequence[int], tokens: Tensor, chosen: Tensor
    ) -> Tensor:
        """Return the recorded experts of ``tokens``, and ``chosen`` where nothing was recorded."""
        whole = _unknown(lengths, tokens, chosen.size(-1))
        for sample, rows in zip(ids, whole.narrow(0, 0, sum(lengths)).split(list(lengths)), strict=True):
            if (recorded := self.decisions.get((*key, sample))) is not None:
                rows.copy_(recorded)
        replayed_choice = whole[tokens].to(chosen.device)
        return replayed_choice.where(replayed_choice >= 0, chosen)


def evenly_routed(model: nn.Module, num_tokens: int) -> AbstractContextManager[Any]:
    """Send the ``num_tokens`` tokens of a forward to all experts in turn, whatever the routers say."""

    def decide(_: Any, chosen: Tensor, scores: Tensor) -> Tensor:
        return torch.arange(chosen.numel(), device=chosen.device).view_as(chosen) % scores.size(-1)

    return _LayersOf(model, num_tokens, decide)


def _on_host(lengths: Sequence[int], tokens: Tensor | None) -> Tensor:
    """Return ``[t]`` int64 on the host: the tokens of a pack that are on this rank."""
    return torch.arange(sum(lengths)) if tokens is None else tokens.cpu()


def _unknown(lengths: Sequence[int], tokens: Tensor, num_slots: int) -> Tensor:
    """Return ``[T, k]`` of -1 for the experts of a pack's tokens; ``T`` includes tokens that pad the pack."""
    return torch.full((max(sum(lengths), int(tokens.max()) + 1), num_slots), -1)


# The layers with experts that run in this thread, with the numbers of their next `topk`. In another thread, a backward
# may recompute such a layer while a recorded forward runs.
_layers: ContextVar[tuple[tuple[_LayersOf, str, Iterator[int]], ...]] = ContextVar("layers_with_experts", default=())


class _LayersOf(TorchFunctionMode):
    """Replaces each ``topk`` over scores of all tokens, inside modules that have experts, by the result of ``decide``.

    ``decide((layer, number), chosen, scores)``: choice ``[T, k]`` and scores ``[T, n]`` -> ``[T, k]``.
    """

    def __init__(self, model: nn.Module, num_tokens: int, decide: Any) -> None:
        super().__init__()
        self._model, self._num_tokens, self._decide = model, num_tokens, decide
        self._hooks: list[Any] = []

    def __enter__(self) -> _LayersOf:
        # The tokens of a teacher's calls belong to other samples, or to these in another order.
        apart = tuple(f"{name}." for name, part in self._model.named_modules() if getattr(part, "is_teacher", False))
        for name in {name.rpartition(".")[0] for name, _ in experts_in(self._model) if not name.startswith(apart)}:
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
        _layers.set((*_layers.get(), (self, name, iter(range(1_000)))))

    def _leave_layer(self) -> None:
        own = [layer for layer in _layers.get() if layer[0] is self]
        _layers.set(tuple(layer for layer in _layers.get() if layer is not own[-1]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        own_layers = [layer for layer in _layers.get() if layer[0] is self]
        if not own_layers or not is_top_k(func):
            return func(*args, **given)
        with torch.no_grad():
            chosen = func(*args, **given).indices
        scores: Tensor = args[0] if args else given["input"]
        if scores.size(-1) * self._num_tokens != scores.numel() or chosen.numel() % self._num_tokens:
            return func(*args, **given)  # no decision about tokens
        _, name, numbers = own_layers[-1]
        flat = chosen.reshape(self._num_tokens, -1), scores.detach().reshape(self._num_tokens, -1)
        with torch.no_grad():
            replayed_choice = self._decide((name, next(numbers)), *flat).view_as(chosen)
        return top_k_at(replayed_choice, *args, **given)
