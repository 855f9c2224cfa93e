"""Apply async Ulysses (``attention.py``) to the attention modules that support it; a shrunken copy of a model shows it.

A run of the module shows its projections and norms by the tensors that they read, not by their names. The check then
compares outputs and gradients with the unmodified module: all bits must be equal, with all heads and with some of them.
"""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.models.components.contract import Contract
from omnitrain.models.contract.tiny_model import tiny_config
from omnitrain.models.contract.trial import Failure, Trial, attempt, errors_of
from omnitrain.models.discovery import watching
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.attention.packed_context import PackedSequence
from omnitrain.ops.attention.spec import AttentionCall, MaskSpec
from omnitrain.ops.collectives import gathered_objects, with_backward
from omnitrain.parallel.sequence.async_ulysses.attention import (
    AttentionLayout,
    Input,
    run_async,
    use_async_ulysses,
    why_not_async,
)
from omnitrain.parallel.sequence.async_ulysses.projections import TokenExchange, TokenSpans
from omnitrain.parallel.sequence.head_exchange import Arrival, HeadSpans
from omnitrain.parallel.sequence.ulysses import OwnHeads, of_own_heads
from omnitrain.torch_private import tree_leaves

# Enough tokens for sums in another order to differ.
_SAMPLES = 12

# Class of an attention module, and the shapes of its weights -> its layout, or why it does not support async Ulysses.
Kind = tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]
AttentionLayouts = Mapping[Kind, AttentionLayout | str]


def kind_of(module: nn.Module) -> Kind:
    """Return the class and weight shapes of a module; modules of one kind share a layout."""
    return type(module).__name__, tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def attention_layouts(model: PreTrainedModel, contract: Contract) -> AttentionLayouts:
    """Return the layout of each kind of attention module of a foundation, or why it does not support async Ulysses.

    ``model``: the foundation, on any device; a shrunken copy runs; ``contract``: the contract of the foundation.
    Returns kind -> layout or reason, for modules that receive the mask of the pack.
    """
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        attempted = attempt(_attention_calls, model, contract)
        calls = [] if isinstance(attempted, Failure) else attempted
        layouts = {kind_of(module): attempt(_layout, module, arguments) for module, arguments in calls}
    return {
        kind: f"it fails under async Ulysses: {layout}" if isinstance(layout, Failure) else layout
        for kind, layout in layouts.items()
    }


def _layout(module: nn.Module, arguments: inspect.BoundArguments) -> AttentionLayout | str:
    try:
        plain = _observe(module, arguments)
        layouts = [_layout_of(module, plain, heads_first) for heads_first in (False, True)]
        differences = [_difference(module, layout, arguments, plain) for layout in layouts]
        equal = (layout for layout, difference in zip(layouts, differences, strict=True) if difference is None)
        return next(equal, str(differences[0]))
    except _NotAsyncError as reason:
        return str(reason)


def _attention_calls(model: PreTrainedModel, contract: Contract) -> list[tuple[nn.Module, inspect.BoundArguments]]:
    """The innermost modules that receive the mask of a pack, one module of each kind, with their arguments."""
    calls: dict[nn.Module, inspect.BoundArguments] = {}

    def note(_: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        if any(isinstance(value, MaskSpec) for value in (*bound.args, *bound.kwargs.values())):
            calls[module] = bound

    with Trial.of(type(model), tiny_config(model.config), contract) as trial:
        text = next(probe.sample for probe in trial.probes if not probe.modalities)
        pack = Pack.from_samples([text] * (_SAMPLES if contract.packs else 1))
        with watching(trial.ours.named_modules(), before=note):
            trial.logits(EncodedPack(pack), PackedSequence(tuple(pack.cu_seqlens.tolist())))
    innermost = [m for m in calls if not any(inner in calls for inner in m.modules() if inner is not m)]
    return list({kind_of(module): (module, calls[module]) for module in innermost}.values())


_NO_GROUP: Any = None


class _NotAsyncError(Exception):
    """A module does not support async Ulysses."""


@dataclass(frozen=True)
class _Called:
    """A call of a module inside attention, with its input and output."""

    name: str
    given: Tensor
    returned: Tensor


@dataclass(frozen=True)
class _Plain:
    """One plain run of an attention module."""

    hidden: str  # name of the argument with the hidden states
    called: list[_Called]  # innermost modules with parameters, in the order of their calls
    call: AttentionCall  # the call of attention
    results: dict[str, Tensor]  # the output of the module, and the gradients of the hidden states and of each parameter


@dataclass(frozen=True, eq=False)
class _RecordingShard:
    """A :class:`SequenceShard` with the whole sequence, which records the calls of attention."""

    num_local_tokens: int
    calls: list[AttentionCall]

    def attend(self, call: AttentionCall, compute: Callable[[AttentionCall], Tensor]) -> Tensor:
        self.calls.append(call)
        query, key, value = (with_backward(Tensor.clone, _as_exchanged, x) for x in (call.query, call.key, call.value))
        return compute(replace(call, query=query, key=key, value=value, mask=call.mask.whole))


def _as_exchanged(gradient: Tensor) -> Tensor:
    """Laid out as it comes back from an exchange: the order in which gradients are added up follows."""
    return gradient.transpose(1, 2).contiguous().transpose(1, 2)


def _observe(module: nn.Module, arguments: inspect.BoundArguments) -> _Plain:
    parts = [(name, part) for name, part in module.named_modules() if name and list(part.parameters(recurse=False))]
    called: list[_Called] = []
    calls: list[AttentionCall] = []

    def note(name: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(returned, Tensor):
            raise _NotAsyncError(f"{name} takes or gives more than one tensor")
        called.append(_Called(name, args[0], returned))

    copied = _copied(arguments)
    for name, value in copied.arguments.items():
        if isinstance(value, MaskSpec):
            copied.arguments[name] = value.on(_RecordingShard(value.offsets[-1], calls))
    with watching(parts, after=note):
        output = _first(module.forward(*copied.args, **copied.kwargs))
    if len(calls) != 1 or not called:
        raise _NotAsyncError(f"it attends {len(calls)} times, and has {len(called)} layers")
    hidden = [name for name, value in copied.arguments.items() if value is called[0].given]
    if not hidden:
        raise _NotAsyncError(f"{called[0].name} does not read the hidden states")
    _require_one_with_gradients(arguments.arguments, hidden[0])
    return _Plain(hidden[0], called, calls[0], _results(module, copied.arguments[hidden[0]], output))


def _require_one_with_gradients(arguments: Mapping[str, Any], hidden: str) -> None:
    """Arguments but the hidden states are gathered without a graph."""
    for name, value in arguments.items():
        leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf is not arguments[hidden])
        if any(leaf.requires_grad for leaf in leaves):
            raise _NotAsyncError(f"its argument {name} has gradients, too")


def _layout_of(module: nn.Module, plain: _Plain, heads_first: bool) -> AttentionLayout:
    """Input projections are the linear layers that read the hidden states; the last called one is the output's."""
    given = plain.called[0].given
    inputs = [call for call in plain.called if call.given is given]
    output, others = plain.called[-1], [call for call in plain.called[:-1] if call.given is not given]
    for call in (*inputs, output):
        if type(module.get_submodule(call.name)) is not nn.Linear:
            raise _NotAsyncError(f"{call.name} is not a plain nn.Linear")
    norms = {_source(call, inputs): call for call in others}
    names = [call.name for call in plain.called]
    if len(set(names)) != len(names) or len(norms) != len(others) or output in inputs:
        raise _NotAsyncError(f"it calls {', '.join(names)}, which is not projections, norms and one projection")
    bare = [name for name, _ in module.named_parameters() if name.rpartition(".")[0] not in (*names, "")]
    if bare:
        raise _NotAsyncError(f"it reads {', '.join(bare)} without calling its module")
    read = tuple(_input_of(call, norms.get(call.name), plain.call, heads_first) for call in inputs)
    return AttentionLayout(plain.hidden, read, output.name, plain.call.query.size(1), plain.call.key.size(1))


def _input_of(projection: _Called, norm: _Called | None, call: AttentionCall, heads_first: bool) -> Input:
    is_key = _is_key(projection, call)
    if norm is None:
        return Input(projection.name, is_key, "", 0, False)
    return Input(projection.name, is_key, norm.name, norm.given.size(-1), heads_first)


def _source(norm: _Called, inputs: list[_Called]) -> str:
    """The projection whose reshaped output is a norm's input."""
    for call in inputs:
        same = norm.given.untyped_storage().data_ptr() == call.returned.untyped_storage().data_ptr()
        if same and norm.given.numel() == call.returned.numel():
            return call.name
    raise _NotAsyncError(f"{norm.name} reads no projection of the hidden states")


def _is_key(projection: _Called, call: AttentionCall) -> bool:
    """Whether a projection reaches keys or values, and not queries."""

    def reaches(state: Tensor) -> bool:
        (gradient,) = torch.autograd.grad(state.sum(), projection.returned, retain_graph=True, allow_unused=True)
        return gradient is not None

    of_key = reaches(call.key) or reaches(call.value)
    if of_key and reaches(call.query):
        raise _NotAsyncError(f"{projection.name} makes queries and keys in one")
    return of_key


def _difference(
    module: nn.Module, layout: AttentionLayout, arguments: inspect.BoundArguments, plain: _Plain
) -> str | None:
    """The first difference between async Ulysses and the unmodified module; None: all bits are equal."""
    copied = _copied(arguments)
    output = _first(_drive(module, layout, _Pretended.of(plain, 1, 0), copied))
    results = _results(module, copied.arguments[layout.hidden], output)
    if missing := results.keys() ^ plain.results.keys():
        return f"{min(missing)} is there on one side alone"
    if differing := [name for name, error in errors_of(results, plain.results).items() if error]:
        return f"{differing[0]} differs under async Ulysses"
    ranks = next((n for n in range(2, layout.num_heads + 1) if layout.num_heads % n == 0), 1)
    parts = []
    for rank in range(ranks):
        exchange = _Pretended.of(plain, ranks, rank)
        _drive(module, layout, exchange, _copied(arguments))
        parts += exchange.returned
    if not torch.equal(torch.cat(parts, dim=1), plain.called[-1].given[0]):
        return f"its heads differ when one of {ranks} ranks has a part of them"
    return None


@dataclass(frozen=True, eq=False)
class _Pretended(TokenExchange):
    """A simulated rank that has all tokens, and exchanges with itself what other ranks would send."""

    simulated_rank: int = 0
    returned: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, plain: _Plain, ranks: int, rank: int) -> _Pretended:
        lengths = [plain.call.query.size(2) if other == rank else 0 for other in range(ranks)]
        return cls(lengths, _NO_GROUP, rank)

    @property
    def rank(self) -> int:
        return self.simulated_rank

    def start_gather(self, x_NHW: Tensor, spans: HeadSpans, run: TokenSpans) -> Arrival:
        return lambda: (x_NHW[:, slice(*spans[self.rank])],)

    def start_scatter(self, x_THW: Tensor, spans: HeadSpans, run: TokenSpans) -> Arrival:
        tokens = x_THW[slice(*run[self.rank])]
        whole = tokens.new_zeros(len(tokens), spans[-1][1], tokens.size(2))
        whole[:, slice(*spans[self.rank])] = tokens
        self.returned.append(tokens.flatten(1))
        return lambda: (whole,)


def _drive(module: nn.Module, layout: AttentionLayout, exchange: _Pretended, arguments: inspect.BoundArguments) -> Any:
    def attend(call: AttentionCall, heads: OwnHeads, compute: Callable[[AttentionCall], Tensor]) -> Tensor:
        return compute(of_own_heads(call, heads, exchange.rank))

    return run_async(module, module.forward, layout, exchange, arguments, lambda table, dim: table, attend)


def _copied(arguments: inspect.BoundArguments) -> inspect.BoundArguments:
    """The same arguments, with hidden states that get a gradient."""
    copied = inspect.BoundArguments(arguments.signature, OrderedDict(arguments.arguments))
    for name, value in copied.arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3:
            copied.arguments[name] = value.detach().requires_grad_()
    return copied


def _results(module: nn.Module, hidden: Tensor, output: Tensor) -> dict[str, Tensor]:
    draw = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    inputs = {"hidden states": hidden, **dict(module.named_parameters())}
    gradients = torch.autograd.grad(output, list(inputs.values()), draw, retain_graph=True, allow_unused=True)
    named = {f"the gradient of {name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}
    return {"its output": output, **{name: gradient for name, gradient in named.items() if gradient is not None}}


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class AsyncUlyssesModules:
    """The number of attention modules with and without async Ulysses."""

    num_async: int  # number of modules whose projections overlap their all-to-alls
    plain: dict[str, int]  # reason -> number of modules that use plain Ulysses

    def __str__(self) -> str:
        total = self.num_async + sum(self.plain.values())
        reasons = "; ".join(f"plain {number}: {reason}" for reason, number in sorted(self.plain.items()))
        return f"async {self.num_async} of {total} layers" + (f" ({reasons})" if reasons else "")


def apply_async_ulysses(model: OmniModel, sp: int) -> AsyncUlyssesModules:
    """Apply async Ulysses where all ranks, which must call this, support it; the model is not sharded yet."""
    foundation: Any = model.foundation
    layouts = attention_layouts(foundation, model.runner.contract)
    classes = {name for name, _ in layouts}
    modules = [module for module in foundation.modules() if type(module).__name__ in classes]
    found = [_layout_on(module, layouts, sp) for module in modules]
    of_ranks = gathered_objects([reason if isinstance(reason, str) else None for reason in found])
    plain: Counter[str] = Counter()
    for module, layout, reasons in zip(modules, found, zip(*of_ranks, strict=True), strict=True):
        if reason := next(filter(None, reasons), None):  # of any rank, because all ranks must do the same
            plain[reason] += 1
        elif isinstance(layout, AttentionLayout):
            use_async_ulysses(module, layout)
    return AsyncUlyssesModules(len(modules) - plain.total(), dict(plain))


def _layout_on(module: nn.Module, layouts: AttentionLayouts, sp: int) -> AttentionLayout | str:
    layout = layouts.get(kind_of(module), "its weights have another shape than in the tiny model")
    return (why_not_async(module, layout, sp) or layout) if isinstance(layout, AttentionLayout) else layout
