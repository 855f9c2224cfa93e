"""Compute a convolution whose kernel equals its stride as a linear map of patches: it uses every pixel once.

As a convolution it can take 10 to 50,000 times longer, or 17 times the memory (pytorch#174051, #166643).
"""

from __future__ import annotations

from math import prod

import torch.nn.functional as F
from torch import Tensor, nn

from omnitrain.ops.registry import Backend


def patch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the convolution with ``stride = kernel`` and no padding as one matmul.

    ``[N, in, *sizes]``, ``[out, in, *kernel]``, ``[out]`` or None -> ``[N, out, *(size // kernel)]``; ``N`` may be
    missing.
    """
    if x.dim() < weight.dim():
        return patch_linear(x[None], weight, bias)[0]
    kernel = weight.shape[2:]
    counts = [size // side for size, side in zip(x.shape[2:], kernel, strict=True)]
    for dim, (number, side) in enumerate(zip(counts, kernel, strict=True), start=2):
        x = x.narrow(dim, 0, number * side)
    # [N, in, n1, k1, n2, k2, ...] -> [N, n1, n2, ..., in, k1, k2, ...]
    split = x.reshape(*x.shape[:2], *(size for pair in zip(counts, kernel, strict=True) for size in pair))
    dims = range(len(kernel))
    patches = split.permute(0, *(2 + 2 * d for d in dims), 1, *(3 + 2 * d for d in dims))
    rows = F.linear(patches.flatten(1 + len(kernel)), weight.flatten(1), bias)
    return rows.movedim(-1, 1)


PATCH_EMBED = (Backend("linear", patch_linear), Backend("torch", F.conv3d))


def is_patch_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is a plain 2-d or 3-d convolution whose patches neither overlap nor leave gaps."""
    if not isinstance(module, nn.Conv2d | nn.Conv3d) or type(module) not in (nn.Conv2d, nn.Conv3d):
        return False
    return (
        module.kernel_size == module.stride
        and prod(module.kernel_size) > 1
        and module.groups == 1
        and set(module.dilation) == {1}
        and (module.padding == "valid" or set(module.padding) == {0})
    )
