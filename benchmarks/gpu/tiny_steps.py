"""Tiny training steps that ``right``, ``races`` and ``waits`` run: each in another way through the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import torch
from omni_step import OmniStep

from gpu.batches import Batch, batches_of
from gpu.dense import LIGER
from gpu.loopback import LateLoopback, over
from gpu.measured import Load
from gpu.sides import Alter, laid_out, packs_of
from gpu.sizes import config_of, sizes_of
from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.ops.registry import liger_missing
from omnitrain.recipe import Ops
from omnitrain.recipe.parallel import ComponentPlan

Compute = Literal["float32", "bfloat16"]
PLAIN = ("text", "mixed", "experts")  # kinds of models


def tiny_config(kind: str) -> Any:
    """Return the config of a model of two layers."""
    return config_of(kind, sizes_of(kind, tiny=True), 2)


@cache
def tiny_batches(kind: str) -> list[Batch]:
    """Return a few batches of 256 tokens; the same for all steps of a kind."""
    load = Load(torch.device("cpu"), tokens=256, rounds=1, steps=1, seconds=0.0)
    return batches_of(kind, sizes_of(kind, tiny=True), tiny_config(kind), load)


@dataclass(frozen=True)
class TinyStep:
    """A way to compute a step of a tiny model.

    Attributes:
        kind: of the model: ``text``, ``mixed`` (text and images), ``experts``.
        plan: fields of the foundation's plan.
        ops: fields of ``model.ops``.
        chunks: of the exchange of experts, over a late link of the rank to itself; 0: no exchange.
    """

    kind: str
    plan: dict[str, Any] = field(default_factory=dict)
    ops: dict[str, str] = field(default_factory=dict)
    chunks: int = 0

    def obstacle(self, device: torch.device) -> str | None:
        """Return why it cannot run on ``device``; None: it can."""
        if self.plan.get("compile") and device.type != "cuda":
            return "it is compiled here only on CUDA"
        return liger_missing(device) if "liger" in self.ops.values() else None

    @contextmanager
    def on(self, device: torch.device, compute: Compute) -> Iterator[tuple[OmniStep, list[Pack]]]:
        """Build the model, the same each time, and its packs.

        Raises:
            UserError: it cannot run on ``device``.
        """
        if problem := self.obstacle(device):
            raise UserError(problem)
        alter: Alter | None = partial(over, LateLoopback(device), self.chunks) if self.chunks else None
        plan, ops = ComponentPlan.model_validate(self.plan), Ops.model_validate(self.ops)
        with laid_out(tiny_config(self.kind), device, plan, ops, compute, alter) as step:
            yield step, packs_of(step, tiny_batches(self.kind))


STEPS = {
    **{kind: TinyStep(kind) for kind in PLAIN},
    "text recompute": TinyStep("text", {"memory": {"recompute": "full"}}),
    "text selective recompute": TinyStep("text", {"memory": {"recompute": "selective"}}),
    "text activation offload": TinyStep("text", {"memory": {"offload": ["activations"]}}),
    "text optimizer offload": TinyStep("text", {"memory": {"offload": ["optimizer"]}}),
    "text parameter offload": TinyStep("text", {"memory": {"offload": ["parameters"]}}),
    "text liger": TinyStep("text", {}, LIGER),
    "experts exchange": TinyStep("experts", chunks=3),
    "experts recompute parts": TinyStep("experts", {"memory": {"recompute": "parts"}}, chunks=2),
    "text compile": TinyStep("text", {"compile": True}),  # the slowest, so the last
    "text compile recompute": TinyStep("text", {"compile": True, "memory": {"recompute": "full"}}),
}
