"""Count the memory and the work of what a rank runs: of real tensors, or of tensors without content, by one rule.

Memory is what storages hold: a storage counts from the operation that made it until Python frees it, at its size.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from omnitrain.torch_private import (
    GROUPED_MM,
    FakeTensor,
    TorchDispatchMode,
    group_of_name,
    key_of_storage,
    packet_of,
    schema_of,
)


class Op(NamedTuple):
    """Operations of equal cost on one device."""

    flops: int  # of a product of matrices, or of attention; 0: the operation is bound by memory
    num_bytes: int  # that it reads and writes
    width: int = 0  # of a product: its shortest side, on which its efficiency depends


class Collective(NamedTuple):
    """Collectives of equal cost."""

    kind: str  # `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast` or `send`
    num_bytes: int  # of the whole tensor: gathered, before the scatter, reduced; of what this rank sends to all
    ranks: tuple[int, ...]  # global ranks of the group
    is_waited_for: bool  # whether the compute stream waits for it at once; FSDP's run beside it


class Mark(NamedTuple):
    """A moment: the work since the mark before it, bytes alive now, and the most since then."""

    work: Counter[Op | Collective]
    alive: int
    peak: int


_KINDS = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}


_OF_FSDP = ("_allgather_base_", "_reduce_scatter_base_")


class RankMeter(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        alive: bytes of all storages that it has seen and that still exist.
        peak: the most since the last mark.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._work: Counter[Op | Collective] = Counter()
        self._sizes: dict[int, int] = {}

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already; of a DTensor, this rank's shard."""
        for tensor in tensors:
            self._see(_local(tensor))

    def mark(self) -> Mark:
        """Return the moment, and begin to count from it."""
        found = Mark(self._work, self.alive, self.peak)
        self._work, self.peak = Counter(), self.alive
        return found

    def add(self, op: Op) -> None:
        """Add an operation that is not run."""
        self._work[op] += 1

    def __enter__(self) -> RankMeter:
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (key := key_of_storage(storage)) in self._sizes:
                self._set(key, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]  # no dispatch tells of it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = list(_tensors(out))
        for tensor in made:
            self._see(tensor)
        if "c10d" in func.namespace:
            collective = _collective(func, args, kwargs)
            if collective is not None:
                self._work[collective] += 1
        elif not _is_view(func):
            self._work[_op(func, args, kwargs, out, made)] += 1
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = key_of_storage(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._drop, key)
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.alive += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.alive)

    def _drop(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)


@cache
def _is_view(func: Any) -> bool:
    returns = schema_of(func).returns
    views = (one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return bool(returns) and all(views)


def _tensors(*values: Any) -> Iterator[Tensor]:
    return (_local(leaf) for leaf in leaves(values) if isinstance(leaf, Tensor))


def leaves(value: Any) -> Iterator[Any]:
    """Yield what is in the arguments or the result of an operation, in which only lists, tuples and dicts nest."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for one in value:
        yield from leaves(one)


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, whose own storage has the size of the whole one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _op(func: Any, args: Any, kwargs: Any, out: Any, made: list[Tensor]) -> Op:
    read = list(_tensors(args, kwargs))
    num_bytes = sum(tensor.nbytes for tensor in (*read, *made) if isinstance(tensor, FakeTensor) or not tensor.is_meta)
    packet = packet_of(func)
    if packet is GROUPED_MM:
        left, right = args[:2]
        return Op(2 * left.numel() * right.size(-1), num_bytes, min(left.size(-1), right.size(-1)))
    formula = flop_registry.get(packet)
    if formula is None:
        return Op(0, num_bytes)
    sides = [side for tensor in read if tensor.ndim > 1 for side in tensor.shape[-2:]]
    return Op(int(formula(*args, **kwargs, out_val=out)), num_bytes, min(sides, default=1))


def _collective(func: Any, args: Any, kwargs: Any) -> Collective | None:
    called = packet_of(func).__name__
    name = called.strip("_")
    kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
    if kind is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(_group(args, kwargs)))
    sizes = [sum(tensor.nbytes for tensor in _tensors(value)) for value in args]
    return Collective(kind, max(sizes, default=0), ranks, called not in _OF_FSDP)


def _group(args: Any, kwargs: Any) -> dist.ProcessGroup:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:
                continue
    name: Any = next(value for value in reversed(args) if isinstance(value, str))
    return group_of_name(name)
