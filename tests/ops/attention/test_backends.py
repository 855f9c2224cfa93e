"""Each backend against the formula, segment by segment, for every feature it declares."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from omnitrain.errors import UserError
from omnitrain.ops.attention.backends import BACKENDS
from omnitrain.ops.attention.backends.flash import FLASH
from omnitrain.ops.attention.backends.flex import FLEX
from omnitrain.ops.attention.backends.reference import REFERENCE
from omnitrain.ops.attention.backends.sdpa import SDPA, takes_grouped_heads
from omnitrain.ops.attention.backends.varlen import VARLEN
from omnitrain.ops.attention.entry import CHOSEN, choose
from omnitrain.ops.attention.spec import (
    DROPOUT,
    FULL,
    GENERAL,
    SINKS,
    SOFTCAP,
    WINDOW,
    AttentionBackend,
    AttentionCall,
    MaskSpec,
)
from omnitrain.ops.cpu.unread_rows import ReadRows

OFFSETS = (0, 4, 9, 10, 18)
LENGTH = OFFSETS[-1]
BLOCK_IDS = torch.tensor([-1, 0, 0, -1, 1, 1, -1, 2, 2, -1, -1, 3, 3, 3, -1, -1, -1, -1])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def image_blocks(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    same = (BLOCK_IDS[query] == BLOCK_IDS[key]) & (BLOCK_IDS[query] >= 0)
    return (key <= query) | same


def random_mask(heads: int) -> torch.Tensor:
    return (randn(1, heads, LENGTH, LENGTH, seed=5) > 0) | torch.eye(LENGTH, dtype=torch.bool)


MASKS: dict[str, Callable[[], MaskSpec]] = {
    "full": lambda: MaskSpec(OFFSETS),
    "causal": lambda: MaskSpec(OFFSETS, causal=True),
    "window": lambda: MaskSpec(OFFSETS, causal=True, window=3),
    "image blocks": lambda: MaskSpec(OFFSETS, general=image_blocks),
    "tensor": lambda: MaskSpec(OFFSETS, general=random_mask(1)),
    "tensor per head": lambda: MaskSpec(OFFSETS, general=random_mask(4)),
    "floats": lambda: MaskSpec(OFFSETS, general=randn(1, 1, LENGTH, LENGTH, seed=6)),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "grouped heads": {"key": randn(1, 2, LENGTH, 8, seed=2), "value": randn(1, 2, LENGTH, 8, seed=3)},
    "value width": {"value": randn(1, 4, LENGTH, 6, seed=3)},
    "head width": {name: randn(1, 4, LENGTH, 6, seed=seed) for seed, name in enumerate(("query", "key", "value"))},
    "sinks": {"sinks": randn(4, seed=7) * 2},
    "softcap": {"softcap": 1.5},
    "position_bias": {"position_bias": randn(1, 4, LENGTH, LENGTH, seed=8)},
    "position_bias of all heads": {"position_bias": randn(1, 1, LENGTH, LENGTH, seed=8)},
    "all": {
        "key": randn(1, 2, LENGTH, 8, seed=2),
        "value": randn(1, 2, LENGTH, 6, seed=3),
        "sinks": randn(4, seed=7) * 2,
        "softcap": 1.5,
        "position_bias": randn(1, 4, LENGTH, LENGTH, seed=8),
    },
}


def make_call(mask: str, feature: str, requires_grad: bool = False) -> AttentionCall:
    states = {"query": randn(1, 4, LENGTH, 8, seed=1) * 2, "key": randn(1, 4, LENGTH, 8, seed=2)}
    arguments = {**states, "value": randn(1, 4, LENGTH, 8, seed=3), **FEATURES[feature]}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.clone().requires_grad_(requires_grad)
    return AttentionCall(mask=MASKS[mask](), **arguments)


def seen_by(spec: MaskSpec, start: int, stop: int) -> torch.Tensor:
    """What to add to the scores of a segment, ``[1, 1 or heads, length, length]``."""
    places = torch.arange(start, stop)
    q, k = places[:, None], places[None]
    if isinstance(spec.general, torch.Tensor):
        part = spec.general[..., start:stop, start:stop]
    elif spec.general is not None:
        part = spec.general(0, 0, q, k)[None, None]
    else:
        window = spec.window or LENGTH
        part = (((k <= q) | (not spec.causal)) & (k > q - window))[None, None]
    return part.double() if part.is_floating_point() else torch.where(part, 0.0, -torch.inf).double()


def formula(call: AttentionCall) -> torch.Tensor:
    """The definition of each feature in float64, one segment after the other."""
    outputs = []
    for start, stop in itertools.pairwise(call.mask.offsets):
        q, k, v = (x[0, :, start:stop].double() for x in (call.query, call.key, call.value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = q @ k.mT * (call.scale or q.size(-1) ** -0.5)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.position_bias is not None:
            scores = scores + call.position_bias[0, :, start:stop, start:stop].double()
        weights = (scores + seen_by(call.mask, start, stop)[0]).exp()
        total = weights.sum(-1, keepdim=True)
        if call.sinks is not None:
            total = total + call.sinks.double().exp()[:, None, None]
        outputs.append((weights / total @ v).transpose(0, 1))
    return torch.cat(outputs)[None].float()


def gradients(output: torch.Tensor, call: AttentionCall) -> list[torch.Tensor]:
    inputs = [x for x in vars(call).values() if isinstance(x, torch.Tensor)]
    return list(torch.autograd.grad(output, inputs, randn(*output.shape, seed=9)))


GRID = [
    pytest.param(backend, mask, feature, id=f"{backend.name}-{mask}-{feature}")
    for backend in (SDPA, REFERENCE, FLEX)
    for mask, feature in [*itertools.product(MASKS, ("plain", "all")), *itertools.product(("window",), FEATURES)]
    if make_call(mask, feature).needs <= backend.honours and not backend.obstacle(make_call(mask, feature))
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("backend", "mask", "feature"), GRID)
def test_what_a_backend_declares_equals_the_formula_on_each_segment_alone(
    backend: AttentionBackend, mask: str, feature: str
) -> None:
    call = make_call(mask, feature, requires_grad=backend is not FLEX)
    output = backend.attend(call)
    torch.testing.assert_close(output, formula(call), atol=2e-6, rtol=1e-5)
    if backend is not FLEX:  # it has no backward on CPU
        for ours, exact in zip(gradients(output, call), gradients(formula(call), call), strict=True):
            torch.testing.assert_close(ours, exact, atol=5e-6, rtol=1e-5)


def test_the_grid_has_every_feature_of_the_reference() -> None:
    needs = {need for param in GRID for need in make_call(*param.values[1:]).needs if param.values[0] is REFERENCE}
    assert needs | {DROPOUT} == REFERENCE.honours


@pytest.fixture(params=[0, 4, 64])
def short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Segments of so many tokens at most have explicit scores in sdpa: none, some, all."""
    monkeypatch.setitem(SDPA.attend.__globals__, "SHORT", request.param)
    return request.param


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("offsets", [(0, 18), (0, 3, 6, 9, 11, 18), (0, 1, 2, 18), (0, 4, 9, 18), (0, 5, 5, 9, 18)])
@pytest.mark.parametrize("mask", [{"causal": True}, {"causal": True, "window": 4}, {}])
@pytest.mark.parametrize("backend", [SDPA, REFERENCE])
def test_any_lengths_share_calls_without_changing_results(
    backend: AttentionBackend, mask: dict[str, Any], offsets: tuple[int, ...]
) -> None:
    call = replace(make_call("full", "grouped heads", requires_grad=True), mask=MaskSpec(offsets, **mask))
    output, exact = backend.attend(call), formula(call)
    torch.testing.assert_close(output, exact, atol=2e-6, rtol=1e-5)
    for ours, expected in zip(gradients(output, call), gradients(exact, call), strict=True):
        torch.testing.assert_close(ours, expected, atol=5e-6, rtol=1e-5)


@pytest.mark.usefixtures("short")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", ["full", "causal", "window", "image blocks", "tensor"])
@pytest.mark.parametrize("backend", [SDPA, REFERENCE, FLEX], ids=lambda backend: backend.name)
def test_changing_one_segment_leaves_the_others_bitwise_unchanged(backend: AttentionBackend, mask: str) -> None:
    call = make_call(mask, "plain")
    before = backend.attend(call)
    for x in (call.query, call.key, call.value):
        x[:, :, 4:9] += 100.0
    after = backend.attend(call)
    changed = (before != after).any(-1).any(-1)[0].nonzero().flatten().tolist()
    assert changed and set(changed) <= set(range(4, 9))


def test_segments_of_about_equal_length_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *a, **k: calls.append(q.shape) or real(q, *a, **k))
    monkeypatch.setitem(SDPA.attend.__globals__, "SHORT", 0)
    offsets = (0, 4, 8, 12, 17, 18)
    SDPA.attend(replace(make_call("full", "plain"), mask=MaskSpec(offsets, causal=True)))
    assert [(shape[0], shape[2]) for shape in calls] == [(4, 5), (1, 1)]
    SDPA.attend(replace(make_call("full", "plain"), mask=MaskSpec(offsets)))
    assert [(shape[0], shape[2]) for shape in calls[2:]] == [(3, 4), (1, 5), (1, 1)]


def test_short_segments_of_about_equal_length_share_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    real = torch.baddbmm
    monkeypatch.setattr(
        torch, "baddbmm", lambda *a, **k: shapes.append((*a[1].shape[:2], a[2].size(2))) or real(*a, **k)
    )
    call = make_call("full", "grouped heads")  # of four heads, two and two read the same keys
    SDPA.attend(replace(call, mask=MaskSpec((0, 4, 8, 12, 17, 18), causal=True)))
    assert shapes == [(2 * 4, 2 * 5, 5), (2 * 1, 2 * 1, 1)]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("rows", [[0, 5, 7, 17], [17, 4], [], list(range(18))])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_without_rows_that_nobody_reads_those_that_are_read_and_all_gradients_stay(mask: str, rows: list[int]) -> None:
    call = make_call(mask, "grouped heads", requires_grad=True)
    output, exact = (
        SDPA.attend(replace(call, read=ReadRows(torch.tensor(rows, dtype=torch.long), LENGTH))),
        formula(call),
    )
    torch.testing.assert_close(output[:, rows], exact[:, rows], atol=2e-6, rtol=1e-5)
    loss, expected = (x[:, rows].square().sum() for x in (output, exact))
    inputs = (call.query, call.key, call.value)
    for ours, theirs in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=1e-5)


def test_short_queries_that_nobody_reads_are_not_computed() -> None:
    read = ReadRows(torch.tensor([5, 17]), LENGTH)
    output = SDPA.attend(replace(make_call("causal", "plain"), read=read))
    assert output[0].flatten(1).any(1).nonzero().flatten().tolist() == [5, 17]


def test_text_in_a_model_with_image_blocks_needs_no_mask_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: masks.append(k["attn_mask"]) or real(*a, **k)
    )
    monkeypatch.setitem(SDPA.attend.__globals__, "SHORT", 0)
    call = make_call("image blocks", "plain")
    SDPA.attend(replace(call, mask=MaskSpec(OFFSETS, general=lambda b, h, q, k: k <= q)))
    assert masks == [None] * 3


def exact_varlen(  # the signature of torch.nn.attention.varlen.varlen_attn, as far as it is used
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max_k == cu_seq_q.diff().max()
    assert enable_gqa or query.size(1) == key.size(1)
    assert query.size(2) == key.size(2) == value.size(2)
    assert query.size(2) % 8 == 0, "head_size must be a multiple of 8"
    outputs = []
    for start, stop in itertools.pairwise(cu_seq_q.tolist()):
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        left, right = (stop - start if side < 0 else side for side in window_size)
        seen = (distance <= left) & (distance >= -right)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def varlen_of_torch_2_11(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Any:
    return exact_varlen(*args, scale=scale, window_size=window_size)


def exact_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    assert given["dropout_p"] == 0.0 and given["softcap"] == 0.0
    assert given["causal"] == (given["window_size"][1] == 0)
    lengths = (given["cu_seqlens_q"], given["cu_seqlens_k"], given["max_seqlen_q"], given["max_seqlen_k"])
    scale, window = given["softmax_scale"], given["window_size"]
    return exact_varlen(q, k, v, *lengths, scale=scale, window_size=window, enable_gqa=True)


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("feature", ["plain", "scale", "grouped heads", "value width", "head width"])
@pytest.mark.parametrize(
    ("backend", "kernel"), [(VARLEN, exact_varlen), (VARLEN, varlen_of_torch_2_11), (FLASH, exact_flash)]
)
def test_kernels_of_ragged_rows_get_the_arguments_they_document(
    backend: AttentionBackend, kernel: Callable[..., Any], mask: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backend.attend.__globals__, "_function", lambda: kernel)
    call = make_call(mask, feature)
    torch.testing.assert_close(backend.attend(call), formula(call), atol=2e-6, rtol=1e-5)


def test_flash_is_given_soft_cap_and_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setitem(FLASH.attend.__globals__, "_function", lambda: lambda q, k, v, **more: given.update(more) or q)
    FLASH.attend(replace(make_call("causal", "softcap"), dropout=0.25))
    assert (given["softcap"], given["dropout_p"]) == (1.5, 0.25)


def test_ragged_kernels_of_torch_are_called_by_their_names() -> None:
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    used = set(inspect.signature(exact_varlen).parameters) - {"enable_gqa"}
    assert used <= set(inspect.signature(varlen_attn).parameters)


class TinyLayer(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    ("mask", "feature", "expected"),
    [
        ("causal", "plain", "sdpa"),
        ("window", "grouped heads", "sdpa"),
        ("image blocks", "value width", "sdpa"),
        ("floats", "plain", "sdpa"),
        ("causal", "sinks", "reference"),
        ("window", "softcap", "reference"),
        ("full", "position_bias", "reference"),
    ],
)
def test_auto_takes_the_fastest_that_honours_the_call_and_says_so(mask: str, feature: str, expected: str) -> None:
    call = make_call(mask, feature)
    assert choose(TinyLayer(), call, "auto").name == expected
    assert {
        (used.name, asked, device, dtype)
        for (module, asked, needs, device, dtype, *_), used in CHOSEN.items()
        if module == "TinyLayer" and needs == call.needs
    } == {(expected, "auto", "cpu", torch.float32)}


@pytest.mark.parametrize(
    ("asked", "mask", "feature", "lacking"),
    [
        ("sdpa", "causal", "sinks", SINKS),
        ("sdpa", "window", "softcap", SOFTCAP),
        ("varlen", "image blocks", "plain", GENERAL),
        ("flash", "causal", "sinks", SINKS),
        ("varlen", "causal", "plain", "only on CUDA"),
        ("flash", "causal", "plain", "not installed"),
        ("flex", "floats", "plain", "no float mask"),
    ],
)
def test_a_named_backend_that_cannot_is_refused_with_layer_and_feature(
    asked: str, mask: str, feature: str, lacking: str
) -> None:
    with pytest.raises(UserError, match=f"'{asked}' cannot compute TinyLayer.*{lacking}.*can"):
        choose(TinyLayer(), make_call(mask, feature), asked)


def test_what_was_chosen_for_one_mask_is_not_taken_for_one_that_it_cannot_compute() -> None:
    assert choose(TinyLayer(), make_call("tensor", "scale"), "flex") is FLEX
    with pytest.raises(UserError, match="it takes no float mask, only a function of indices"):
        choose(TinyLayer(), make_call("floats", "scale"), "flex")


def test_flex_is_refused_on_cpu_where_a_backward_may_follow() -> None:
    with pytest.raises(UserError, match="no backward on CPU"):
        choose(TinyLayer(), make_call("causal", "plain", requires_grad=True), "flex")
    assert choose(TinyLayer(), make_call("causal", "plain"), "flex") is FLEX


def gpu_call(**changes: Any) -> Any:
    """As much of a call on CUDA as choosing reads."""
    query = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, is_cuda=True, size=lambda dim: {1: 4, -1: 64}[dim]
    )
    mask = MASKS[changes.pop("mask", "causal")]()
    call = SimpleNamespace(query=query, key=query, value=query, mask=mask, needs=frozenset(), has_gradients=True)
    vars(call).update(changes)
    return call


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"needs": frozenset({FULL})}, "varlen"),
        ({"needs": frozenset({WINDOW}), "mask": "window"}, "varlen"),
        ({"needs": frozenset({WINDOW, SINKS}), "mask": "window"}, "flex"),
        ({"needs": frozenset({GENERAL}), "mask": "image blocks"}, "sdpa"),
        ({"needs": frozenset({GENERAL, SINKS}), "mask": "floats"}, "reference"),
        ({"needs": frozenset({FULL, DROPOUT})}, "sdpa"),
    ],
)
def test_on_cuda_auto_prefers_ragged_kernels(
    changes: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose(TinyLayer(), gpu_call(**changes), "auto").name == expected


def test_flash_kernels_refuse_gpus_before_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert VARLEN.obstacle(gpu_call()) == "it needs compute capability 8.0 or later, and this GPU has 7.5"


@pytest.mark.parametrize(
    ("dtype", "value_width", "masked", "expected"),
    [
        (torch.bfloat16, 64, False, True),
        (torch.bfloat16, 64, True, False),
        (torch.float32, 64, False, False),
        (torch.bfloat16, 32, False, False),
    ],
)
def test_key_heads_are_repeated_on_cuda_where_torch_would_make_all_scores(
    dtype: torch.dtype, value_width: int, masked: bool, expected: bool
) -> None:
    on_cuda: Any = SimpleNamespace(is_cuda=True, dtype=dtype, size=lambda dim: 64)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool) if masked else None
    assert takes_grouped_heads(on_cuda, torch.empty(1, 2, 2, value_width), mask) is expected
    assert takes_grouped_heads(torch.empty(1, 4, 2, 64, dtype=dtype), torch.empty(1, 2, 2, value_width), mask)


def test_repeated_key_heads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnitrain.ops.attention.backends.sdpa.takes_grouped_heads", lambda *_: False)
    call = make_call("tensor", "grouped heads")
    torch.testing.assert_close(SDPA.attend(call), formula(call))


def test_backends_are_told_apart_by_name() -> None:
    assert [backend.name for backend in BACKENDS] == ["flash", "varlen", "sdpa", "flex", "reference"]
