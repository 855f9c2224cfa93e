"""Process groups: every group is made here, and ranks that need one for the same use share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from omnitrain.torch_private import set_timeout_of_options, timeout_of

# One rank may score or write without a time limit. Gloo notices a dead rank at once, the monitor a stalled run.
PATIENCE = timedelta(days=7)

# Groups by use and ranks, on their members and on all others, so that all ranks make the same ones next.
_Made = dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None]
_shared: WeakKeyDictionary[dist.ProcessGroup, _Made] = WeakKeyDictionary()  # they end with the default group


def new_group(
    ranks: Sequence[int],
    name: str,
    backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    high_priority: bool = False,
    max_ctas: int | None = None,
) -> dist.ProcessGroup | None:
    """Make a process group of global ranks; None on other ranks. All ranks call it, in one order.

    Torch's ``use_local_synchronization`` would spare other ranks the call, but it names a group after the number of
    groups that a rank is in, which differs: the first stage of a pipeline is in fewer than the second.

    Where ``init_process_group(device_id=...)`` has bound a GPU, torch lets the ranks that are not in a new group take
    part in a split of NCCL's communicator, for which those in a gloo group never come (pytorch#197568). So the GPU is
    not bound meanwhile. ``backend``, ``timeout``: None: the default group's; ``high_priority``: of NCCL's streams;
    ``max_ctas``: the most multiprocessors that a kernel of NCCL occupies; None: NCCL's default.
    """
    if timeout is None and dist.group.WORLD is not None:  # torch itself gives 10 or 30 minutes, whatever the user set
        timeout = timeout_of(dist.group.WORLD)
    if dist.group.WORLD is not None and dist.get_backend() == "fake":  # ranks of parallel/fake_world.py
        backend = "fake"
    uses_nccl = "nccl" in (backend or dist.get_backend_config())
    options = _nccl_options(high_priority, max_ctas, timeout) if uses_nccl else None
    with _unbound():
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options, group_desc=name)
    return group if dist.get_rank() in ranks else None


def shared_group(use: str, ranks: Sequence[int], name: str, **settings: Any) -> dist.ProcessGroup | None:
    """Return the group of ranks for a ``use``, which the first call of all ranks makes, always with equal settings."""
    made = _shared.setdefault(dist.group.WORLD, {}) if dist.group.WORLD is not None else {}
    key = (use, tuple(ranks))
    if key not in made:
        made[key] = new_group(ranks, name, **settings)
    return made[key]


def _nccl_options(high_priority: bool, max_ctas: int | None, timeout: timedelta | None) -> Any:
    """Options of NCCL's part of a group; None: none differ from torch's. Torch warns of two different timeouts."""
    if not high_priority and max_ctas is None:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    if timeout is not None:
        set_timeout_of_options(options, timeout)
    return options


@contextmanager
def _unbound() -> Iterator[None]:
    """Bind no GPU to the default group meanwhile."""
    world: Any = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is not None:
        world.bound_device_id = None
    try:
        yield
    finally:
        if bound is not None:
            world.bound_device_id = bound
