"""A pipeline stage of a foundation: its own forward, in which the blocks of other stages pass their input through.

A cut is the *input* of a block, so what the model does between two blocks (deepstack) belongs to the stage before the
cut. In the module list, shallow copies stand for the blocks of other stages: they have the block's attributes, but not
its forward and its hooks. Everything that a stage remembers belongs to one call: several micro-batches may be in
flight, and a recomputation calls its block directly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.models.components.contract import StageContract
from omnitrain.models.discovery import MediaFeatures
from omnitrain.models.discovery.text_run import StopRunError
from omnitrain.ops.patch_forward import wrapped_forward
from omnitrain.torch_private import children_of, set_compiled_call

_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict) and "hook" in name)


@dataclass(frozen=True)
class BlockSpan:
    """The blocks of a foundation that a stage runs."""

    start: int  # index of the first block
    stop: int  # index after the last block
    count: int  # number of blocks of the foundation

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.count:
            raise ValueError(f"blocks {self.start} to {self.stop} of {self.count}: expected 0 <= start < stop <= count")

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds the tokens."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage runs the final norm and the heads."""
        return self.stop == self.count


@dataclass(frozen=True)
class StageCall:
    """One call of a stage."""

    span: BlockSpan  # its blocks
    contract: StageContract  # how the foundation may be cut
    arrived: Tensor | None = None  # ``[1, t, hidden]``, the output of the stage before; None for the first stage

    def __post_init__(self) -> None:
        if self.span.is_first != (self.arrived is None):
            expected = "no hidden states" if self.span.is_first else "the hidden states of the stage before"
            raise ValueError(f"a stage that starts at block {self.span.start} takes {expected}")

    def media(self, native: dict[str, MediaFeatures]) -> dict[str, MediaFeatures]:
        """Return the features that this stage reads; zeros without memory stand for the others."""
        read = {}
        for modality, features in native.items():
            main, *side = features.layout.names
            names = [name for name in side if self.contract.reads(name, self.span.start, self.span.stop)]
            read[modality] = features.only([main, *names] if self.embeds else names)
        return read

    @property
    def embeds(self) -> bool:
        """Whether the stage runs the input embedding and inserts media into it."""
        return self.span.is_first or self.contract.needs_embeddings

    @contextmanager
    def inside(self, model: PreTrainedModel, blocks: nn.ModuleList) -> Iterator[None]:
        """Let the next forward of ``model`` run this stage of ``blocks`` alone; it ends inside ``model``."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._patched(model, blocks):
                try:
                    return model.forward(*args, **kwargs)
                except _CutReachedError as cut:
                    return cut.hidden

        with wrapped_forward(model, forward):
            yield

    @contextmanager
    def _patched(self, model: PreTrainedModel, blocks: nn.ModuleList) -> Iterator[None]:
        with ExitStack() as stack:
            if not self.embeds and self.arrived is not None:
                embedding: Any = model.get_input_embeddings()
                # Zeros that take no memory: masks and positions need their shape and dtype.
                zero, width = self.arrived.detach().new_zeros(()), embedding.weight.size(1)
                stack.enter_context(wrapped_forward(embedding, lambda ids: zero.expand(*ids.shape, width)))
            for index, block in enumerate(blocks):
                if (forward := self._forward_of(index, block)) is not None:
                    stack.enter_context(_standing_in(blocks, index, forward))
            yield

    def _forward_of(self, index: int, block: nn.Module) -> Callable[..., Any] | None:
        """The forward of what stands for a block; None: the block itself runs."""
        if index == self.span.stop:
            return _end
        if index == self.span.start and self.arrived is not None:
            return self._begin(block)
        if self.span.start <= index < self.span.stop:
            return None
        return lambda *args, **kwargs: self.contract.block_output(hidden_among(args, kwargs))

    def _begin(self, block: nn.Module) -> Callable[..., Any]:
        """Call the first block of the stage with the hidden states that arrived."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            former = hidden_among(args, kwargs)

            def swapped(value: Any) -> Any:
                return self.arrived if value is former else value

            return block(*map(swapped, args), **{name: swapped(value) for name, value in kwargs.items()})

        return forward


class _CutReachedError(StopRunError):
    """Ends a forward at a cut."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _end(*args: Any, **kwargs: Any) -> Any:
    raise _CutReachedError(hidden_among(args, kwargs))


def hidden_among(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a block: the first tensor."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


@contextmanager
def _standing_in(blocks: nn.ModuleList, index: int, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a shallow copy with another forward, and without hooks, stand for a block in the list."""
    block = blocks[index]
    stand_in = object.__new__(type(block))  # FSDP's classes make no copies
    vars(stand_in).update(vars(block))
    vars(stand_in).update({name: OrderedDict() for name in _HOOKS})
    vars(stand_in).update(forward=forward)
    set_compiled_call(stand_in, None)
    children_of(blocks)[str(index)] = stand_in
    try:
        yield
    finally:
        children_of(blocks)[str(index)] = block
