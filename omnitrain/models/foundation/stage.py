"""A pipeline stage of a foundation: its own forward, in which the blocks of other stages pass their input through.

A cut is the *input* of a block, so what the model does between two blocks (deepstack) belongs to the stage before the
cut. In the module list, shallow copies stand for the blocks of other stages: they have the block's attributes, but not
its forward and its hooks. Everything that a stage remembers belongs to one call: several micro-batches may be in
flight, and a recomputation calls its block directly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
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

    def media(self, native: Mapping[str, MediaFeatures]) -> dict[str, MediaFeatures]:
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
    def inside(self, model: PreTrainedModel, blocks: StagedBlocks) -> Iterator[None]:
        """Let the next forward of ``model`` run this stage of ``blocks`` alone; it ends inside ``model``."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._without_embedding(model), blocks.running(self):
                try:
                    return model.forward(*args, **kwargs)
                except _CutReachedError as cut:
                    return cut.hidden

        with wrapped_forward(model, forward):
            yield

    def _without_embedding(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        if self.embeds or self.arrived is None:
            return nullcontext()
        embedding: Any = model.get_input_embeddings()
        # Zeros that take no memory: masks and positions need their shape and dtype.
        zero, width = self.arrived.detach().new_zeros(()), embedding.weight.size(1)
        return wrapped_forward(embedding, lambda ids: zero.expand(*ids.shape, width))

    def begin(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the first block of the stage with the hidden states that arrived, in place of those among ``args``."""
        former = hidden_among(args, kwargs)

        def swapped(value: Any) -> Any:
            return self.arrived if value is former else value

        return block(*map(swapped, args), **{name: swapped(value) for name, value in kwargs.items()})


class StagedBlocks:
    """The blocks of a foundation, and what stands for them in the forwards of other stages, made once."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.blocks = blocks
        self._passing: dict[str, nn.Module] = {}
        self._ending: dict[str, nn.Module] = {}

    @contextmanager
    def running(self, call: StageCall) -> Iterator[None]:
        """Run only the blocks of a stage in the next forward, which ends before the block after them."""
        children, span = children_of(self.blocks), call.span
        before = dict(children)
        first, after = str(span.start), str(span.stop)
        try:
            for index in map(str, range(span.start)):
                if index not in self._passing:
                    self._passing[index] = _stand_in(before[index], partial(_pass, call.contract))
                children[index] = self._passing[index]
            if call.arrived is not None:
                children[first] = _stand_in(before[first], partial(call.begin, before[first]))
            if not span.is_last:
                if after not in self._ending:
                    self._ending[after] = _stand_in(before[after], _end)
                children[after] = self._ending[after]
            yield
        finally:
            children.update(before)


class _CutReachedError(StopRunError):
    """Ends a forward at a cut."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _pass(contract: StageContract, *args: Any, **kwargs: Any) -> Any:
    return contract.block_output(hidden_among(args, kwargs))


def _end(*args: Any, **kwargs: Any) -> Any:
    raise _CutReachedError(hidden_among(args, kwargs))


def hidden_among(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a block: the first tensor."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _stand_in(block: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A shallow copy of a block with another forward, and without hooks."""
    stand_in: nn.Module = object.__new__(type(block))  # FSDP's classes make no copies
    vars(stand_in).update(vars(block))
    vars(stand_in).update({name: OrderedDict() for name in _HOOKS})
    vars(stand_in).update(forward=forward)
    set_compiled_call(stand_in, None)
    return stand_in
