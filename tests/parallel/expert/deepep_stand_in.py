"""What DeepEP's ``Buffer`` is documented to do, over gloo; a broken one corrupts what it moves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


class Buffer:
    broken_rank = -1

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        rank_of = topk_idx // (num_experts // self.group_size)
        is_in_rank = (rank_of.unsqueeze(-1) == torch.arange(self.group_size)).any(1)
        return is_in_rank.sum(0), None, torch.bincount(topk_idx.flatten(), minlength=num_experts), is_in_rank, None

    def dispatch(self, x: Tensor, handle: Any = None, **given: Any) -> tuple[Any, ...]:
        if handle is not None:
            sent = self._all(x)
            return torch.cat([rows[mask[:, self.rank]] for rows, mask in zip(sent, handle, strict=True)]), *[None] * 5
        masks = self._all(given["is_token_in_rank"])
        received, index, weights = (
            torch.cat([part[mask[:, self.rank]] for part, mask in zip(self._all(own), masks, strict=True)])
            for own in (x, given["topk_idx"], given["topk_weights"])
        )
        own = len(given["num_tokens_per_expert"]) // self.group_size
        index = index - own * self.rank
        is_here = (index >= 0) & (index < own)
        counts = torch.bincount(index[is_here], minlength=own).tolist()
        return received, index.where(is_here, -1), weights.where(is_here, 0), counts, masks, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        if self.rank == self.broken_rank:
            x = x + 1
        return self._back(x, handle), None if topk_weights is None else self._back(topk_weights, handle), None

    def _back(self, own: Tensor, masks: list[Tensor]) -> Tensor:
        mask = masks[self.rank]
        total = own.new_zeros(len(mask), own.size(1))
        for rank, rows in enumerate(self._all(own)):
            before = sum(int(masks[source][:, rank].sum()) for source in range(self.rank))
            total[mask[:, rank]] += rows[before : before + int(mask[:, rank].sum())]
        return total

    def _all(self, own: Tensor) -> list[Tensor]:
        found: list[Any] = [None] * self.group_size
        dist.all_gather_object(found, own.detach(), self.group)
        return found
