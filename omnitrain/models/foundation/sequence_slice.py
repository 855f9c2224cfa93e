"""The part of a packed row that a rank runs the foundation over, where several ranks share the row.

The row is cut at the model's input: ids, positions, per-token inputs, rows of media and labels. A part is any ascending
set of tokens, so a cut may go through a medium, or between a token and the one that is predicted from it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from omnitrain.data.pack import Pack, PackInfo
from omnitrain.ops.attention import RowPart
from omnitrain.ops.device import to_device


def local_positions(part: RowPart | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Which of some tokens are on this rank, and where.

    Args:
        part: of the row; None: all of it.
        positions: ``[n]`` int64, tokens of the whole row, in any order; on the host, as all that is made of it.

    Returns:
        ``[m]`` int64, indices into ``positions``; ``[m]`` int64, rows of the part.
    """
    if part is None:
        return torch.arange(len(positions)), positions
    place = torch.searchsorted(part.host_rows, positions).clamp(max=len(part.host_rows) - 1)
    index = (part.host_rows[place] == positions).nonzero()[:, 0]
    return index, place[index]


def cut_pack(pack: Pack, part: RowPart) -> Pack:
    """The tokens of a part, without media; sample borders and facts stay those of the whole row."""
    index, rows = local_positions(part, pack.text_rows)
    return replace(
        pack,
        input_ids=pack.input_ids[:, part.rows],
        position_ids=pack.position_ids[..., part.rows],
        text_rows=rows,
        text_labels=pack.text_labels[to_device(index, pack.text_labels.device)],
        inputs={},
        targets={},
        token_inputs={name: values[:, part.rows] for name, values in pack.token_inputs.items()},
    )


def filled_up(pack: Pack, filler: Pack) -> Pack:
    """``pack`` with the samples of ``filler`` behind its own, from which nothing is learnt."""
    both = (pack.info, filler.info)
    return replace(
        pack,
        input_ids=torch.cat([pack.input_ids, filler.input_ids], dim=-1),
        position_ids=torch.cat([pack.position_ids, filler.position_ids], dim=-1),
        cu_seqlens=torch.cat([pack.cu_seqlens, pack.cu_seqlens[-1] + filler.cu_seqlens[1:]]),
        token_inputs={
            name: torch.cat([values, filler.token_inputs[name]], dim=-1) for name, values in pack.token_inputs.items()
        },
        info=PackInfo(
            **{name: tuple(entry for info in both for entry in getattr(info, name)) for name in vars(pack.info)}
        ),
    )


def fewest_tokens(ranks: int) -> int:
    """To which a row is filled up: two for each rank, because a matrix product rounds a single row differently."""
    return 2 * ranks
