"""A loss or gradient that is not finite: where it began, what the error says, and whether the weights can be saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from omnitrain.errors import TrainingError
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.watch.monitor import component_modules
from omnitrain.parallel.watch.report import RunningAction
from omnitrain.peers import Peers, parameters_at_rest
from omnitrain.recipe import Recipe
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.torch_private import tree_leaves
from omnitrain.train.metrics.meter import PackLosses

_SHOWN = 8
_LOSS = "the loss"


class Origin(NamedTuple):
    """Where the first value of a step was not finite on a rank."""

    component: str  # the component that computed it, or ``the loss``
    phase: str  # ``forward``, ``backward``, or ``weight gradients``: gradients of the component's weights
    micro_batch: int  # index of the rank's micro-batch; for an encoder with its own actions, the first of a window
    # ids of the samples in the micro-batch; none if several ranks' micro-batches are encoded together
    samples: Sequence[str]

    @property
    def order(self) -> tuple[int, int]:
        """Smaller for what a step computes first: its values reach the others, on other ranks as well."""
        forward = 2 if self.component == _LOSS else 1 if self.component == FOUNDATION else 0
        phase = ("forward", "backward", "weight gradients").index(self.phase)
        return phase, forward if phase == 0 else -forward


class OriginFinder:
    """Finds where the first value of a step is not finite on this rank: ``found``. None: all are finite."""

    def __init__(self, model: Any) -> None:
        self.found: Origin | None = None
        self._model = model
        self._micro_batch = 0
        self._samples: tuple[str, ...] = ()
        layout = layout_of(model)
        # A stage of a pipeline gets its gradients from another stage of the foundation.
        self._outside = _LOSS if layout is None or layout.pipeline is None else FOUNDATION
        self._component = self._outside  # that runs now

    def at(
        self,
        *,
        micro_batch: int | None = None,
        samples: Sequence[str] = (),
        action: RunningAction | None = None,
        **_: Any,
    ) -> None:
        """Take the position of this rank in its schedule, before each of its actions."""
        self._look_at_weight_gradients()
        if micro_batch is None and action is not None:
            micro_batch = action.window
        if micro_batch is not None:
            self._micro_batch, self._samples, self._component = micro_batch, tuple(samples), self._outside

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at inputs and outputs of the components, and at their gradients, within this context."""
        hooks: list[RemovableHandle] = []
        for module, name in component_modules(self._model):
            hooks.append(module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(self._end, name)))
        try:
            yield
            self._look_at_weight_gradients()
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, name: str, module: nn.Module, arguments: Any, keywords: Any) -> None:
        self._component = name
        for value in _floats((arguments, keywords)):
            if value.grad_fn is not None:
                value.register_hook(partial(self._look, component=name, phase="backward"))

    def _end(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        for value in _floats(output):
            self._look(value, name, "forward")
            if value.grad_fn is not None:
                value.register_hook(partial(self._backward_begins, name))

    def _backward_begins(self, name: str, gradient: Tensor) -> None:
        self._look(gradient, self._component, "backward")  # of what reads the component's output
        self._component = name

    def _look_at_weight_gradients(self) -> None:
        for name, weights in self._model.components.items():
            for weight in weights.values() if self.found is None else ():
                if weight.grad is not None:
                    self._look(weight.grad, name, "weight gradients")

    def _look(self, value: Tensor, component: str, phase: str) -> None:
        local = value.to_local() if isinstance(value, DTensor) else value
        if self.found is None and not local.isfinite().all():
            self.found = Origin(component, phase, self._micro_batch, self._samples)


def _floats(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())


class NonFiniteError(TrainingError):
    """A loss or gradient became NaN or infinite. The message names the samples; the step made no update."""


def not_finite_error(
    step: int,
    loss: float,
    norm: float,
    packs: Sequence[PackLosses],
    origin: Origin | None,
    peers: Peers,
    recipe: Recipe,
    mixed: bool,
) -> NonFiniteError:
    """Return the error of ``step`` (from 1), with the samples whose loss is not finite. All ranks call this."""
    samples: dict[str, None] = {}  # an ordered set
    by_head: dict[str, dict[str, None]] = {}
    for names, found in peers.gather(([p.info.ids for p in packs], [p.not_finite() for p in packs])):
        samples |= dict.fromkeys(name for of_pack in names for name in of_pack)
        for head, ids in (entry for of_pack in found for entry in of_pack.items()):
            by_head.setdefault(head, {}).update(dict.fromkeys(ids))
    lines = [f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}; this step changed no weight"]
    lines += [f"  loss of {head} not finite in the samples {_listed(ids)}" for head, ids in sorted(by_head.items())]
    lines += _where(peers.gather(origin), samples)
    return NonFiniteError("\n".join([*lines, *_advice(recipe, mixed)]))


def _where(origins: Sequence[Origin | None], samples: Mapping[str, None]) -> Iterator[str]:
    """Yield a line for each rank on which the values that came first were not finite."""
    found = sorted((origin.order, rank, origin) for rank, origin in enumerate(origins) if origin is not None)
    if not found:
        yield "  computed again, all values of this step are finite: look for a fault of the hardware or of a kernel"
        yield f"  the samples of the step: {_listed(samples)}"
    for order, rank, origin in found:
        if order == found[0][0]:
            of = f" of rank {rank}" if len(origins) > 1 else ""
            where = f"{origin.phase} of {origin.component}, micro-batch {origin.micro_batch}{of}"
            if not origin.samples:
                where = f"{origin.phase} of {origin.component} from micro-batch {origin.micro_batch}, on rank {rank}"
            ids = f": samples {_listed(dict.fromkeys(origin.samples))}" if origin.samples else ""
            yield f"  it began in {where}{ids}"


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
