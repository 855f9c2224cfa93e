"""A loss or gradient that is not finite: what the error says, and whether the weights are still worth saving."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from omnitrain.errors import TrainingError
from omnitrain.peers import Peers, parameters_at_rest
from omnitrain.recipe import Recipe
from omnitrain.train.metrics.meter import PackLosses

_SHOWN = 8


class NonFiniteError(TrainingError):
    """A loss or gradient became NaN or infinite. The message names the samples; the step made no update."""


def not_finite_error(
    step: int, loss: float, norm: float, packs: Sequence[PackLosses], peers: Peers, recipe: Recipe, mixed: bool
) -> NonFiniteError:
    """Return the error of a step, with the samples whose loss is not finite. All ranks call this.

    Args:
        step: the step, from 1.
        loss: its total loss.
        norm: its gradient norm.
        packs: losses of this rank's packs.
        peers: ranks of the run.
        recipe: recipe of the run, whose settings the message names.
        mixed: whether the model computes in bfloat16.
    """
    samples: dict[str, None] = {}  # an ordered set
    by_head: dict[str, dict[str, None]] = {}
    for names, found in peers.gather(([p.info.ids for p in packs], [p.not_finite() for p in packs])):
        samples |= dict.fromkeys(name for of_pack in names for name in of_pack)
        for head, ids in (entry for of_pack in found for entry in of_pack.items()):
            by_head.setdefault(head, {}).update(dict.fromkeys(ids))
    lines = [f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}; this step changed no weight"]
    lines += [f"  loss of {head} not finite in the samples {_listed(ids)}" for head, ids in sorted(by_head.items())]
    if not by_head:
        lines.append(f"  the loss of each sample is finite; the samples of the step: {_listed(samples)}")
    return NonFiniteError("\n".join([*lines, *_advice(recipe, mixed)]))


def _listed(names: Mapping[str, None]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(list(names)[:_SHOWN]) + more


def _advice(recipe: Recipe, mixed: bool) -> Iterable[str]:
    settings = recipe.train.optimizer
    yield "  what to try:"
    yield "  - look at the rows of these samples: damaged media, empty or endless text"
    yield (
        f"  - a lower train.optimizer.learning_rate (it is {settings.learning_rate:g}), or more "
        f"train.optimizer.warmup_steps (it is {settings.warmup_steps})"
    )
    if settings.max_grad_norm is None:
        yield "  - train.optimizer.max_grad_norm=1, which clips gradients (it is null: nothing is clipped)"
    else:
        yield f"  - a lower train.optimizer.max_grad_norm (it is {settings.max_grad_norm:g})"
    if mixed:
        yield f"  - train.precision=fp32 (it is {recipe.train.precision}, which computes in bfloat16)"


def unsound_parameters(model: nn.Module, peers: Peers) -> list[str]:
    """Return the names of parameters with values that are not finite, on any rank. All ranks call this."""
    own = []
    for name, parameter in parameters_at_rest(model).items():
        if parameter.is_meta:  # another pipeline stage has it
            continue
        values = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not values.isfinite().all():
            own.append(name)
    return list(dict.fromkeys(name for names in peers.gather(own) for name in names))
