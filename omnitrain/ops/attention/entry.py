"""The attention entry point and the mask function that omnitrain registers with transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from omnitrain.errors import UserError
from omnitrain.ops.attention import packed_context
from omnitrain.ops.attention.backends import BACKENDS
from omnitrain.ops.attention.hf_masks import describe, is_causal, pattern_of
from omnitrain.ops.attention.spec import (
    CAUSAL,
    FULL,
    AttentionBackend,
    AttentionCall,
    MaskFunction,
    MaskSpec,
    plain_spec,
    shard_of,
)
from omnitrain.ops.attention.unpacked import EAGER, SDPA, plain_attention, plain_mask
from omnitrain.ops.cpu.unread_rows import rows_read_of
from omnitrain.torch_private import version_of

AUTO = "auto"


# Class of a layer, backend that the settings ask for, needs, device and dtype of its calls, and more -> its backend.
CHOSEN: dict[tuple[Any, ...], AttentionBackend] = {}


def choose(module: torch.nn.Module, call: AttentionCall, asked: str) -> AttentionBackend:
    """Return the backend ``asked``, for ``auto`` the first that can run the call; a UserError names the obstacle."""
    query, name = call.query, type(module).__name__
    sizes, of_mask = (query.size(-1), call.value.size(-1)), getattr(call.mask.general, "dtype", None)
    key = (name, asked, call.needs, query.device.type, query.dtype, *sizes, of_mask, call.has_gradients)
    if key not in CHOSEN:
        CHOSEN[key] = _choose(name, call, asked)
    return CHOSEN[key]


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, and ``auto``."""
    return (AUTO, *(backend.name for backend in BACKENDS))


def require_trainable(asked: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError for a backend that cannot train causal attention in ``dtype`` on ``device`` with any model."""
    if asked != AUTO:
        states = torch.empty(1, 1, 2, 64, device=device, dtype=dtype, requires_grad=True)
        with torch.enable_grad():
            _choose("ordinary attention", AttentionCall(states, states, states, MaskSpec((0, 2), causal=True)), asked)


def _choose(module: str, call: AttentionCall, asked: str) -> AttentionBackend:
    device = call.query.device.type
    candidates = [b for b in BACKENDS if b.automatic_on is None or device in b.automatic_on]
    for backend in candidates if asked == AUTO else [b for b in BACKENDS if b.name == asked]:
        if _problem(backend, call) is None:
            return backend
    problems = {backend.name: _problem(backend, call) for backend in BACKENDS}
    if asked == AUTO:
        reasons = "; ".join(f"{backend.name}: {problems[backend.name]}" for backend in candidates)
        raise UserError(f"no attention backend can compute {module}: {reasons}")
    able = ", ".join(name for name, problem in problems.items() if problem is None) or "none"
    raise UserError(f"attention backend {asked!r} cannot compute {module}: {problems[asked]}; {able} can")


def _problem(backend: AttentionBackend, call: AttentionCall) -> str | None:
    lacking = sorted(call.needs - backend.honours)
    return f"it does not support {', '.join(lacking)}" if lacking else backend.obstacle(call)


# cu_seqlens tensor -> its version and its values.
_read_before = WeakTensorKeyDictionary()
# cu_seqlens tensor -> the specs of the layers that got it.
_specs_of = WeakTensorKeyDictionary()

Attend = Callable[[AttentionCall], Tensor]
_through: ContextVar[Callable[[AttentionCall, Attend], Tensor] | None] = ContextVar("attention_through", default=None)


@contextmanager
def attending_through(around: Callable[[AttentionCall, Attend], Tensor]) -> Iterator[None]:
    """Let ``around(call, attend)`` compute packed attention inside, by the backend's ``attend`` or in another way."""
    token = _through.set(around)
    try:
        yield
    finally:
        _through.reset(token)


def omnitrain_mask(*, implementation: str, **arguments: Any) -> MaskSpec | Tensor | None:
    """Return a spec for a packed sequence, else the mask of ``implementation``; for ``AttentionMaskInterface``.

    ``arguments`` are those of ``sdpa_mask``. Raises UserError: the mask does not fit the packed sequence.
    """
    padding, packed = arguments.get("attention_mask"), packed_context.packed_sequence()
    if isinstance(padding, MaskSpec):  # an outer model made it; transformers passes on such a mask, too
        return padding
    if packed_context.has_blocks() and is_causal(arguments["mask_function"]):
        arguments["mask_function"] = packed_context.with_blocks(arguments["mask_function"])
        arguments["allow_is_causal_skip"] = False
        if packed is None and implementation not in (SDPA, EAGER):
            raise UserError(f"tokens of an image see each other, which {implementation!r} cannot; use {SDPA!r}")
    if packed is None:
        return plain_mask(implementation, **arguments)
    shape = tuple(arguments[name] for name in ("batch_size", "q_length", "kv_length"))
    if shape != (1, packed.num_local_tokens, packed.num_local_tokens):
        if is_causal(arguments["mask_function"]):
            raise UserError(
                f"inside a packed sequence of {packed.num_local_tokens} tokens the model makes a causal mask for "
                f"(batch size, queries, keys) = {shape}, so omnitrain cannot tell which of them belong to which sample"
            )
        return plain_mask(implementation, **arguments)
    if padding is not None and not bool(padding.all()):
        raise UserError("a packed sequence has no padding, but attention_mask masks out tokens")
    spec = _described(packed, arguments["mask_function"], arguments.get("use_vmap", False), arguments["device"])
    packed.masks.append(spec)
    return spec if packed.sequence_slice is None else spec.on(packed.sequence_slice.attention)


def _described(
    packed: packed_context.PackedSequence, function: MaskFunction, use_vmap: bool, device: torch.device
) -> MaskSpec:
    """The mask of the whole sequence; a mask function made from a slice of the tokens may not cover it."""
    if packed.whole_masks is not None and pattern_of(function, packed.offsets) is None:
        return packed.whole_masks()[len(packed.masks)]
    return describe(function, packed.offsets, use_vmap, device)


@torch.compiler.disable  # offsets are values, not shapes: torch would recompile a traced call for each pack
def omnitrain_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskSpec | Tensor | None = None,
    *,
    backend: str,
    implementation: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend within the segments of a packed sequence, else as ``implementation``; for ``AttentionInterface``.

    ``query`` is ``[B, heads, T, head_dim]``, ``key`` and ``value`` are ``[B, key heads, T, head_dim or value_dim]``;
    ``backend`` is for packed sequences, or ``auto``; ``kwargs``: see :data:`HONOURED` and :data:`IRRELEVANT`. Returns
    ``[B, T, heads, value_dim]``, and attention weights if ``implementation`` does. Raises UserError: names a feature
    that the layer needs and no backend supports.
    """
    if isinstance(attention_mask, MaskSpec):
        spec, shard = attention_mask, attention_mask.shard
        _check_fit(module, query, key, spec.offsets[-1] if shard is None else shard.num_local_tokens)
        if implementation == SDPA:
            _check_causality(module, spec, kwargs)
    elif (packed_spec := _spec(module, query, key, attention_mask, kwargs)) is not None:
        spec = packed_spec
    else:
        return plain_attention(implementation, module, query, key, value, attention_mask, **kwargs)
    refuse_unknown(type(module).__name__, kwargs)
    _check_bias(module, spec, kwargs.get("position_bias"))
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=spec,
        scale=kwargs.get("scaling"),
        dropout=kwargs.get("dropout") or 0.0,
        softcap=kwargs.get("softcap"),
        position_bias=kwargs.get("position_bias"),
        sinks=kwargs.get("s_aux"),
        # With a shard, ranks exchange queries first, so all are needed.
        read=rows_read_of(module, query.size(2)) if spec.shard is None else None,
    )

    def attend(own: AttentionCall) -> Tensor:
        return choose(module, own, backend).attend(own)

    around = _through.get()
    compute: Attend = attend if around is None else lambda own: around(own, attend)
    return (compute(call) if spec.shard is None else spec.shard.attend(call, compute)), None


def _spec(
    module: torch.nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> MaskSpec | None:
    """The spec of a packed sequence whose mask is not a spec yet; None: the input is not packed."""
    packed = packed_context.packed_sequence()
    if (cu_seqlens := kwargs.get("cu_seq_lens_q")) is not None:
        keys = kwargs.get("cu_seq_lens_k")
        if keys is not None and keys is not cu_seqlens and not torch.equal(keys, cu_seqlens):
            raise UserError(f"{type(module).__name__}: queries and keys of a packed sequence have different offsets")
        offsets, shard = _read(cu_seqlens), shard_of(cu_seqlens)
        if shard is not None or packed is None or packed.sequence_slice is None or packed.offsets != offsets:
            _check_fit(module, query, key, offsets[-1] if shard is None else shard.num_local_tokens)
            spec = _spec_of_layer(module, offsets, mask, kwargs, _specs_of.setdefault(cu_seqlens, set()))
            return spec if shard is None else spec.on(shard)
    if packed is None or not _is_packed(module, query, key, packed, mask):
        packed_context.check_recomputation(module)
        return None
    packed_context.require_no_blocks(module)
    packed_context.relies_on_context(module)
    spec = _spec_of_layer(module, packed.offsets, mask, kwargs, packed.specs)
    return spec if packed.sequence_slice is None else spec.on(packed.sequence_slice.attention)


def _read(cu_seqlens: Tensor) -> tuple[int, ...]:
    """The values of ``cu_seqlens``; all layers of a tower share the tensor, and only the first reads the device."""
    if cu_seqlens.is_inference():  # has no version counter
        return tuple(cu_seqlens.tolist())
    version, offsets = _read_before.get(cu_seqlens, (None, ()))
    if version != version_of(cu_seqlens):
        offsets = tuple(cu_seqlens.tolist())
        _read_before[cu_seqlens] = (version_of(cu_seqlens), offsets)
    return offsets


def _spec_of_layer(
    module: torch.nn.Module, offsets: tuple[int, ...], mask: Tensor | None, kwargs: dict[str, Any], held: set[MaskSpec]
) -> MaskSpec:
    """The spec of a layer that got none; ``held`` then holds it for the other layers."""
    if mask is not None:
        if mask.ndim != 4 or mask.shape[-2:] != (offsets[-1], offsets[-1]):
            raise UserError(
                f"{type(module).__name__}: a mask of shape {tuple(mask.shape)} does not fit a packed sequence of "
                f"{offsets[-1]} tokens"
            )
        return MaskSpec(offsets, general=mask)
    window = kwargs.get("sliding_window")
    spec = plain_spec(offsets, _is_causal(module, kwargs), window)
    held.add(spec)
    if spec.window is not None and not spec.causal:
        raise UserError(f"{type(module).__name__}: a window of {window} without a causal mask is not supported")
    return spec


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether transformers' sdpa would attend causally without a mask."""
    is_causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _check_causality(module: torch.nn.Module, spec: MaskSpec, kwargs: dict[str, Any]) -> None:
    """Check that the spec and the layer agree: without packing sdpa would get no mask and follow the layer."""
    if spec.kind in (CAUSAL, FULL) and spec.causal != _is_causal(module, kwargs):
        raise UserError(
            f"{type(module).__name__}: the model's mask is {spec.kind}, but the layer has "
            f"is_causal={not spec.causal}, so a packed sample would differ from a single one"
        )


def _check_fit(module: torch.nn.Module, query: Tensor, key: Tensor, num_tokens: int) -> None:
    shape = (query.size(0), query.size(2), key.size(2))
    if shape != (1, num_tokens, num_tokens):
        raise UserError(
            f"{type(module).__name__}: batch size, queries and keys are {shape}, but the packed sequence has 1, "
            f"{num_tokens} and {num_tokens} on this rank"
        )


def _check_bias(module: torch.nn.Module, spec: MaskSpec, bias: Tensor | None) -> None:
    """Check that a position bias covers the whole sequence; a model makes it for the tokens that it sees."""
    length = spec.offsets[-1]
    if bias is not None and bias.shape[-2:] != (length, length):
        raise UserError(
            f"{type(module).__name__}: a position bias of shape {tuple(bias.shape)} does not fit a sequence of "
            f"{length} tokens: ranks cannot share the sequences of this model"
        )


def _is_packed(
    module: torch.nn.Module, query: Tensor, key: Tensor, packed: packed_context.PackedSequence, mask: Tensor | None
) -> bool:
    """Whether a layer inside a packed sequence attends over the sequence, not over other states."""
    length = packed.num_local_tokens
    if (query.size(0), query.size(2), key.size(2)) == (1, length, length):
        return True
    if query.size(2) == length or (mask is None and getattr(module, "is_causal", False)):
        _check_fit(module, query, key, length)
    return False


HONOURED = {
    "scaling",
    "dropout",
    "is_causal",
    "sliding_window",
    "softcap",
    "s_aux",
    "position_bias",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
}

IRRELEVANT = {
    "max_length_q": "follows from the offsets",
    "max_length_k": "follows from the offsets",
    "position_ids": "queries and keys are rotated already; kernels only guess offsets from it",
    "position_embeddings": "queries and keys are rotated already",
    "cache_position": "queries and keys are rotated already",
    "past_key_values": "keys and values contain it already",
    "cache": "keys and values contain it already",
    "use_cache": "keys and values contain the cache already",
    "cache_params": "for linear-attention layers",
    "seq_idx": "for linear-attention layers",
    "deterministic": "exact either way",
    "training": "dropout depends on it, and is an argument",
    "attention_mask_2d": "padding; a packed sequence has none",
    "labels": "for the loss",
    "num_items_in_batch": "for the loss",
    "logits_to_keep": "for the head",
    "output_hidden_states": "for the outputs",
    "output_router_logits": "for the outputs",
    "return_dict": "for the outputs",
    "token_type_ids": "the mask contains it if it matters",
    "mm_token_type_ids": "positions and mask contain it if it matters",
}


def refuse_unknown(module_name: str, arguments: dict[str, Any]) -> None:
    """Raise UserError for arguments that are set, could change the result, and that packed attention ignores."""
    unknown = [
        name
        for name, value in arguments.items()
        if name not in HONOURED and name not in IRRELEVANT and value is not None and value is not False
    ]
    if unknown:
        raise UserError(
            f"{module_name} passes {', '.join(sorted(unknown))} to its attention, which packed attention does not "
            "support"
        )
