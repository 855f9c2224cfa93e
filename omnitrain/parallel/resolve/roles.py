"""What each role may set in its plan: one table, from which refusals and the page on roles come."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe.parallel import AXES, FOUNDATION, MAIN, ComponentPlan, ParallelPlan, keys_of, value_of

Role = Literal[
    "the foundation",
    "all but the foundation",
    "a decoder",
    "a projector",
    "a projector in `main`",
    "a teacher",
    "a component of a section",
    "a decoder of a section",
]


class Refusal(NamedTuple):
    """Fields that components of a role may not set."""

    role: Role  # the components
    # keys of :class:`~omnitrain.recipe.parallel.ComponentPlan`; ``encode`` and other groups: all their keys
    fields: tuple[str, ...]
    reason: str  # why, and what to do; it follows "found VALUE, but"
    values: tuple[object, ...] = ()  # the values that are refused; empty: all that have an effect

    @property
    def keys(self) -> list[str]:
        """The fields, with the keys of a group in its place."""
        return [key for field in self.fields for key in keys_of(field)]


_OTHERS: Role = "all but the foundation"
_PROJECTOR: Role = "a projector in `main`"
_SECTION: Role = "a component of a section"
_PACKS = "the foundation runs packs: use `local` (a rank runs those that it drew) or `world` (divided by cost)"
_DEGREES = "components of a section have only dp_replicate, dp_shard, tp, ulysses and ep; remove it"
_CP = "only the foundation supports ring attention; remove it (`place: group` divides items among the ranks)"

# For each field, the first refusal that applies is told.
REFUSALS = (
    Refusal("the foundation", ("encode",), "the foundation encodes no media; set it on an encoder, or remove it"),
    Refusal("the foundation", ("place",), _PACKS, ("group",)),
    Refusal(_SECTION, ("pp", "cp"), _DEGREES),
    Refusal(
        _SECTION,
        ("place", "encode.window", "encode.feature_bytes"),
        "the ranks of a section encode for all others; remove it",
    ),
    Refusal(
        "a decoder of a section",
        ("tp", "ulysses", "ep"),
        "a decoder of a section is only sharded (dp_shard) or copied (dp_replicate); remove it",
    ),
    Refusal("a teacher", ("freeze",), "a teacher never trains; remove it", (True,)),
    Refusal("a projector", ("ulysses",), "a projector has no attention; remove it"),
    Refusal(_PROJECTOR, ("encode", "quadratic_cost"), "a projector in `main` runs in the forwards; remove it"),
    Refusal(_PROJECTOR, ("place",), "a projector runs where its features are used; remove it", ("world",)),
    Refusal("a decoder", ("encode",), "it is for encoders; remove it"),
    Refusal(_OTHERS, ("pp", "schedule"), "only the foundation is cut into stages; remove it"),
    Refusal(_OTHERS, ("cp",), _CP),
    Refusal(
        _OTHERS, ("async_ulysses", "sequence_parallel"), f"only the foundation supports it; set it on {FOUNDATION}"
    ),
    Refusal(_OTHERS, ("compile",), f"only the foundation can be compiled; set it on {FOUNDATION}"),
)


def roles_of(model: OmniModel, plan: ParallelPlan, component: str) -> frozenset[Role]:
    """Return the roles of a component of a model, under a plan."""
    is_in_main = plan.section_of(component) == MAIN
    roles: dict[Role, bool] = {
        "the foundation": component == FOUNDATION,
        "all but the foundation": component != FOUNDATION,
        "a decoder": component in model.decoder_names,
        "a projector": component in model.reads,
        "a projector in `main`": component in model.reads and is_in_main,
        "a teacher": component in model.teachers,
        "a component of a section": not is_in_main,
        "a decoder of a section": not is_in_main and component in model.decoder_names,
    }
    return frozenset(role for role, has_it in roles.items() if has_it)


def refused(roles: Collection[Role], explicit: ComponentPlan) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for the fields that ``explicit``, a plan without the default plan, may not set."""
    told = set[str]()
    for refusal in REFUSALS:
        for field in refusal.keys if refusal.role in roles else ():
            value = value_of(explicit, field)
            is_refused = value in refusal.values if refusal.values else _has_effect(field, value)
            if is_refused and field not in told:
                told.add(field)
                yield field, f"found {_shown(value)}, but {refusal.reason}"


def media_keys(roles: Collection[Role]) -> list[str]:
    """Return the keys on the encoding of media that components of these roles may set: no refusal names them."""
    refused_keys = {key for one in REFUSALS if one.role in roles and not one.values for key in one.keys}
    return [key for key in ("quadratic_cost", *keys_of("encode")) if key not in refused_keys]


def _has_effect(field: str, value: object) -> bool:
    return value is not None and value is not False and not (field in AXES and value == 1)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    return ", ".join(f"{key}: {found}" for key, found in value.model_dump(exclude_defaults=True).items())
