"""What is asked of one component: by its plan, the default plan, the parallel state and the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from omnitrain.parallel.expert.apply import ExpertLayer
from omnitrain.parallel.state import ParallelState
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan, ParallelPlan

STATE_AXIS = {"ulysses": "sp"}  # where the state has another name for it


@dataclass(frozen=True)
class CallFlags:
    """What the call of ``build_parallelize_model`` says of all components, where their plans say nothing.

    A flag that is not at its default counts as set: a plan that says otherwise contradicts it.

    Attributes:
        mixed_precision: compute in bf16; None: in the dtype of the parameters, which contradicts no plan.
        recompute: all blocks.
        parameter_offload: of what is sharded.
    """

    mixed_precision: bool | None = True
    recompute: bool = False
    parameter_offload: bool = False


@dataclass(frozen=True)
class Asked:
    """Of one component; problems are collected on the way.

    Attributes:
        name: of the component.
        plans: of all components.
        state: the foundation's factorisation of the ranks.
        flags: of the call.
        is_frozen_already: nothing of it trains, whatever its plan says.
        has_blocks: transformers can recompute some of it block by block.
        tp: ranks that share its matrices.
        expert_layers: that ``ep`` spreads.
        has_adapters: it trains these alone.
        problems: that were met so far.
    """

    name: str
    plans: ParallelPlan
    state: ParallelState
    flags: CallFlags
    is_frozen_already: bool
    has_blocks: bool
    tp: int
    expert_layers: Sequence[ExpertLayer]
    has_adapters: bool
    problems: list[str] = field(default_factory=list)

    @property
    def own(self) -> ComponentPlan:
        """What is said of this component by name."""
        return self.plans.components.get(self.name, ComponentPlan())

    @property
    def merged(self) -> ComponentPlan:
        """The same, and of all components."""
        return self.plans.of(self.name)

    @property
    def is_foundation(self) -> bool:
        """Whether it is the foundation."""
        return self.name == FOUNDATION

    @property
    def is_frozen(self) -> bool:
        """Whether nothing of it trains."""
        return not self.has_adapters and (self.is_frozen_already or bool(self.merged.freeze))

    def problem(self, field: str, text: str) -> None:
        """Note what is wrong with a field."""
        place = self.plans.path_of(self.name, field.partition(".")[0])
        self.problems.append(f"{place}.{field}: {text}")
