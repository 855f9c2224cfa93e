"""Weight decay follows what a parameter is, not its shape."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from omnitrain.errors import UserError
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.optim.build import build_optimizer
from omnitrain.recipe import Optimizer
from omnitrain.train.lr_groups import decays_of, matrices_of
from tests.families import FAMILIES
from tests.tiny import tiny_model

COHERE = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
COHERE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_qk_norm": True}


def on_meta(config: PreTrainedConfig) -> OmniModel:
    with torch.device("meta"):
        return build_omni_model(foundation=foundation_class(config)(config), init_device="meta")


def decays(model: OmniModel, settings: Optimizer) -> dict[str, float]:
    """Name without numbers -> weight decay, as a run sets it."""
    optimizer = build_optimizer(model, settings, (), None, decays_of(model, settings), matrices_of(model, settings))
    of = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    return {
        ".".join(part for part in name.split(".") if not part.isdigit()): of[p]
        for name, p in model.named_parameters()
        if p in of
    }


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_biases_of_experts_and_norms_of_heads_do_not_decay_and_matrices_and_embeddings_do(kind: str) -> None:
    settings = Optimizer(kind=kind, weight_decay=0.1)
    experts = decays(on_meta(FAMILIES["gpt_oss"]()), settings)
    heads = decays(on_meta(AutoConfig.for_model("cohere", **COHERE)), settings)
    for found, zero, more in ((experts, ("bias", "norm", "sinks"), 20), (heads, ("norm",), 12)):
        vectors = {name for name in found if any(word in name for word in zero)}
        assert {name for name, decay in found.items() if decay == 0.0} == vectors
        assert len(found) == more and {found[name] for name in found.keys() - vectors} == {0.1}
    assert experts["foundation.model.layers.mlp.experts.down_proj"] == 0.1
    assert experts["foundation.model.embed_tokens.weight"] == 0.1


def test_nothing_but_biases_and_norms_changed_for_models_whose_vectors_have_one_dim() -> None:
    model = tiny_model()
    found = decays(model, Optimizer(weight_decay=0.1))
    assert set(found.values()) == {0.0, 0.1}
    expected = {
        ".".join(part for part in name.split(".") if not part.isdigit()): 0.1 * (parameter.ndim >= 2)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert found == expected


def test_a_decay_of_its_own_for_biases_of_experts_is_refused() -> None:
    name = "foundation.model.layers.0.mlp.experts.down_proj_bias"
    with pytest.raises(UserError, match=f"'{name}' has only norms and biases, to which weight decay does not apply"):
        decays(on_meta(FAMILIES["gpt_oss"]()), Optimizer(weight_decays={name: 0.1}))
