"""Between blocks, each tensor parallel rank has some of the tokens: norms and residual sums are divided, too.

A block is a stream of rows with regions in it: the modules that have modules of their own, such as attention and MLP.
Before a region tokens are gathered, behind it each rank takes its own of them. Where a region ends in a matrix cut by
rows, that is the sum of all ranks' parts (a reduce-scatter in place of an all-reduce). Norms of the stream have
gradients of a rank's tokens, which add up over ranks as those of everything that all of them hold (``gradients.py``).
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
    """The tokens of a row that each rank has, one run behind the other.

    Attributes:
        counts: of each rank.
        group: the ranks.
    """

    counts: tuple[int, ...]
    group: dist.ProcessGroup

    def cut(self, whole: Tensor) -> Tensor:
        """``[1, T, ...] -> [1, own tokens, ...]``, of what all ranks hold alike."""
        first = sum(self.counts[: self.group.rank()])
        return whole[:, first : first + self.counts[self.group.rank()]].clone()  # a view would keep all of it

    def gather(self, own: Tensor) -> Tensor:
        """``[1, own tokens, ...] -> [1, T, ...]``."""
        return gather_rows(own[0], self.counts, self.group)[None]

    def scatter(self, part: Tensor) -> Tensor:
        """``[1, T, ...] -> [1, own tokens, ...]`` of the sum of what the ranks have."""
        return scatter_rows(part[0], self.counts, self.group)[None]


_divided: ContextVar[TokenShare | None] = ContextVar("tokens_divided", default=None)


def tokens_divided() -> TokenShare | None:
    """How tokens are divided between the blocks that are running; None: they are not."""
    return _divided.get()


@contextmanager
def dividing(share: TokenShare | None) -> Iterator[None]:
    """For a recomputation: what :func:`tokens_divided` was."""
    token = _divided.set(share)
    try:
        yield
    finally:
        _divided.reset(token)


@dataclass(frozen=True)
class TokenSharding:
    """Whether the tokens of a model are divided.

    Attributes:
        problem: why not; empty: they are.
        ends: names, for all layers, of the matrices by which a region ends.
    """

    problem: str = ""
    ends: frozenset[str] = frozenset()

    def ends_in(self, names: Iterable[str]) -> list[str]:
        """Which of the names of a model's modules are of these."""
        ends = () if self.problem else self.ends
        return [name for name in names if any_layer(name.removeprefix(f"{FOUNDATION}.")) in ends]

    def __str__(self) -> str:
        return f"tokens whole on each tp rank: {self.problem}" if self.problem else "tokens divided over tp"


def divide_tokens(model: PreTrainedModel, ends: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Let each rank of ``group`` have some of the tokens between the blocks of the text decoder, in training.

    Args:
        model: whose matrices are cut, those of ``ends`` by ``forwards.rows_of_region``.
        ends: by which a region ends with each rank's part of a sum.
        group: ranks that hold the same rows.
    """
    blocks = text_blocks(model)
    last = set(ends)

    def begin(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        _divided.set(_share_of(block, _first(args, kwargs), group))
        return _with_first(args, kwargs, TokenShare.cut)

    def whole(region: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return _with_first(args, kwargs, TokenShare.gather)

    def end(block: nn.Module, args: Any, output: Any) -> Any:
        made = _with_first_of(output, TokenShare.gather)
        _divided.set(None)
        return made

    blocks[0].register_forward_pre_hook(begin, with_kwargs=True)
    blocks[-1].register_forward_hook(end)
    for block in blocks:
        for region in regions_of(block):
            is_sum = not last.isdisjoint(region.modules())
            own = TokenShare.scatter if is_sum else TokenShare.cut
            region.register_forward_pre_hook(whole, with_kwargs=True)
            region.register_forward_hook(lambda _, __, output, own=own: _with_first_of(output, own))


def regions_of(block: nn.Module) -> list[nn.Module]:
    """The modules of a block that see whole rows: those that have modules of their own."""
    return [child for child in block.children() if any(True for _ in child.children())]


@contextmanager
def ends_of(
    blocks: Iterable[nn.Module], styles: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> Iterator[set[str]]:
    """Of forwards inside: for all layers, the matrices of style ``rowwise`` whose product a region returns as it is.

    Args:
        blocks: of a decoder.
        styles: name of a module -> style.
        modules: name -> module.
    """
    found: set[str] = set()
    products: dict[str, Tensor] = {}
    names = {modules[name]: name for name, style in styles.items() if style == "rowwise" and name in modules}

    def keep(name: str) -> Any:
        return lambda module, args, output: products.update({name: output})

    def compare(inside: Sequence[str]) -> Any:
        def hook(region: nn.Module, args: Any, output: Any) -> None:
            made = output if isinstance(output, Tensor) else output[0]
            found.update(any_layer(name) for name in inside if products.pop(name, None) is made)

        return hook

    with ExitStack() as hooks:
        for module, name in names.items():
            hooks.enter_context(module.register_forward_hook(keep(name)))
        for region in (region for block in blocks for region in regions_of(block)):
            inside = [names[module] for module in region.modules() if module in names]
            hooks.enter_context(region.register_forward_hook(compare(inside)))
        yield found


def _share_of(block: nn.Module, hidden: Tensor, group: dist.ProcessGroup) -> TokenShare | None:
    """None in evaluation and generation, for several rows, and where there are too few tokens."""
    ranks = group.size()
    is_row = hidden.ndim == 3 and hidden.size(0) == 1 and hidden.size(1) >= ranks
    if not (block.training and torch.is_grad_enabled() and is_row):
        return None
    least, more = divmod(hidden.size(1), ranks)
    return TokenShare(tuple(least + (rank < more) for rank in range(ranks)), group)


def _first(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _with_first(args: Any, kwargs: dict[str, Any], change: Any) -> Any:
    """Arguments, the first tensor among them changed."""
    share = _divided.get()
    if share is None:
        return None
    first = _first(args, kwargs)

    def own(value: Any) -> Any:
        return change(share, first) if value is first else value

    return tuple(map(own, args)), {name: own(value) for name, value in kwargs.items()}


def _with_first_of(output: Any, change: Any) -> Any:
    share = _divided.get()
    if share is None:
        return None
    return change(share, output) if isinstance(output, Tensor) else (change(share, output[0]), *output[1:])
