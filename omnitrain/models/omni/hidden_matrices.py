"""Find the matrices of a model's hidden layers: those that are neither embeddings nor heads."""

from __future__ import annotations

from torch import nn

from omnitrain.models.omni.model import OmniModel
from omnitrain.optim.roles import roles_of


def hidden_matrices(model: OmniModel) -> set[nn.Parameter]:
    """Return the weights of linear layers ``[out, in]``, and of all experts of a layer ``[experts, ...]``.

    Without the language model's head, the decoders (embeddings and heads of codes), and LoRA adapters. Embeddings,
    convolutions, routers with a class of their own, biases and norms are no linear layers.

    Args:
        model: parallelized or not.
    """
    head = model.foundation.get_output_embeddings()
    elsewhere = {model.get_parameter(name) for name in model.adapter_names}
    elsewhere.update(model.foundation.get_input_embeddings().parameters(), head.parameters() if head else ())
    for decoder in model.decoders.values():
        elsewhere.update(decoder.parameters())
    return {parameter for parameter, role in roles_of(model).items() if role == "matrix"} - elsewhere
