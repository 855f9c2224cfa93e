"""Attention of a sequence by blocks, from kernels that return the log-sum-exp, against attention over all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from omnitrain.ops.attention import online_softmax
from omnitrain.ops.attention.backends.reference import REFERENCE
from omnitrain.ops.attention.online_softmax import KERNELS, BlockKernel, CudaFlash, kernel_for
from omnitrain.ops.attention.spec import AttentionCall, MaskSpec, repeat_heads
from omnitrain.plan.ring import CAUSAL, FULL, MASKED, Block
from tests.ops.attention.blocks import CHUNKS, SCALE, by_blocks

OFFSETS = (0, 17, 20, 96)
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "short window": {"causal": True, "window": 7},
    "window": {"causal": True, "window": 30},
}
FEATURES: dict[str, tuple[int, int, int]] = {  # key heads, widths of a key and a value
    "grouped heads": (2, 16, 16),
    "odd widths": (4, 12, 6),
}


class FlashOnCpu(CudaFlash):
    """The calls of the CUDA kernel, on CPU."""

    def takes(self, query: Tensor, value: Tensor, block: Block) -> bool:
        return True


class NoKernel(CudaFlash):
    def takes(self, query: Tensor, value: Tensor, block: Block) -> bool:
        return False


def flash_scores(query: Tensor, key: Tensor, scale: float, before: int, after: int) -> Tensor:
    """``[1, H, N, M]``, as FlashAttention-2 masks them (flash_api.cpp, mask.h of torch)."""
    num_queries, num_keys = query.size(1), key.size(1)
    query, key = query.transpose(1, 2), repeat_heads(key.transpose(1, 2), query.size(2))
    before, after = (-1 if seen >= num_keys else seen for seen in (before, after))
    scores = query @ key.mT * scale
    if before < 0 and after < 0:
        return scores
    before, after = (num_keys if seen < 0 else seen for seen in (before, after))
    position = torch.arange(num_queries)[:, None] + num_keys - num_queries
    keys = torch.arange(num_keys)
    return scores.masked_fill((keys < position - before) | (keys > position + after), -torch.inf)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    """A model of the operation: ``[1, N, H, D], [1, M, K, D], [1, M, K, D] -> [1, N, H, D], [1, H, N], ...``."""
    assert (max_q, max_k) == (query.size(1), key.size(1))
    assert is_causal == ((window_size_left, window_size_right) == (-1, 0))
    assert query.size(3) % 8 == 0 and query.size(3) == value.size(3)
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    scores = flash_scores(query, key, scale, window_size_left, window_size_right)
    out = scores.softmax(-1) @ repeat_heads(value.transpose(1, 2), query.size(2))
    return out.transpose(1, 2), scores.logsumexp(-1), query.new_empty(2), query.new_empty(0), query.new_empty(0)


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """A model of the operation, by algorithm 2 of FlashAttention-2."""
    assert (max_q, max_k) == (query.size(1), key.size(1))
    assert is_causal == ((window_size_left, window_size_right) == (-1, 0))
    assert out.shape == grad.shape == query.shape
    assert lse.is_contiguous()
    weights = (flash_scores(query, key, scale, window_size_left, window_size_right) - lse[..., None]).exp()
    grad, out, rows = (x.transpose(1, 2) for x in (grad, out, query))
    keys, values = (repeat_heads(x.transpose(1, 2), rows.size(1)) for x in (key, value))
    of_scores = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale
    of_key, of_value = (
        x.unflatten(1, (key.size(2), -1)).sum(2).transpose(1, 2) for x in (of_scores.mT @ rows, weights.mT @ grad)
    )
    return (of_scores @ keys).transpose(1, 2), of_key, of_value


@contextmanager
def kernel_on_cpu(name: str) -> Iterator[None]:
    """``torch``: torch's for the CPU; ``flash``: that for CUDA with a model of its operation; ``formula``: none."""
    kernels: dict[str, BlockKernel] = {"torch": KERNELS["cpu"], "flash": FlashOnCpu(), "formula": NoKernel()}
    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", flash_forward, "CPU")
        library.impl("_flash_attention_backward", flash_backward, "CPU")
        patch.setitem(KERNELS, "cpu", kernels[name])
        yield


def whole(states: list[Tensor], grad: Tensor, mask: MaskSpec) -> list[Tensor]:
    leaves = [x.double()[None].requires_grad_() for x in states]
    out = REFERENCE.attend(AttentionCall(*(x.float() for x in leaves), mask=mask, scale=SCALE))[0].transpose(0, 1)
    return [out, *(x[0] for x in torch.autograd.grad(out, leaves, grad))]


def make_states(feature: str) -> tuple[list[Tensor], Tensor]:
    key_heads, width, value_width = FEATURES[feature]
    shapes = [(4, width), (key_heads, width), (key_heads, value_width), (4, value_width)]
    draw = torch.Generator().manual_seed(0)
    *states, grad = (torch.randn(heads, CHUNKS[-1], size, generator=draw) for heads, size in shapes)
    return states, grad


@pytest.mark.parametrize("kernel", ["formula", "torch", "flash"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mask", MASKS)
def test_blocks_of_a_ragged_row_combine_to_its_attention(mask: str, feature: str, kernel: str) -> None:
    states, grad = make_states(feature)
    spec = MaskSpec(OFFSETS, **MASKS[mask])
    with kernel_on_cpu(kernel):
        found = by_blocks(states, grad, spec)
    for one, other in zip(found, whole(states, grad, spec), strict=True):
        assert (one - other).abs().max() < 3e-6 * other.abs().max()


@pytest.mark.parametrize("mask", MASKS)
def test_with_the_flash_kernel_equal_chunks_form_no_scores(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states, grad = make_states("grouped heads")
    spec = MaskSpec((0, CHUNKS[-1]), **MASKS[mask])
    with kernel_on_cpu("flash"):
        expected = by_blocks(states, grad, spec)
        monkeypatch.delattr(online_softmax, "_scores")
        assert all(torch.equal(a, b) for a, b in zip(expected, by_blocks(states, grad, spec), strict=True))


def on_gpu(dtype: torch.dtype, block: Block, mask: MaskSpec, softcap: float | None = None) -> bool:
    """Whether CUDA's kernel takes the block."""
    query, value = (
        torch.empty(4, stop - start, 64, dtype=dtype, device="cuda") for start, stop in (block.queries, block.keys)
    )
    return kernel_for(query, value, block, mask, softcap) is KERNELS["cuda"]


def test_on_cuda_the_kernel_takes_half_precision_and_masks_by_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    causal, general = MaskSpec((0, 96), causal=True), MaskSpec((0, 96), general=lambda *indices: indices)
    window = MaskSpec((0, 96), causal=True, window=30)
    equal, longer = Block((48, 72), (24, 48), MASKED), Block((48, 72), (40, 48), MASKED)
    with FakeTensorMode():
        assert on_gpu(torch.bfloat16, Block((0, 24), (0, 24), CAUSAL), causal)
        assert on_gpu(torch.float16, Block((48, 72), (40, 48), FULL), general)
        assert on_gpu(torch.bfloat16, equal, window)
        assert not on_gpu(torch.bfloat16, longer, window)
        assert not on_gpu(torch.bfloat16, equal, general)
        assert not on_gpu(torch.float32, equal, window)
        assert not on_gpu(torch.bfloat16, equal, window, softcap=30.0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not on_gpu(torch.bfloat16, equal, window)


def test_arguments_and_shapes_of_the_cuda_kernel_are_those_of_torch() -> None:
    shapes = ((4, 24, 20), (2, 16, 20), (2, 16, 12), (4, 24, 12))
    query, key, value, grad = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    out, lse = KERNELS["cuda"].attend((query, key, value), (-1, 0), 0.3)
    assert (out.shape, out.dtype) == (grad.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((4, 24), torch.float32)
    grads = KERNELS["cuda"].attend_backward(grad, (query, key, value), out, lse, (5, 2), 0.3)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (query, key, value)]
