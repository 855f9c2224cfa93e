"""Losses that keep routers balanced and their scores small. They are sums over tokens, so ranks can add them.

``p_te`` is the softmax of the scores of token ``t`` over ``E`` experts. Each token takes ``k`` experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def counts_per_sample(index: Tensor, sample: Tensor, num_samples: int, num_experts: int) -> Tensor:
    """Count how often the tokens of each sample chose each expert: ``[samples, E]`` fp32.

    ``index`` ``[t, k]`` are the chosen experts, ``sample`` ``[t]`` int64 the index of each token's sample.
    """
    place = (sample.unsqueeze(-1) * num_experts + index).view(-1)
    counts = torch.zeros(num_samples * num_experts, device=index.device)
    return counts.scatter_add_(0, place, torch.ones_like(place, dtype=counts.dtype)).view(num_samples, num_experts)


def sample_balance(scores: Tensor, counts: Tensor, sample: Tensor) -> Tensor:
    """Sum over tokens of ``E * sum_e f_e p_te``, ``f_e`` the share of expert ``e`` in the choices of a token's sample.

    Divided by the number of tokens it is 1 if each sample uses all experts equally often (DeepSeek-V3, equation 17,
    each sample weighted by its tokens). ``scores`` ``[t, E]`` are those before the softmax, ``counts`` ``[samples, E]``
    the choices of whole samples, ``sample`` ``[t]`` int64 the index of each token's sample.
    """
    fractions = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return scores.size(-1) * (scores.float().softmax(-1) * fractions[sample]).sum()


def fraction_balance(scores: Tensor, fractions: Tensor) -> Tensor:
    """Sum over tokens of ``E * sum_e f_e p_te`` for given shares ``f`` ``[E]``, such as the previous step's."""
    return scores.size(-1) * (scores.float().softmax(-1) @ fractions).sum()


def micro_batch_balance(scores: list[Tensor], index: list[Tensor]) -> Tensor:
    """Compute transformers' ``load_balancing_loss_func`` over all layers of one micro-batch; no sum over tokens.

    ``scores`` are ``[t, E]`` and ``index`` ``[t, k]`` of each layer.
    """
    probabilities, chosen = torch.cat(scores).float().softmax(-1), torch.cat(index)
    rows = torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)
    counts = counts_per_sample(chosen, rows, 1, probabilities.size(-1))[0]
    return probabilities.size(-1) * (counts / len(chosen) * probabilities.mean(0)).sum()


def z_loss(scores: Tensor) -> Tensor:
    """Sum over tokens of the squared logarithm of the softmax's denominator (ST-MoE, equation 5)."""
    return scores.float().logsumexp(-1).square().sum()
