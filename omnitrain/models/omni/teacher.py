"""``Teacher``: a frozen language model that reads the samples' tokens, and gives its last hidden states to losses.

With a divergence, its output layer stands beside the student's: on the ranks of the foundation, sharded as its head is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.data.packing.pack import MediaGroup
from omnitrain.errors import UserError
from omnitrain.models.components.contract import Contract
from omnitrain.models.components.protocols import ComponentAdapter, EncoderMixin, TensorFeatures
from omnitrain.models.contract.check import contract_of
from omnitrain.models.discovery import refusing
from omnitrain.models.foundation.runner import FoundationRunner
from omnitrain.models.hf.load import as_config, foundation_class
from omnitrain.ops.attention.packed_context import SequenceSlice
from omnitrain.ops.loss.divergence import Divergence, Taught, linear_divergence
from omnitrain.ops.loss.linear import LossTerm
from omnitrain.recipe.component_configs import TeacherConfig
from omnitrain.transformers_private import ContainerModel


class OutputLayer(nn.Linear):
    """A teacher's output layer beside the student's: a part of the foundation's component, and not called itself."""


class Teacher(ContainerModel, EncoderMixin):
    """A frozen language model, as an encoder whose items are samples: for each token, its last hidden state.

    Attributes:
        head: with a divergence, its output layer for the classes of the student (:meth:`fit_head`).
        slice_of: tokens of a call, and their device -> this rank's slice. None, also from it: the rank has all tokens.
    """

    config_class = TeacherConfig
    base_model_prefix = ""
    is_teacher: ClassVar[bool] = True

    def __init__(self, config: TeacherConfig, model: PreTrainedModel | None = None) -> None:
        """Build from ``config`` with random weights, or around a ready causal language model."""
        super().__init__(config)
        if model is None:
            inner = as_config(config.model or {})
            model = foundation_class(inner)(inner)
        self.model = model
        self.head: OutputLayer | None = None
        self.slice_of: Callable[[int, torch.device], SequenceSlice | None] | None = None
        self.post_init()
        self.requires_grad_(False)
        self.eval()
        self.register_state_dict_post_hook(_without_weights)

    def train(self, mode: bool = True) -> Teacher:
        """Stay as in evaluation: it draws no random numbers, and keeps its statistics."""
        return super().train(False)

    @property
    def width(self) -> int:
        """Width of its hidden states."""
        head: Any = self.model.get_output_embeddings()
        return int(head.weight.size(1))

    def fit_head(self, classes: int) -> None:
        """With a divergence, make the output layer that compares with a student of so many classes.

        Rows that the teacher lacks repeat others: no divergence reads them.
        """
        if self.config.divergence is None:
            return
        layer: Any = self.model.get_output_embeddings()

        def fitted(rows: Tensor) -> nn.Parameter:
            copies = -(-classes // len(rows))
            whole = rows.detach().clone() if copies == 1 else torch.cat([rows.detach()] * copies)
            return nn.Parameter(whole[:classes], requires_grad=False)

        bias = getattr(layer, "bias", None)
        self.head = OutputLayer(layer.in_features, classes, bias is not None, device="meta")
        self.head.weight = fitted(layer.weight)
        if bias is not None:
            self.head.bias = fitted(bias)

    def divergence(self, states: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> LossTerm:
        """Return how far a student is from this teacher, where both predict from the same tokens.

        Args:
            states: ``[n, width]``, its own last hidden states.
            rows: ``[n, hidden]``, those of the student.
            weight: ``[classes, hidden]`` of the student's head; a DTensor as the teacher's output layer is.
            bias: ``[classes]`` or None.
        """
        assert self.head is not None
        own: Any = self.model.get_output_embeddings()
        taught = Taught(states, self.head.weight, self.head.bias, min(own.out_features, self.head.out_features))
        how = Divergence(self.config.divergence, self.config.temperature, self.config.top_k)
        return linear_divergence(rows, weight, taught, how, bias)

    @cached_property
    def runner(self) -> FoundationRunner:
        """Runs the language model by its contract, over text alone; UserError: it cannot run samples in packs."""
        kind = type(self.model).__name__
        with refusing(f"{kind} cannot be run"):
            contract = contract_of(self.model, "as a teacher")
            if not contract.packs:
                raise UserError(f"{kind} cannot run several samples in one call: {contract.why_unpacked}")
            if self.config.divergence is not None:
                require_plain_head(kind, contract)
            return FoundationRunner(self.model, contract)

    def adapter(self) -> ComponentAdapter:
        """Return an adapter without a modality: its items are made of the tokens of packs."""
        return ComponentAdapter()

    def lm_states(self, samples: MediaGroup) -> Tensor:
        """Return the last hidden states of the tokens that are read, ``[sum(samples.num_tokens), width]``.

        Ranks that share the samples call it together, and all of them get these states.

        Args:
            samples: ``input_ids`` int64 and ``is_read`` bool, ``[tokens]`` each; ``num_tokens``: how many are read.

        Raises:
            UserError: the model hides its last hidden states.
        """
        input_ids, lengths = samples.features["input_ids"][None], samples.num_rows["input_ids"]
        positions = torch.cat([torch.arange(length, device=input_ids.device) for length in lengths])[None]
        whole = {"position_ids": positions, "use_cache": False}
        part = None if self.slice_of is None else self.slice_of(input_ids.size(1), input_ids.device)
        here = slice(None) if part is None else part.positions
        # In order, as `nonzero`, but without waiting for the device.
        read = samples.features["is_read"].argsort(descending=True, stable=True)[: sum(samples.num_tokens)]
        states: list[Tensor] = []

        def head(hidden: Tensor, lm_head: Any) -> Tensor:
            states.append((hidden if part is None else part.gather(hidden, 1))[0, read])
            logits: Tensor = lm_head.forward(hidden[:, :1])  # some models compute with them
            return logits

        with torch.no_grad():
            self.runner.run(
                input_ids[:, here],
                head=head,
                arguments={**whole, "position_ids": positions[:, here]},
                packed=self.runner.sequence(lengths, input_ids, whole, part),
            )
        if not states:
            raise UserError(f"{type(self.model).__name__} hides its last hidden states, which losses would read")
        return states[0]

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """Return a sample of one token."""
        return {"input_ids": torch.zeros(1, dtype=torch.long), "is_read": torch.ones(1, dtype=torch.bool)}, (1,)


def require_plain_head(kind: str, contract: Contract) -> None:
    """Raise a UserError if the logits of a model of class ``kind`` are not what its output layer returns."""
    if contract.head != "inside":
        raise UserError(
            f"{kind} changes the logits of its output layer, so the divergence cannot be computed from hidden states; "
            "remove `divergence`, and compare them in a function of `train.losses.text`"
        )


def _without_weights(teacher: Teacher, values: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave the weights out of a state dict: a saved model has no teachers, which are in files of their own."""
    for name in [name for name in values if name.startswith(prefix)]:
        del values[name]
