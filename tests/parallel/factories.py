"""Models that ranks build: each factory gives the same model on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from omnitrain.models.adapters.lora import add_lora, find_adapters
from omnitrain.models.components.outputs import OmniOutput
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe.plan_groups import Lora
from tests.families import FAMILIES, WINDOW_VIT
from tests.models.shrunk import small_configs
from tests.tiny import tiny_model


def any_to_any() -> OmniModel:
    """All modalities, in and out."""
    return tiny_model()


def grid_tower() -> OmniModel:
    """An attached tower with windows; images are all that is read."""
    tower = {"config": WINDOW_VIT | {"model_type": "qwen2_5_vl_vision", "patch_size": 2, "window_size": 8}}
    processor = {"size": {"shortest_edge": 16, "longest_edge": 256}}
    encoder = {"tower": tower, "projector": {"kind": "mlp"}, "processor": processor}
    return tiny_model(encoders={"image_encoder": encoder}, decoders={})


def averaging() -> OmniModel:
    """Its gradients are halved wherever there are ranks: what a mean in place of a sum does on two of them."""
    model = tiny_model()
    if torch.distributed.is_initialized():
        model.register_forward_hook(_halve_gradients)
    return model


def _halve_gradients(module: torch.nn.Module, arguments: object, output: OmniOutput) -> OmniOutput:
    losses = {name: replace(term, sum=(term.sum + term.sum.detach()) / 2) for name, term in output.losses.items()}
    return replace(output, losses=losses)


def _family(name: str, *, vision: Mapping[str, int] | None = None, **values: float) -> PreTrainedModel:
    config = FAMILIES[name]()
    config.update(values)
    if vision:
        config.vision_config.update(vision)
    model = foundation_class(config)(config)
    init_peaked_(model)
    return model


def qwen3_vl() -> PreTrainedModel:
    """Deepstack."""
    return _family("qwen3_vl")


def deepstack_of_four_heads() -> PreTrainedModel:
    """A tower with side features, whose heads four ranks can share."""
    return _family("qwen3_vl", vision={"num_heads": 4})


def windows_of_four_heads() -> PreTrainedModel:
    """A tower with windows, whose heads four ranks can share."""
    return _family("qwen2_5_vl", vision={"num_heads": 4})


def gemma3() -> PreTrainedModel:
    """Bidirectional image blocks, windows."""
    return _family("gemma3")


def gemma4_moe() -> PreTrainedModel:
    """Heads that differ by layer; experts."""
    return _family("gemma4_moe")


def llama4() -> PreTrainedModel:
    return _family("llama4")


def llava_onevision() -> PreTrainedModel:
    return _family("llava_onevision")


def llava() -> PreTrainedModel:
    """A layer inside of the tower gives the rows, not its last one."""
    return _family("llava")


def lfm2_vl() -> PreTrainedModel:
    """Its projector is called image by image."""
    config = next(small_configs("lfm2_vl"))
    model = foundation_class(config)(config)
    init_peaked_(model)
    return model


def internvl() -> PreTrainedModel:
    """A projector of its own."""
    return _family("internvl")


def deepseek_v3() -> PreTrainedModel:
    """Experts, values of another width."""
    return _family("deepseek_v3")


def qwen2_5_omni_thinker() -> PreTrainedModel:
    """Images, videos, sound."""
    return _family("qwen2_5_omni_thinker")


def qwen3_omni_moe_thinker() -> PreTrainedModel:
    """Images, videos, sound; experts."""
    return _family("qwen3_omni_moe_thinker")


def qwen3() -> PreTrainedModel:
    """Norms of queries and keys, head by head."""
    return _family("qwen3")


def qwen3_with_dropout() -> PreTrainedModel:
    """Of attention."""
    return _family("qwen3", attention_dropout=0.1)


def qwen3_of_four_heads() -> PreTrainedModel:
    """Four key-value heads."""
    return _family("qwen3", num_key_value_heads=4)


def glm4v() -> PreTrainedModel:
    """A fused matrix in its MLP."""
    return _family("glm4v")


def qwen2_5_vl() -> PreTrainedModel:
    """A tower with windows."""
    return _family("qwen2_5_vl")


def grouped_linear_heads() -> PreTrainedModel:
    """Linear attention with fewer heads of keys than of values."""
    config = FAMILIES["qwen3_next"]()
    config.linear_num_value_heads = 4
    model = foundation_class(config)(config)
    init_peaked_(model)
    return model


def qwen3_5() -> PreTrainedModel:
    """Linear attention."""
    return _family("qwen3_5")


def qwen3_moe() -> PreTrainedModel:
    """Experts in every layer."""
    return _family("qwen3_moe")


def qwen3_moe_with_adapters(rank: int = 3) -> OmniModel:
    """LoRA beside attention and experts, neither factor of which is zero."""
    model = build_omni_model(foundation=qwen3_moe())
    lora = Lora(targets=["q_proj", "o_proj", "experts.*"], rank=rank)
    add_lora(model, {"foundation": find_adapters(model, "foundation", lora)})
    generator = torch.Generator().manual_seed(1)
    for name in sorted(model.adapter_names):
        model.get_parameter(name).data.normal_(std=0.05, generator=generator)
    return model


def gpt_oss() -> PreTrainedModel:
    """Experts with biases, transposed and interleaved."""
    return _family("gpt_oss")


def qwen3_vl_moe() -> PreTrainedModel:
    """Experts, deepstack."""
    return _family("qwen3_vl_moe")


def qwen3_next() -> PreTrainedModel:
    """Experts beside shared ones, linear attention."""
    return _family("qwen3_next")


def glm4_moe() -> PreTrainedModel:
    """A dense layer, then experts in groups beside shared ones."""
    return _family("glm4_moe")


def ernie4_5_vl_moe() -> PreTrainedModel:
    """Experts of text, and others of images, which a sample without images does not call."""
    return _family("ernie4_5_vl_moe")


def qwen3_moe_with_six_experts() -> PreTrainedModel:
    """Three experts per rank at ep 2, which no two ranks share evenly."""
    return qwen3_moe_with(num_experts=6)


def qwen3_moe_with_two_experts() -> PreTrainedModel:
    """One expert per rank at ep 2."""
    return qwen3_moe_with(num_experts=2)


def moe_of_32_experts() -> PreTrainedModel:
    """Eight experts per rank at ep 4."""
    return qwen3_moe_with(num_experts=32)


def moe_with_shared_experts() -> PreTrainedModel:
    """Eight experts per rank at ep 4 beside ones that every token has."""
    config = FAMILIES["glm4_moe"]()
    config.n_routed_experts = 32
    model = foundation_class(config)(config)
    init_peaked_(model)
    return model


def lopsided_moe() -> PreTrainedModel:
    """Nine tenths of all rows go to the first two of four experts, none to the last."""
    model = qwen3_moe_with(num_experts=4)
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(_to_the_first)
    return model


def qwen3_moe_with(**values: int) -> PreTrainedModel:
    """With other values of its config."""
    config = FAMILIES["qwen3_moe"]()
    for name, value in values.items():
        setattr(config, name, value)
    model = foundation_class(config)(config)
    init_peaked_(model)
    return model


def _to_the_first(router: torch.nn.Module, arguments: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]) -> object:
    logits, scores, index = output
    is_rare = arguments[0].reshape(len(index), -1)[:, 0] > 1.0
    chosen = torch.stack([torch.zeros_like(index[:, 0]), torch.where(is_rare, 2, 1)], dim=-1)
    return logits, scores, chosen


def nearly_tied_moe() -> PreTrainedModel:
    """All experts have nearly the same score; routers round otherwise on several ranks."""
    return _tied(apart=1e-8, noise=1e-6)


def misrouted_moe() -> PreTrainedModel:
    """On several ranks, scores are not those of one process."""
    return _tied(apart=0.1, noise=0.3)


def _tied(apart: float, noise: float) -> PreTrainedModel:
    model = qwen3_moe_with()
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight
        weight.data[1:] = weight.data[:1] + apart * torch.randn(weight[1:].shape)
        if ranks > 1:
            layer.mlp.gate.register_forward_pre_hook(partial(_add_noise, noise))
    return model


def _add_noise(noise: float, router: torch.nn.Module, arguments: tuple[torch.Tensor]) -> object:
    return (arguments[0] + noise * torch.randn(arguments[0].shape, generator=torch.Generator().manual_seed(0)),)
