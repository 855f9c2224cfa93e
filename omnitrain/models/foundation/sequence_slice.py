"""The slice of a packed sequence on a rank, when several ranks share the sequence.

We slice the model's inputs: ids, positions, per-token inputs, media features and labels. A slice is any ascending set
of tokens, so it may end inside an item, or between a token and the next one, which is predicted from it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.ops.attention.packed_context import SequenceSlice
from omnitrain.ops.host_values import to_device


def local_positions(sequence_slice: SequenceSlice | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of the tokens ``positions`` this rank has, and where in its slice: ``[m]`` int64, on the host."""
    if sequence_slice is None:
        return torch.arange(len(positions)), positions
    on_rank = sequence_slice.host_positions
    local = torch.searchsorted(on_rank, positions).clamp(max=len(on_rank) - 1)
    index = (on_rank[local] == positions).nonzero()[:, 0]
    return index, local[index]


def cut_pack(pack: Pack, sequence_slice: SequenceSlice) -> Pack:
    """Return the tokens of a slice, without media; ``cu_seqlens`` and ``info`` still describe the whole sequence."""
    index, rows = local_positions(sequence_slice, pack.text_rows)
    return replace(
        pack,
        input_ids=pack.input_ids[:, sequence_slice.positions],
        position_ids=pack.position_ids[..., sequence_slice.positions],
        text_rows=rows,
        text_labels=pack.text_labels[to_device(index, pack.text_labels.device)],
        inputs={},
        targets={},
        token_inputs={name: values[:, sequence_slice.positions] for name, values in pack.token_inputs.items()},
    )


def fewest_tokens(ranks: int) -> int:
    """Return the least tokens of a shared sequence: two per rank, because a matmul rounds a single row differently."""
    return 2 * ranks
