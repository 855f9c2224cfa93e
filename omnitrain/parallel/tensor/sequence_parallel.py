"""Megatron's sequence parallelism: between regions, each tensor parallel rank has a slice of the tokens.

The regions of a block are its children that have children, such as attention and MLP. Before a region, tokens are
all-gathered; after it, each rank takes its slice. If a region ends in a rowwise matrix, a reduce-scatter replaces the
all-reduce. Norms and residual sums run on slices; the gradients of norms are therefore partial, and are summed over the
ranks like the gradients of all replicated parameters (``replicated_grads.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.ops.collectives import gather_rows, scatter_rows
from omnitrain.recipe.globs import any_layer
from omnitrain.recipe.parallel import FOUNDATION


@dataclass(frozen=True)
class TokenShare:
    """The consecutive slices of a pack: the number of tokens of each rank of ``group``."""

    counts: tuple[int, ...]
    group: dist.ProcessGroup

    def cut(self, whole: Tensor) -> Tensor:
        """Take this rank's slice of a replicated tensor: ``[1, T, ...] -> [1, local tokens, ...]``."""
        first = sum(self.counts[: self.group.rank()])
        return whole[:, first : first + self.counts[self.group.rank()]].clone()  # a view would keep the whole alive

    def gather(self, own: Tensor) -> Tensor:
        """All-gather: ``[1, local tokens, ...] -> [1, T, ...]``."""
        return gather_rows(own[0], self.counts, self.group)[None]

    def scatter(self, part: Tensor) -> Tensor:
        """Reduce-scatter: ``[1, T, ...] -> [1, local tokens, ...]``."""
        return scatter_rows(part[0], self.counts, self.group)[None]


_divided: ContextVar[TokenShare | None] = ContextVar("tokens_divided", default=None)


def tokens_divided() -> TokenShare | None:
    """Return the token slices of the running blocks; None: tokens are not divided."""
    return _divided.get()


@contextmanager
def dividing(share: TokenShare | None) -> Iterator[None]:
    """Set the value of :func:`tokens_divided` for a recompute."""
    token = _divided.set(share)
    try:
        yield
    finally:
        _divided.reset(token)


@dataclass(frozen=True)
class TokenSharding:
    """Whether sequence parallelism divides the tokens of a model."""

    problem: str = ""  # why it does not; empty: it does
    ends: frozenset[str] = frozenset()  # layer-independent names of the rowwise matrices that end a region

    def ends_in(self, names: Iterable[str]) -> list[str]:
        """Return the module names that belong to ``ends``."""
        ends = () if self.problem else self.ends
        return [name for name in names if any_layer(name.removeprefix(f"{FOUNDATION}.")) in ends]

    def __str__(self) -> str:
        return f"tokens whole on each tp rank: {self.problem}" if self.problem else "tokens divided over tp"


def apply_sequence_parallel(
    model: PreTrainedModel,
    ends: Iterable[nn.Module],
    group: dist.ProcessGroup,
    spans: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Divide tokens among the ranks of ``group`` between the regions of the text decoder's blocks, in training.

    ``model`` has tensor parallelism; the modules in ``ends`` have the forward ``forwards.rows_of_region``, and end a
    region with a partial sum. ``spans`` has the first block and the block after the last one of each pipeline stage,
    which takes and returns all tokens; None: one stage.
    """
    blocks = text_blocks(model)
    last = set(ends)

    def begin(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        _divided.set(_share_of(block, _first(args, kwargs), group))
        return _with_first(args, kwargs, TokenShare.cut)

    def whole(region: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return _with_first(args, kwargs, TokenShare.gather)

    def end(block: nn.Module, args: Any, output: Any) -> Any:
        gathered = _with_first_of(output, TokenShare.gather)
        _divided.set(None)
        return gathered

    for start, stop in spans or ((0, len(blocks)),):
        blocks[start].register_forward_pre_hook(begin, with_kwargs=True)
        blocks[stop - 1].register_forward_hook(end)
    for block in blocks:
        for region in regions_of(block):
            is_sum = not last.isdisjoint(region.modules())
            take = TokenShare.scatter if is_sum else TokenShare.cut
            region.register_forward_pre_hook(whole, with_kwargs=True)
            region.register_forward_hook(lambda _, __, output, take=take: _with_first_of(output, take))


def regions_of(block: nn.Module) -> list[nn.Module]:
    """Return the regions of a block, which see all tokens: its children that have children."""
    return [child for child in block.children() if any(True for _ in child.children())]


@contextmanager
def ends_of(
    blocks: Iterable[nn.Module], styles: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> Iterator[set[str]]:
    """Yield names (of any layer), filled by forwards, of rowwise matrices whose product a region returns unchanged."""
    ends: set[str] = set()
    products: dict[str, Tensor] = {}
    names = {modules[name]: name for name, style in styles.items() if style == "rowwise" and name in modules}

    def keep(name: str) -> Any:
        return lambda module, args, output: products.update({name: output})

    def compare(inside: Sequence[str]) -> Any:
        def hook(region: nn.Module, args: Any, output: Any) -> None:
            returned = output if isinstance(output, Tensor) else output[0]
            ends.update(any_layer(name) for name in inside if products.pop(name, None) is returned)

        return hook

    with ExitStack() as hooks:
        for module, name in names.items():
            hooks.enter_context(module.register_forward_hook(keep(name)))
        for region in (region for block in blocks for region in regions_of(block)):
            inside = [names[module] for module in region.modules() if module in names]
            hooks.enter_context(region.register_forward_hook(compare(inside)))
        yield ends


def _share_of(block: nn.Module, hidden: Tensor, group: dist.ProcessGroup) -> TokenShare | None:
    """None in evaluation and generation, for batches of several rows, and for too few tokens."""
    ranks = group.size()
    is_row = hidden.ndim == 3 and hidden.size(0) == 1 and hidden.size(1) >= ranks
    if not (block.training and torch.is_grad_enabled() and is_row):
        return None
    least, more = divmod(hidden.size(1), ranks)
    return TokenShare(tuple(least + (rank < more) for rank in range(ranks)), group)


def _first(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _with_first(args: Any, kwargs: dict[str, Any], change: Any) -> Any:
    """The arguments with the first tensor changed."""
    share = _divided.get()
    if share is None:
        return None
    first = _first(args, kwargs)

    def changed(value: Any) -> Any:
        return change(share, first) if value is first else value

    return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}


def _with_first_of(output: Any, change: Any) -> Any:
    share = _divided.get()
    if share is None:
        return None
    return change(share, output) if isinstance(output, Tensor) else (change(share, output[0]), *output[1:])
