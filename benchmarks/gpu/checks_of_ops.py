"""Operations on the device against fp32 on the CPU: attention, blocks of a ring, experts, losses, norms, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from gpu.compared import Tensors, differentiated, excess
from gpu.loopback import LateLoopback, PromptLoopback, check_late_rows
from gpu.measured import NEEDS_CUDA
from omnitrain.ops.attention.backends import BACKENDS
from omnitrain.ops.attention.backends.flex import FLEX
from omnitrain.ops.attention.backends.reference import REFERENCE
from omnitrain.ops.attention.spec import AttentionBackend, AttentionCall, MaskSpec
from omnitrain.ops.experts.install import set_experts, use_omnitrain_experts
from omnitrain.ops.fused.patch_embed import PATCH_EMBED
from omnitrain.ops.fused.rms_norm import RMS_NORM, RMSNormForm
from omnitrain.ops.fused.rotary import ROTARY
from omnitrain.ops.fused.swiglu import SWIGLU
from omnitrain.ops.loss.cross_entropy import CROSS_ENTROPY, IGNORED, linear_cross_entropy
from omnitrain.ops.turns import run_in_turns
from omnitrain.optim.build import build_optimizer
from omnitrain.parallel.expert.dispatch import RankDispatcher
from omnitrain.recipe import Optimizer
from tests.ops.attention.blocks import CHUNKS, SCALE, by_blocks

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: of the figure.
        measure: device -> the largest deviation as a multiple of what rounding explains; above 1, it is an error.
        obstacle: device -> why it cannot run there; None: it can.
    """

    name: str
    measure: Callable[[torch.device], float]
    obstacle: Callable[[torch.device], str | None] = lambda device: None


def only_cuda(device: torch.device) -> str | None:
    """Return what a check needs that runs only on a GPU."""
    return None if device.type == "cuda" else NEEDS_CUDA


def drawn(seed: int = 0, **shapes: Sequence[int]) -> Tensors:
    """Return random numbers by name, fp32 on the CPU."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=draw) for name, shape in shapes.items()}


# --- attention ---

OFFSETS = (0, 70, 71, 200, 256)  # of the samples of a pack
HEADS, KEY_HEADS = 4, 2


def _two_way(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    """A mask that is no distance: even tokens see all of their sample, odd ones what is before them."""
    return (key <= query) | (query % 2 == 0)


MASKS: dict[str, Callable[[], MaskSpec]] = {
    "causal": partial(MaskSpec, OFFSETS, causal=True),
    "full": partial(MaskSpec, OFFSETS),
    "window": partial(MaskSpec, OFFSETS, causal=True, window=33),
    "general": partial(MaskSpec, OFFSETS, general=_two_way),
}
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {  # a mask, and other fields of the call
    **{name: (name, {}) for name in MASKS},
    "softcap": ("causal", {"softcap": 5.0}),
    "sinks": ("window", {"sinks": True}),
}
WIDE = (64, 96, 128, 192, 256)  # head dimensions
WIDTHS = {"flash": WIDE, "varlen": WIDE, "sdpa": (64, 128, 256), "flex": (128,), "reference": (64,)}
DTYPES = {"flash": (BF16,), "varlen": (BF16,), "sdpa": (BF16, FP32), "flex": (BF16,), "reference": (FP32,)}


def _attention(feature: str, attend: Callable[[AttentionCall], Tensor], inputs: Tensors) -> Tensors:
    mask, fields = FEATURES[feature]
    fields = {name: inputs.get(name, value) for name, value in fields.items()}
    states = {name: inputs[name] for name in ("query", "key", "value")}
    return {"output": attend(AttentionCall(**states, mask=MASKS[mask](), **fields))}


def attention_inputs(feature: str, width: int) -> Tensors:
    """Queries of four heads, keys and values of two, and what else the feature reads."""
    states = {name: (1, heads, OFFSETS[-1], width) for name, heads in (("query", HEADS), ("key", KEY_HEADS))}
    sinks = {"sinks": (HEADS,)} if "sinks" in FEATURES[feature][1] else {}
    return drawn(query=states["query"], key=states["key"], value=states["key"], **sinks)


def attention(backend: AttentionBackend, feature: str, width: int, dtype: torch.dtype) -> Check:
    """Forward and backward of a backend over a pack, against the formula; flex has no backward on a CPU."""

    def measure(device: torch.device) -> float:
        has_backward = backend is not FLEX or device.type == "cuda"
        cpu, there = (
            differentiated(partial(_attention, feature, attend), has_backward)
            for attend in (REFERENCE.attend, backend.attend)
        )
        return excess(attention_inputs(feature, width), cpu, there, device, dtype)

    def obstacle(device: torch.device) -> str | None:
        if backend.automatic_on == {"cuda"} and backend is not FLEX and device.type != "cuda":
            return NEEDS_CUDA
        with torch.no_grad():
            states = {n: x.to(device, dtype) for n, x in attention_inputs(feature, width).items()}
            seen: list[str | None] = []
            _attention(feature, lambda call: seen.append(backend.obstacle(call)) or call.query, states)
        return seen[0]

    name = f"attention {backend.name} {feature} {width} {str(dtype).removeprefix('torch.')}"
    return Check(name, measure, obstacle)


def attention_checks() -> Iterator[Check]:
    """Each backend with each feature that it declares."""
    for backend in BACKENDS:
        for feature in FEATURES:
            needs: list[frozenset[str]] = []
            _attention(feature, lambda call, n=needs: n.append(call.needs) or call.query, attention_inputs(feature, 8))
            for width in WIDTHS[backend.name] if needs[0] <= backend.honours else ():
                for dtype in DTYPES[backend.name]:
                    yield attention(backend, feature, width, dtype)


# --- ring ---

RING_MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": 30},
}


def ring(mask: str, width: int) -> Check:
    """Blocks of a ring, forward and backward, against attention over the whole sequence."""
    spec = MaskSpec((0, 17, 20, CHUNKS[-1]), **RING_MASKS[mask])
    shapes = {"query": (HEADS, CHUNKS[-1], width), "key": (KEY_HEADS, CHUNKS[-1], width)}
    inputs = drawn(**shapes, value=shapes["key"], grad=shapes["query"])
    inputs["query"] *= width**-0.5 / SCALE  # scores as a model has them
    names = ("output", "gradient of query", "gradient of key", "gradient of value")

    def blocks(tensors: Tensors) -> tuple[float, Tensors]:
        *states, grad = tensors.values()
        return 0.0, dict(zip(names, by_blocks(states, grad, spec), strict=True))

    def whole(tensors: Tensors) -> tuple[float, Tensors]:
        *states, grad = (tensor[None] for tensor in tensors.values())
        leaves = [state.requires_grad_() for state in states]
        out = REFERENCE.attend(AttentionCall(*leaves, mask=spec, scale=SCALE)).transpose(1, 2)
        made = [out, *torch.autograd.grad(out, leaves, grad)]
        return 0.0, {name: tensor[0].detach() for name, tensor in zip(names, made, strict=True)}

    def measure(device: torch.device) -> float:
        return excess(inputs, whole, blocks, device, BF16 if device.type == "cuda" else FP32)

    return Check(f"ring {mask} {width}", measure)


# --- experts ---

EXPERTS, TOP_K = 8, 2
ROUTES: dict[str, Callable[[Tensor], Tensor]] = {  # scores [T, experts] -> scores
    "even": lambda scores: scores,
    "empty": lambda scores: scores[:, :3],
    "one": lambda scores: scores + torch.eye(EXPERTS)[5] * 100,
}
EXPERT_SIZES = {"aligned": (64, 32), "odd": (36, 20)}  # hidden and inner width


def experts(routes: str, size: str, dtype: torch.dtype) -> Check:
    """Experts of a layer, some without rows or of widths that no kernel takes, with the gradients of everything."""
    hidden, inner = EXPERT_SIZES[size]
    shapes = {"hidden": (101, hidden), "scores": (101, EXPERTS), "weights": (101, TOP_K)}
    shapes |= {"gate_up_proj": (EXPERTS, 2 * inner, hidden), "down_proj": (EXPERTS, hidden, inner)}
    inputs = drawn(**shapes)
    index = ROUTES[routes](inputs.pop("scores")).topk(TOP_K, dim=-1).indices
    config = Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=hidden, moe_intermediate_size=inner)
    layer = Qwen3MoeExperts(config)
    use_omnitrain_experts(layer)

    def compute(tensors: Tensors) -> Tensors:
        rows, weights = tensors["hidden"], tensors["weights"]
        matrices = {name: tensors[name] for name in ("gate_up_proj", "down_proj")}
        return {"output": functional_call(layer, matrices, (rows, index.to(rows.device), weights))}

    run = differentiated(compute)
    name = f"experts {routes} {size} {str(dtype).removeprefix('torch.')}"
    return Check(name, lambda device: excess(inputs, run, run, device, dtype))


def pair(device: torch.device) -> float:
    """A forward and a backward of two layers of experts in turns, over a loopback, against one after the other.

    Both give their turn whenever they wait for rows, which come late.
    """
    hidden, inner = EXPERT_SIZES["aligned"]
    inputs = drawn(first=(101, hidden), second=(101, hidden), gate_up_proj=(EXPERTS, 2 * inner, hidden))
    inputs |= drawn(1, down_proj=(EXPERTS, hidden, inner))
    index = drawn(2, scores=(101, EXPERTS))["scores"].topk(TOP_K, dim=-1).indices
    layer = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=hidden, moe_intermediate_size=inner))

    def run(tensors: Tensors, in_turns: bool) -> tuple[float, Tensors]:
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
        there = leaves["first"].device
        set_experts(layer, dispatcher=RankDispatcher(LateLoopback(there) if in_turns else PromptLoopback(), 2))
        matrices = {name: leaves[name] * 0.1 for name in ("gate_up_proj", "down_proj")}
        routes = index.to(there), torch.full(index.shape, 0.5, device=there)
        outputs: Tensors = {}

        def forward(name: str) -> None:
            rows = leaves[name]
            for _ in range(2):
                rows = rows + functional_call(layer, matrices, (rows, *routes))
            outputs[name] = rows

        def backward(name: str) -> None:
            outputs[name].sum().backward(retain_graph=True)  # `matrices` are of both graphs

        forward("first")
        if in_turns:
            run_in_turns(partial(forward, "second"), partial(backward, "first"), there, draws=False)
        else:
            backward("first")
            forward("second")
        backward("second")
        gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return 0.0, outputs | gradients

    return excess(inputs, partial(run, in_turns=False), partial(run, in_turns=True), device, FP32)


def late_rows(device: torch.device) -> float:
    """Random exchanges of experts over a late link have the bits of a prompt one; 0: they have."""
    check_late_rows(device, BF16 if device.type == "cuda" else FP32, 20)
    return 0.0


# --- losses, norms and the like ---


def loss(backend: Any) -> Check:
    """The loss of a linear head, with rows that have no label, against torch's cross entropy."""
    inputs = drawn(hidden=(120, 64), weight=(1000, 64))
    labels = torch.randint(1000, (120,), generator=torch.Generator().manual_seed(1))
    labels[::7] = IGNORED

    def plain(tensors: Tensors) -> Tensors:
        logits = (tensors["hidden"] @ tensors["weight"].mT).float()
        return {"sum": F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")[None]}

    def chunked(tensors: Tensors) -> Tensors:
        there = labels.to(tensors["hidden"].device)
        term = linear_cross_entropy(**tensors, labels=there, backend=backend.name, chunk_elements=30_000)
        return {"sum": term.sum[None]}

    def obstacle(device: torch.device) -> str | None:
        return only_cuda(device) if backend.name == "compiled" else backend.missing(device)

    cpu, there = differentiated(plain), differentiated(chunked)
    return Check(f"loss {backend.name}", lambda device: excess(inputs, cpu, there, device, BF16), obstacle)


def fused(
    operation: str, backends: Sequence[Any], inputs: Tensors, arguments: Callable[[Tensors], Any]
) -> Iterator[Check]:
    """Each backend of a fused operation against the one named ``torch``."""
    reference = next(backend for backend in backends if backend.name == "torch")

    def compute(run: Callable[..., Any], tensors: Tensors) -> Tensors:
        made = run(*arguments(tensors))
        return {str(i): x for i, x in enumerate(made if isinstance(made, tuple) else (made,))}

    cpu = differentiated(partial(compute, reference.run))
    for backend in backends:
        there = differentiated(partial(compute, backend.run))
        yield Check(f"{operation} {backend.name}", partial(excess, inputs, cpu, there, dtype=BF16), backend.missing)


def fused_checks() -> Iterator[Check]:
    """Norms, rotary positions, gated MLPs, patches."""
    form = RMSNormForm(eps=1e-6, offset=0.0, rounds_first=True, by_power=False)
    rows = drawn(x=(50, 128), weight=(128,))
    yield from fused("rms_norm", RMS_NORM, rows, lambda tensors: (*tensors.values(), form))
    angles = torch.outer(torch.arange(50.0), 0.5 ** torch.arange(32.0)).repeat(1, 2)[None]

    def with_angles(tensors: Tensors) -> tuple[Tensor, ...]:
        return (*tensors.values(), *(x.to(tensors["query"]) for x in (angles.cos(), angles.sin())))

    states = drawn(query=(1, 4, 50, 64), key=(1, 2, 50, 64))
    yield from fused("rotary", ROTARY, states, with_angles)
    yield from fused("swiglu", SWIGLU, drawn(gate=(50, 96), up=(50, 96)), lambda tensors: tuple(tensors.values()))
    pixels = drawn(x=(7, 3, 2, 16, 16), weight=(32, 3, 2, 16, 16), bias=(32,))
    for check in fused("patch_embed", PATCH_EMBED, pixels, lambda tensors: tuple(tensors.values())):
        if check.name != "patch_embed torch":  # it takes another argument for the stride, which the model has
            yield check


# --- optimizers ---


def optimizer(kind: str, *, offloaded: bool) -> Check:
    """Three updates from given gradients, fp32."""
    shapes = {"matrix": (48, 32), "wide": (32, 80), "vector": (48,)}
    inputs = drawn(**shapes, **{f"gradient {n} {i}": s for i in range(3) for n, s in shapes.items()})

    def updated(tensors: Tensors, offloads: bool) -> tuple[float, Tensors]:
        module = nn.ParameterDict({name: nn.Parameter(tensors[name].clone()) for name in shapes})
        parameters = dict(module.items())
        matrices = [p for p in parameters.values() if p.ndim == 2] if kind == "muon" else []
        made = build_optimizer(
            module, Optimizer(kind=kind), list(parameters.values()) if offloads else (), matrices=matrices
        )
        for i in range(3):
            for name, parameter in parameters.items():
                parameter.grad = tensors[f"gradient {name} {i}"]
            made.step()
        return 0.0, {name: parameter.detach() - tensors[name] for name, parameter in parameters.items()}

    cpu, there = (partial(updated, offloads=offloads) for offloads in (False, offloaded))
    name = f"optimizer {kind}{' offloaded' if offloaded else ''}"
    return Check(name, lambda device: excess(inputs, cpu, there, device, FP32))


def checks() -> list[Check]:
    """Return all of them."""
    return [
        *attention_checks(),
        *(ring(mask, width) for mask in RING_MASKS for width in (64, 128)),
        *(experts(routes, size, dtype) for routes in ROUTES for size in EXPERT_SIZES for dtype in (BF16, FP32)),
        Check("experts over a late link", late_rows),
        Check("experts in turns", pair),
        *map(loss, CROSS_ENTROPY),
        *fused_checks(),
        *(optimizer(kind, offloaded=where) for kind in ("adamw", "muon") for where in (False, True)),
    ]
