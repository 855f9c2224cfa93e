"""What tests run on ranks: the any-to-any model under a plan, its packs, and what they measure there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from tests.parallel import factories
from tests.tiny import TASKS, tiny_processor, tiny_samples

PLAIN = {"enable_mixed_precision": False}


def laid_out(
    default: Mapping[str, Any] | None = None,
    components: Mapping[str, Mapping[str, Any]] | None = None,
    state: Mapping[str, Any] | None = None,
    model: Any = None,
    **flags: Any,
) -> ot.OmniModel:
    """The any-to-any model under a plan, in training mode."""
    ot.init_parallel_state(**(state or {}))
    plan = ot.ParallelPlan(
        default=ot.ComponentPlan(**(default or {})),
        components={name: ot.ComponentPlan(**fields) for name, fields in (components or {}).items()},
    )
    built = model or factories.any_to_any().train()
    return ot.build_parallelize_model(built, parallel_plan=plan, **(PLAIN | flags))


def samples(task: str | None = None) -> list[Sample]:
    """One sample per task; or that of ``task`` alone."""
    every = tiny_samples(tiny_processor(factories.any_to_any()), len(TASKS))
    return every if task is None else [every[TASKS.index(task)]]


def pack(task: str | None = None) -> Pack:
    """Samples of :func:`samples` in one pack."""
    return Pack.from_samples(samples(task))


def total(output: ot.models.OmniOutput) -> torch.Tensor:
    """The sum of all losses."""
    return torch.stack([term.sum for term in output.losses.values()]).sum()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter or gradient, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: ot.OmniModel) -> dict[str, torch.Tensor]:
    """Full gradients by parameter."""
    return {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


class Ops(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[f"{func.namespace}.{func.overloadpacket.__name__}"] += 1
        return func(*args, **(kwargs or {}))


def equals_one_sample_at_a_time(model: ot.OmniModel, samples: list[Sample]) -> set[str]:
    """Compare loss and gradients of one pack with those of a pack for each sample; the parameters with gradients."""

    def step(packs: list[list[Sample]]) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = torch.stack([total(model(Pack.from_samples(pack))) for pack in packs]).sum()
        loss.backward()
        return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    (together, found), (apart, expected) = step([samples]), step([[one] for one in samples])
    assert together == pytest.approx(apart, rel=1e-5) and found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    return set(found)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts of the ops that run inside, collectives among them."""
    with Ops() as ops:
        yield ops.counts
