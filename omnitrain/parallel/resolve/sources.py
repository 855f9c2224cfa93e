"""The settings of one component from its plan, the default plan, the parallel state and the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from omnitrain.parallel.expert.apply import ExpertLayer
from omnitrain.parallel.resolve.roles import Role
from omnitrain.parallel.state import ParallelState
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan, ParallelPlan, value_of

STATE_AXIS = {"ulysses": "sp"}  # plan field -> axis of the state, where the names differ

# Flag of the call -> argument of `build_parallelize_model`, the key that it sets, value if on, value if off.
FLAG_FIELDS: dict[str, tuple[str, str, Any, Any]] = {
    "recompute": ("enable_gradient_checkpointing", "memory.recompute", "full", "none"),
    "parameter_offload": ("enable_fsdp_offload", "memory.offload", ["parameters"], []),
}


@dataclass(frozen=True)
class CallFlags:
    """The flags of ``build_parallelize_model``, for all components whose plans leave these settings open.

    A flag that differs from its default counts as set: a plan with another value contradicts it.
    """

    # compute in bf16. None: in the dtype of the parameters, which contradicts no plan
    mixed_precision: bool | None = True
    recompute: bool = False  # recompute all blocks
    parameter_offload: bool = False  # offload the shards of sharded parameters


@dataclass(frozen=True)
class Request:
    """All settings for one component, and the problems found so far."""

    name: str
    plans: ParallelPlan  # the plans of all components
    state: ParallelState  # the factorisation of the ranks of its section
    flags: CallFlags  # the flags of the call
    is_frozen_already: bool  # whether all its parameters are frozen before the plan is applied
    has_blocks: bool  # whether it has blocks that transformers can recompute
    tp: int  # its degree of tensor parallelism
    expert_layers: Sequence[ExpertLayer]  # its MoE layers that ``ep`` shards
    has_adapters: bool  # whether it trains only LoRA adapters
    roles: frozenset[Role]  # what it is (:func:`~omnitrain.parallel.resolve.roles.roles_of`)
    problems: list[str] = field(default_factory=list)  # the problems found so far

    @property
    def explicit(self) -> ComponentPlan:
        """The plan of this component, without the default plan."""
        return self.plans.components.get(self.name, ComponentPlan())

    @property
    def planned(self) -> ComponentPlan:
        """The plan of this component, with the default plan for fields that it leaves unset."""
        return self.plans.of(self.name)

    @cached_property
    def merged(self) -> ComponentPlan:
        """The one rule of precedence: this component's plan (it may not undo a flag), the default plan, the flags."""
        planned, of_flags = self.planned, {}
        for flag, (argument, key, on, off) in FLAG_FIELDS.items():
            value = value_of(planned, key)
            if getattr(self.flags, flag) and value == off:
                self.problem(key, f"found {off}, but {argument} is True; set only one of the two")
            elif getattr(self.flags, flag) and (value is None or isinstance(value, list)):
                of_flags[key] = [*dict.fromkeys([*value, *on])] if value else on
        return planned.changed(of_flags)

    @property
    def is_foundation(self) -> bool:
        """Whether it is the foundation."""
        return self.name == FOUNDATION

    @property
    def is_frozen(self) -> bool:
        """Whether no parameter of it trains."""
        return not self.has_adapters and (self.is_frozen_already or bool(self.merged.freeze))

    def problem(self, field: str, text: str) -> None:
        """Note a problem with a field."""
        path = self.plans.path_of(self.name, field)
        self.problems.append(f"{path}.{field}: {text}")
