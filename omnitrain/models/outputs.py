"""What heads and models return."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossTerm:
    """A loss before division: units sum, the trainer divides once by the count of the whole global batch.

    Attributes:
        rows: ``[n]`` fp32, the loss of each predicted token, nats.
    """

    rows: torch.Tensor

    @property
    def sum(self) -> torch.Tensor:
        """Scalar sum over the predicted tokens; differentiable."""
        return self.rows.sum()

    @property
    def count(self) -> int:
        """Number of predicted tokens."""
        return self.rows.numel()


@dataclass(frozen=True)
class OmniOutput:
    """Output of :meth:`OmniModel.forward`.

    Attributes:
        losses: ``text`` and decoder names -> :class:`LossTerm`.
        hidden: ``[1, T, hidden]``, the foundation's last hidden states.
    """

    losses: dict[str, LossTerm]
    hidden: torch.Tensor
