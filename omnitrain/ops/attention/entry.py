"""The one attention entry point and the one mask function that are registered with transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from omnitrain.errors import UserError
from omnitrain.ops.attention.choose import choose
from omnitrain.ops.attention.hf_arguments import refuse_unknown
from omnitrain.ops.attention.hf_masks import describe, is_causal, pattern_of
from omnitrain.ops.attention.packed_context import PackedRow, check_recomputation, packed_row, relies_on_context
from omnitrain.ops.attention.spec import CAUSAL, FULL, Call, MaskFunction, MaskSpec, plain_spec, shard_of
from omnitrain.ops.attention.unpacked import SDPA, plain_attention, plain_mask
from omnitrain.ops.cpu.unread_rows import rows_read_of

# Tensor of borders -> its version, and its values.
_read_before = WeakTensorKeyDictionary()


def omnitrain_mask(*, implementation: str, **arguments: Any) -> MaskSpec | torch.Tensor | None:
    """In transformers' ``AttentionMaskInterface``: a spec for a packed row, else the mask of ``implementation``.

    Args:
        implementation: transformers' own, of unpacked input.
        arguments: as of transformers' ``sdpa_mask``.

    Raises:
        UserError: the row is packed, and what is asked for does not fit it.
    """
    padding, row = arguments.get("attention_mask"), packed_row()
    if isinstance(padding, MaskSpec):  # made by an outer model: as transformers does with a mask that is made already
        return padding
    if row is None:
        return plain_mask(implementation, **arguments)
    shape = tuple(arguments[name] for name in ("batch_size", "q_length", "kv_length"))
    if shape != (1, row.num_rows, row.num_rows):
        if is_causal(arguments["mask_function"]):
            raise UserError(
                f"inside a packed row of {row.num_rows} tokens the model makes a causal mask for batch size, queries "
                f"and keys of {shape}: which of them belong to which sample is not known"
            )
        return plain_mask(implementation, **arguments)
    if padding is not None and not bool(padding.all()):
        raise UserError("a packed row has no padding, but attention_mask leaves tokens out")
    spec = _described(row, arguments["mask_function"], arguments.get("use_vmap", False), arguments["device"])
    row.masks.append(spec)
    return spec if row.part is None else spec.on(row.part.attention)


def _described(row: PackedRow, function: MaskFunction, use_vmap: bool, device: torch.device) -> MaskSpec:
    """The mask of the whole row. A function that was made from some of its tokens may say too little of it."""
    if row.whole_masks is not None and pattern_of(function, row.borders) is None:
        return row.whole_masks()[len(row.masks)]
    return describe(function, row.borders, use_vmap, device)


@torch.compiler.disable  # borders are values, not shapes: a traced call would be compiled again for each row
def omnitrain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskSpec | torch.Tensor | None = None,
    *,
    backend: str,
    implementation: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In transformers' ``AttentionInterface``: segments of a packed row apart, else as ``implementation``.

    Args:
        module: the layer.
        query: ``[B, heads, T, head_dim]``.
        key: ``[B, key heads, T, head_dim]``.
        value: ``[B, key heads, T, value_dim]``.
        attention_mask: what :func:`omnitrain_mask` or the model made.
        backend: name of the backend of packed rows, or ``auto``.
        implementation: transformers' own, of unpacked input.
        kwargs: see :mod:`omnitrain.ops.attention.hf_arguments`.

    Returns:
        ``[B, T, heads, value_dim]``, and weights where ``implementation`` gives some.

    Raises:
        UserError: the layer asks for something that cannot be honoured; names it.
    """
    if isinstance(attention_mask, MaskSpec):
        shard = attention_mask.shard
        _check_fit(module, query, key, attention_mask.borders[-1] if shard is None else shard.num_rows)
        if implementation == SDPA:
            _check_causality(module, attention_mask, kwargs)
        spec = attention_mask
    else:
        found = _spec(module, query, key, attention_mask, kwargs)
        if found is None:
            return plain_attention(implementation, module, query, key, value, attention_mask, **kwargs)
        spec = found
    refuse_unknown(type(module).__name__, kwargs)
    _check_bias(module, spec, kwargs.get("position_bias"))
    call = Call(
        query=query,
        key=key,
        value=value,
        mask=spec,
        scale=kwargs.get("scaling"),
        dropout=kwargs.get("dropout") or 0.0,
        softcap=kwargs.get("softcap"),
        position_bias=kwargs.get("position_bias"),
        sinks=kwargs.get("s_aux"),
        # Ranks of a shard exchange queries first.
        read=rows_read_of(module, query.size(2)) if spec.shard is None else None,
    )

    def compute(whole: Call) -> torch.Tensor:
        return choose(module, whole, backend).attend(whole)

    return (compute(call) if spec.shard is None else spec.shard.attend(call, compute)), None


def _spec(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> MaskSpec | None:
    """The spec of a packed row whose mask is not one yet; None: the input is not packed."""
    row = packed_row()
    if (cu_seqlens := kwargs.get("cu_seq_lens_q")) is not None:
        borders, shard = _borders(module, kwargs), shard_of(cu_seqlens)
        if shard is not None or row is None or row.part is None or row.borders != borders:
            _check_fit(module, query, key, borders[-1] if shard is None else shard.num_rows)
            spec = _spec_of_layer(module, borders, mask, kwargs)
            return spec if shard is None else spec.on(shard)
    if row is None or not _is_row(module, query, key, row, mask):
        check_recomputation(module)
        return None
    relies_on_context(module)
    spec = _spec_of_layer(module, row.borders, mask, kwargs)
    return spec if row.part is None else spec.on(row.part.attention)


def _borders(module: torch.nn.Module, kwargs: dict[str, Any]) -> tuple[int, ...]:
    queries, keys = kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k")
    if keys is not None and keys is not queries and not torch.equal(keys, queries):
        raise UserError(f"{type(module).__name__}: queries and keys of a packed row have different borders")
    return _read(queries)


def _read(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """Its values; all layers of a tower get one tensor, and only the first waits for the device."""
    if cu_seqlens.is_inference():  # cannot tell whether it was written to
        return tuple(cu_seqlens.tolist())
    version, borders = _read_before.get(cu_seqlens, (None, ()))
    if version != cu_seqlens._version:
        borders = tuple(cu_seqlens.tolist())
        _read_before[cu_seqlens] = (cu_seqlens._version, borders)
    return borders


def _spec_of_layer(
    module: torch.nn.Module, borders: tuple[int, ...], mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> MaskSpec:
    if mask is not None:
        if mask.ndim != 4 or mask.shape[-2:] != (borders[-1], borders[-1]):
            raise UserError(
                f"{type(module).__name__}: a mask of shape {tuple(mask.shape)} says nothing of a packed row"
            )
        return MaskSpec(borders, general=mask)
    window = kwargs.get("sliding_window")
    spec = plain_spec(borders, _is_causal(module, kwargs), window)
    if spec.window is not None and not spec.causal:
        raise UserError(f"{type(module).__name__}: a window of {window} that is not causal is not honoured")
    return spec


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """What decides in transformers' sdpa where there is no mask."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _check_causality(module: torch.nn.Module, spec: MaskSpec, kwargs: dict[str, Any]) -> None:
    """Where a spec stands for no mask, sdpa would go by the layer: the two must say the same."""
    if spec.kind in (CAUSAL, FULL) and spec.causal != _is_causal(module, kwargs):
        raise UserError(
            f"{type(module).__name__}: the mask of the model is {spec.kind}, but the layer says "
            f"is_causal={not spec.causal}, so samples alone and in a packed row would differ"
        )


def _check_fit(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, num_rows: int) -> None:
    found = (query.size(0), query.size(2), key.size(2))
    if found != (1, num_rows, num_rows):
        raise UserError(
            f"{type(module).__name__}: batch size, queries and keys are {found}, but the packed row has 1, "
            f"{num_rows} and {num_rows} on this rank"
        )


def _check_bias(module: torch.nn.Module, spec: MaskSpec, bias: torch.Tensor | None) -> None:
    """A bias by position, which a model makes for the tokens that it sees, must be of the whole row."""
    length = spec.borders[-1]
    if bias is not None and bias.shape[-2:] != (length, length):
        raise UserError(
            f"{type(module).__name__}: a position bias of shape {tuple(bias.shape)} does not fit a row of {length} "
            "tokens: this model's sequences cannot be shared by several ranks"
        )


def _is_row(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    row: PackedRow,
    mask: torch.Tensor | None,
) -> bool:
    """Whether a layer inside a packed row attends over it, not over something of its own."""
    length = row.num_rows
    if (query.size(0), query.size(2), key.size(2)) == (1, length, length):
        return True
    if query.size(2) == length or (mask is None and getattr(module, "is_causal", False)):
        _check_fit(module, query, key, length)
    return False
