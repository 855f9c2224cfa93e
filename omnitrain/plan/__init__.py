"""Plan a step without torch or a process group: equal inputs give equal plans on every rank."""

from omnitrain.plan.placement import Placement, Topology
from omnitrain.plan.step import Call, RowRoutes, StepPlan, plan_step
from omnitrain.plan.tables import (
    ItemFacts,
    MicroBatchFacts,
    StepTables,
    decode_tables,
    encode_table,
    needed_capacity,
    padded,
    shape_key,
)

__all__ = [
    "Call",
    "ItemFacts",
    "MicroBatchFacts",
    "Placement",
    "RowRoutes",
    "StepPlan",
    "StepTables",
    "Topology",
    "decode_tables",
    "encode_table",
    "needed_capacity",
    "padded",
    "plan_step",
    "shape_key",
]
