"""Losses that keep routers balanced and their scores small: sums over tokens, so that they add up over any layout.

``p_te`` is the softmax of token ``t``'s scores, of ``E`` experts, of which each token takes ``k``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def counts_per_sample(index: Tensor, sample: Tensor, num_samples: int, num_experts: int) -> Tensor:
    """``[samples, E]`` fp32: how often each sample's tokens chose each expert.

    Args:
        index: ``[t, k]`` experts.
        sample: ``[t]`` int64.
        num_samples: in all.
        num_experts: ``E``.
    """
    place = (sample.unsqueeze(-1) * num_experts + index).view(-1)
    counts = torch.zeros(num_samples * num_experts, device=index.device)
    return counts.scatter_add_(0, place, torch.ones_like(place, dtype=counts.dtype)).view(num_samples, num_experts)


def sample_balance(scores: Tensor, counts: Tensor, sample: Tensor) -> Tensor:
    """Sum over tokens of ``E * sum_e f_e p_te``, ``f_e`` the share of expert ``e`` in the choices of a token's sample.

    Divided by the tokens it is 1 where each sample's experts are taken equally often (DeepSeek-V3, equation 17, each
    sample weighted by its tokens).

    Args:
        scores: ``[t, E]``, before the softmax.
        counts: ``[samples, E]``: choices of whole samples.
        sample: ``[t]`` int64, each token's.
    """
    fractions = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return scores.size(-1) * (scores.float().softmax(-1) * fractions[sample]).sum()


def fraction_balance(scores: Tensor, fractions: Tensor) -> Tensor:
    """Sum over tokens of ``E * sum_e f_e p_te`` for given shares ``f`` ``[E]``, such as those of the step before."""
    return scores.size(-1) * (scores.float().softmax(-1) @ fractions).sum()


def micro_batch_balance(scores: list[Tensor], index: list[Tensor]) -> Tensor:
    """Transformers' ``load_balancing_loss_func`` over all layers of one micro-batch: no sum over tokens.

    Args:
        scores: per layer ``[t, E]``.
        index: per layer ``[t, k]``.
    """
    probabilities, chosen = torch.cat(scores).float().softmax(-1), torch.cat(index)
    rows = torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)
    counts = counts_per_sample(chosen, rows, 1, probabilities.size(-1))[0]
    return probabilities.size(-1) * (counts / len(chosen) * probabilities.mean(0)).sum()


def z_loss(scores: Tensor) -> Tensor:
    """Sum over tokens of the squared logarithm of the softmax's denominator (ST-MoE, equation 5)."""
    return scores.float().logsumexp(-1).square().sum()
