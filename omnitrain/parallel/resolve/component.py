"""The complete plan of one component."""

from __future__ import annotations

from omnitrain.errors import UserError
from omnitrain.parallel.resolve.experts import expert_fields
from omnitrain.parallel.resolve.memory import memory_fields
from omnitrain.parallel.resolve.sources import STATE_AXIS, Asked
from omnitrain.plan.mesh import fit_mesh
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan, Precision

_MODEL_AXES = ("pp", "cp", "ulysses")  # of the foundation; other components lie beside it with degree 1


def component_plan(asked: Asked) -> ComponentPlan | None:
    """With all fields set, except ``precision.param`` of what keeps its dtypes; None: ``asked`` has problems."""
    degrees = _degrees(asked)
    precision = _precision(asked)
    fields = {
        **_sequence_degrees(asked),
        **expert_fields(asked, degrees, precision.compute),
        **memory_fields(asked, degrees[0] if degrees else None),
        "async_ulysses": _of_foundation(asked, "async_ulysses", "sp", "ulysses"),
        "sequence_parallel": _of_foundation(asked, "sequence_parallel", "tp", "tp"),
    }
    if degrees is None or asked.problems:
        return None
    mode, dp_replicate, dp_shard = degrees
    return ComponentPlan(
        mode=mode,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        tp=asked.tp,
        precision=precision,
        freeze=asked.is_frozen,
        lora=asked.merged.lora if asked.has_adapters else None,
        place=asked.merged.place or ("group" if asked.state.size("sequence") > 1 else "local"),
        **fields,
    )


def _sequence_degrees(asked: Asked) -> dict[str, int]:
    """Of the foundation those of the state; other components are whole for each of its parts, or say otherwise."""
    found = {axis: asked.state.size(STATE_AXIS.get(axis, axis)) for axis in _MODEL_AXES}
    return found if asked.is_foundation else dict.fromkeys(found, 1) | {"ulysses": asked.own.ulysses or 1}


def _degrees(asked: Asked) -> tuple[str, int, int] | None:
    """Mode, copies, ranks of a copy; None: they do not fit.

    The degrees of the foundation, and those that components take over from the default plan, multiply to the ranks
    with samples of their own: those that share a sequence share a copy. A component that says them itself divides
    all ranks over which losses add up.
    """
    fields = ("mode", "dp_replicate", "dp_shard")
    mode, replicate, shard = (getattr(asked.merged, field) for field in fields)
    if mode is None and replicate is None and shard is None:
        if asked.state.dp_mode == "replicate":
            return "replicate", asked.state.size("loss"), 1
        own = (asked.state.shape.dp_replicate, asked.state.size("fsdp"))
        return _mode_of(*own), *own
    where = asked.plans.path_of(asked.name, *fields)
    is_data = asked.is_foundation or where == "default"
    ranks = asked.state.size("dp" if is_data else "loss")
    if mode == "hsdp" and replicate is None and shard is None:
        asked.problems.append(f"{where}.mode: hsdp needs dp_replicate or dp_shard; they multiply to {ranks} ranks")
        return None
    try:
        shape = fit_mesh(
            ranks,
            dp_replicate=1 if mode == "fsdp2" else replicate,
            dp_shard=1 if mode == "replicate" else shard,
        )
    except UserError as error:
        asked.problems.append(f"{where}: {' '.join(str(error).split())}")
        return None
    found = (shape.dp_replicate, shape.dp_shard)
    state = asked.state.shape
    if asked.is_foundation and found != (state.dp_replicate, state.dp_shard):
        asked.problems.append(
            f"{where}: found {found[0]} x {found[1]} (dp_replicate x dp_shard), but the parallel state has "
            f"{state.dp_replicate} x {state.dp_shard}; set it in one place"
        )
        return None
    if mode == "replicate":
        return mode, asked.state.size("loss"), 1
    if is_data:
        found = (found[0], found[1] * asked.state.size("sequence"))
    return mode or _mode_of(*found), *found


def _precision(asked: Asked) -> Precision:
    given = asked.merged.precision or Precision()
    param = given.param or (None if asked.is_frozen or asked.has_adapters else "float32")
    if asked.flags.mixed_precision is False and given.compute not in (None, given.param or "float32"):
        asked.problem(
            "precision",
            f"found compute {given.compute}, but enable_mixed_precision is False (`train.precision: fp32` of a recipe)",
        )
    own = asked.own.precision
    if own is not None and own.reduce is not None and asked.is_frozen:
        asked.problem("precision.reduce", f"found {own.reduce}, but what is frozen has no gradients; remove it")
    low = "bfloat16" if asked.flags.mixed_precision else param
    return Precision(param=param, compute=given.compute or low, reduce=given.reduce or "float32")


def _of_foundation(asked: Asked, field: str, axis: str, key: str) -> bool:
    """A switch that only the foundation has, and that does nothing without an axis."""
    if getattr(asked.own, field) and not asked.is_foundation:
        asked.problem(field, f"only the foundation's sequences are shared; set it on {FOUNDATION}")
    wanted = bool(getattr(asked.merged, field)) and asked.is_foundation
    if wanted and asked.state.size(axis) == 1:
        asked.problem(field, f"found true with {key} 1, where it does nothing; set {key} above 1, or remove it")
    return wanted


def _mode_of(dp_replicate: int, dp_shard: int) -> str:
    if dp_replicate == 1:
        return "fsdp2"
    return "replicate" if dp_shard == 1 else "hsdp"
