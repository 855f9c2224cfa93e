"""Apply expert parallelism: shard the experts of each layer over ranks, and dispatch tokens to them.

    experts     E0 E1 | E2 E3       rank 0 has the first half of every layer's experts, rank 1 the second half
    rank 0      sends tokens routed to E2 or E3 to rank 1, and receives their results
    rank 1      sends tokens routed to E0 or E1 to rank 0, and receives their results

Weights are DTensors ``Shard(0)`` on the mesh ``ep`` before FSDP shards them over ``ep_fsdp``, and stay so. Gradient
norms, optimizers and checkpoints therefore need no special case.

A layer's forward calls its shared experts after the routed ones, with the layer's input, and adds the results. They run
earlier: while the last results of the routed experts are in flight, and in the backward while the first gradients are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.contract.trial import Failure, attempt
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.entry import settings_of
from omnitrain.ops.experts.install import backend_of, set_experts
from omnitrain.ops.experts.timing import LayerSpans
from omnitrain.ops.experts.weights import experts_in, names_by_expert, num_experts_of, weight_names
from omnitrain.parallel.expert.deepep import DeepEpDispatcher, open_deepep
from omnitrain.parallel.expert.dispatch import GroupLink, RankDispatcher, TPTokenDispatcher
from omnitrain.parallel.fsdp.shard import device_of
from omnitrain.recipe.globs import any_layer, matches_weight
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan, ParallelPlan
from omnitrain.torch_private import REDISTRIBUTE_LOGGER, has_hooks, parameters_of

_TRIAL_TOKENS = 4


def shared_experts(layer: nn.Module, experts: nn.Module, device: torch.device) -> nn.Module | None:
    """Return the child of ``layer`` that is called once, after ``experts``, with only the layer's input; None: none is.

    A forward of the layer on ``device`` with zeros as input and weights, whose ``experts`` compute nothing, shows the
    calls. The layer's weights may be on the meta device, and its buffers elsewhere.
    """
    inner: Any = experts
    weight = inner.down_proj
    width = weight.size(-1) if inner.is_transposed else weight.size(-2)
    for dtype in dict.fromkeys(parameter.dtype for parameter in layer.parameters()):  # frozen weights keep their dtype
        hidden = torch.zeros(1, _TRIAL_TOKENS, width, dtype=dtype, device=device)
        if (shared := _called_after(layer, experts, hidden)) is not None:
            return shared
    return None


def _called_after(layer: nn.Module, experts: nn.Module, hidden: Tensor) -> nn.Module | None:
    """The only child that ``layer(hidden)`` calls after ``experts``, if it gets only ``hidden``."""
    calls: list[tuple[nn.Module, bool]] = []  # after the experts: the child, and whether it gets only `hidden`

    def note(module: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((module, not kwargs and len(arguments) == 1 and arguments[0] is hidden))

    def compute_nothing(rows: Tensor, *_: Any, **__: Any) -> Tensor:
        calls.clear()
        return torch.zeros_like(rows)

    of_experts = {*experts.parameters(), *experts.buffers()}
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    zeros = {n: torch.zeros_like(value, device=hidden.device) for n, value in tensors if value not in of_experts}
    rng_devices = [hidden.device] if hidden.device.type == "cuda" else []
    # Some routers draw random numbers in training.
    with ExitStack() as stack, torch.no_grad(), torch.random.fork_rng(rng_devices):
        for child in layer.children():
            if child is not experts:
                stack.callback(child.register_forward_pre_hook(note, with_kwargs=True).remove)
        stack.callback(delattr, experts, "forward")
        experts.forward = compute_nothing
        if isinstance(attempt(lambda: functional_call(layer, zeros, (hidden,))), Failure):
            return None  # the layer needs other arguments
    return calls[0][0] if [gets_hidden for _, gets_hidden in calls] == [True] else None


@dataclass
class _Running:
    """A forward of a layer with shared experts: its input, and what they computed from it, if they ran already."""

    hidden: Tensor
    result: Tensor | None = None


# The layer that runs in this thread: a backward may recompute a layer while another forward of it runs.
_running: ContextVar[_Running | None] = ContextVar("layer_with_shared_experts", default=None)


class SharedExpertOverlap:
    """Compute ``shared`` (see :func:`shared_experts`) before ``layer`` calls it."""

    def __init__(self, layer: nn.Module, shared: nn.Module) -> None:
        self._forward: Callable[[Tensor], Tensor] = shared.forward
        self._shared = shared
        layer.register_forward_pre_hook(self._begin, prepend=True)
        layer.register_forward_hook(self._end, always_call=True)
        shared.forward = self._stored_or_computed

    def compute(self, spans: LayerSpans) -> None:
        """Compute the shared experts for the current forward of the layer."""
        running = _running.get()
        # Hooks of other code expect to run around the forward.
        if running is not None and not has_hooks(self._shared, backward=False):
            running.result = spans.shared_experts(running.hidden, self._forward)

    def _begin(self, layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        _running.set(_Running(arguments[0]) if arguments else None)

    def _end(self, *_: Any) -> None:
        _running.set(None)

    def _stored_or_computed(self, hidden: Tensor) -> Tensor:
        running = _running.get()
        if running is None or running.result is None or hidden is not running.hidden:
            return self._forward(hidden)
        return running.result


_DISPATCH_STYLE = "ep_dispatch_experts"  # of transformers' expert parallel plans

_UNMEASURED_CHUNKS = 4  # for `experts.chunks: auto` until chunks are measured


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer: their module, and the ``weights`` whose dim 0 is the expert."""

    name: str
    weights: tuple[str, ...]
    num_experts: int
    backend: str


def expert_layers(model: OmniModel) -> dict[str, tuple[ExpertLayer, ...]]:
    """Return component -> its MoE layers whose experts call transformers' ``ExpertsInterface``."""
    components = model.components
    owner = {path: name for name, parameters in components.items() for path in parameters}
    layers: dict[str, list[ExpertLayer]] = {name: [] for name in components}
    for name, module in experts_in(model):
        weights = tuple(f"{name}.{weight}" for weight in weight_names(module))
        layers[owner[weights[0]]].append(ExpertLayer(name, weights, num_experts_of(module), backend_of(module)))
    return {name: tuple(of_component) for name, of_component in layers.items()}


def chosen_layers(
    model: OmniModel, layers: Sequence[ExpertLayer], ep_plan: Mapping[str, int] | None
) -> tuple[ExpertLayer, ...]:
    """Return the ``layers`` that ``ep_plan`` shards; without one, those in the HF plan; if it has none, all."""
    if not layers:
        return ()
    if ep_plan is None:
        planned = set(spread_by_transformers(model))
        return tuple(layer for layer in layers if layer.name in planned) or tuple(layers)
    return tuple(
        layer for layer in layers if any(matches_weight(glob, name) for glob in ep_plan for name in layer.weights)
    )


def spread_by_transformers(model: OmniModel) -> list[str]:
    """Return the names of modules that HF expert parallel plans in ``model`` dispatch tokens to."""
    names: dict[str, None] = {}
    for root, module in model.named_modules():
        if module is not model and isinstance(module, PreTrainedModel):
            plan = getattr(module, "ep_plan", None) or {}  # transformers 5.18 has no plan that dispatches
            patterns = {name for name, style in plan.items() if style == _DISPATCH_STYLE}
            if patterns:
                inner = (name for name, _ in module.named_modules() if any_layer(name) in patterns)
                names |= dict.fromkeys(f"{root}.{name}" for name in inner)
    return list(names)


def own_plan_problems(
    model: OmniModel, layers: Mapping[str, Sequence[ExpertLayer]], plan: ParallelPlan
) -> Iterator[str]:
    """Yield a problem if the model's HF plan, used without ``ep_plan``, shards experts that this cannot shard."""
    known = {layer.name for of_component in layers.values() for layer in of_component}
    if not known or plan.ep_plan is not None:
        return
    if other := [name for name in spread_by_transformers(model) if name not in known]:
        yield (
            f"{plan.path_of(FOUNDATION, 'ep')}.ep: the model's HF plan also shards {other[0]}, which does not call "
            "transformers' ExpertsInterface; use 1, or list the other experts in ep_plan"
        )


def ep_plan_problems(layers: Mapping[str, Sequence[ExpertLayer]], ep_plan: Mapping[str, int]) -> Iterator[str]:
    """Yield the problems of globs for experts; every glob matches some name of the model."""
    every_layer = [*chain.from_iterable(layers.values())]
    examples = ", ".join(f"`{name}`" for name in every_layer[0].weights) if every_layer else ""
    for glob, dim in ep_plan.items():
        if dim != 0:
            yield f"ep_plan: found dimension {dim} for `{glob}`; dimension 0 of transformers' experts is the expert"
        if not any(matches_weight(glob, name) for layer in every_layer for name in layer.weights):
            allowed = f"expected for example {examples}" if examples else "the model has none"
            yield f"ep_plan: `{glob}` matches no weights of experts; {allowed}"
    for layer in every_layer:
        others = [name for name in layer.weights if not any(matches_weight(glob, name) for glob in ep_plan)]
        if 0 < len(others) < len(layer.weights):
            yield f"ep_plan: matches only some weights of {layer.name}; add {', '.join(others)}"


def bound_rows(model: OmniModel, layers: Sequence[ExpertLayer], rows: int | None) -> None:
    """Let the experts of ``layers`` compute at most ``rows`` rows at a time; None: all."""
    for layer in layers:
        set_experts(model.get_submodule(layer.name), row_budget=rows)


def spread_experts(model: OmniModel, layers: Sequence[ExpertLayer], mesh: DeviceMesh, plan: ComponentPlan) -> str:
    """Keep this rank's shard of the experts of ``layers``, and dispatch tokens between ranks.

    Returns the dispatcher, ``torch`` or ``deepep``. ``model`` has equal weights on all ranks of ``mesh`` ``[ep]``,
    whose size divides the numbers of experts. Raises UserError: the plan sets ``deepep``, and a test exchange failed;
    the model is unchanged.
    """
    buffer = _deepep_buffer([model.get_submodule(layer.name) for layer in layers], mesh, plan)
    # Saving gathers weights with two Shard(0) placements in two steps; torch warns each time.
    logging.getLogger(REDISTRIBUTE_LOGGER).setLevel(logging.ERROR)
    for layer in layers:
        module = model.get_submodule(layer.name)
        for name in names_by_expert(module):
            weight = getattr(module, name)
            # All ranks have the same weights, so no communication is needed; the clone frees the other experts.
            shard = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            local = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
            parameters_of(module)[name] = nn.Parameter(local, requires_grad=weight.requires_grad)
        unmeasured = min(_UNMEASURED_CHUNKS, layer.num_experts // mesh.size())
        chunks = unmeasured if isinstance(plan.experts.chunks, str) else plan.experts.chunks or 1
        by_torch = RankDispatcher(GroupLink(mesh.get_group()), chunks)
        dispatcher = by_torch if buffer is None else DeepEpDispatcher(buffer)
        set_experts(module, dispatcher=dispatcher, delays_weight_gradients=bool(plan.experts.delay_wgrad))
        if plan.experts.chunks not in (None, 1):
            parent = model.get_submodule(layer.name.rpartition(".")[0])
            if (shared := shared_experts(parent, module, device_of(mesh))) is not None:
                set_experts(module, overlap_with=SharedExpertOverlap(parent, shared).compute)
    return "torch" if buffer is None else "deepep"


def _deepep_buffer(experts: Sequence[nn.Module], mesh: DeviceMesh, plan: ComponentPlan) -> Any:
    """The DeepEP buffer for these experts; None: use torch's all-to-all."""
    if plan.experts.dispatcher in (None, "torch"):
        return None
    widths = [module.get_parameter("down_proj").size(2 if module.is_transposed else 1) for module in experts]
    buffer, problem = open_deepep(mesh.get_group(), max(widths), device_of(mesh))
    if problem and plan.experts.dispatcher == "deepep":
        raise UserError(
            f"experts.dispatcher: found deepep, but its test exchange failed: {problem}; use torch, or auto to fall "
            "back to torch"
        )
    return buffer


def use_tp_dispatch(model: OmniModel, layers: Sequence[ExpertLayer], tp_mesh: DeviceMesh) -> None:
    """Divide tokens among the ranks of ``tp_mesh``, which all hold the same tokens, for the experts of ``layers``."""
    for layer in layers if tp_mesh.size() > 1 else ():
        module = model.get_submodule(layer.name)
        set_experts(module, dispatcher=TPTokenDispatcher(settings_of(module).dispatcher, tp_mesh.get_group()))
