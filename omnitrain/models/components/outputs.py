"""The output of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omnitrain.ops.loss.cross_entropy import LossTerm


@dataclass(frozen=True)
class OmniOutput:
    """Output of :meth:`OmniModel.forward`.

    Attributes:
        losses: ``text`` or name of a decoder -> :class:`LossTerm`.
        read: loss -> ``[n]`` int64, the token of the pack from which each entry of its ``rows`` was predicted; on the
            host.
        hidden: ``[1, T, hidden]``, the foundation's last hidden states, without gradient; None if the model does not
            expose them. In training, tokens that no loss reads are not computed (``model.ops.unread_rows``). If ranks
            share a sequence, each rank has only its tokens.
    """

    losses: dict[str, LossTerm]
    read: dict[str, torch.Tensor]
    hidden: torch.Tensor | None
