"""FLOPs of one layer of each kind, against counts by hand. ``2 m k n`` for a product of [m, k] and [k, n]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omnitrain.data.packing.pack import MediaGroup, Pack
from omnitrain.data.packing.sample import NATIVE_PREFIX
from omnitrain.models.adapters.lora import add_lora
from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.flops import ModelFlops
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.named_parameters import freeze
from omnitrain.ops.flops import Flops, Passes, Recomputed, count
from omnitrain.parallel.adapter_plan import adapters_for
from omnitrain.recipe import ComponentPlan, ParallelPlan, Recipe
from omnitrain.recipe.plan_groups import Lora
from tests.families import FAMILIES
from tests.tiny import EXPERTS, FOUNDATION, SIGLIP, tiny_model, tiny_processor, tiny_samples

H, A, K, D, M, V = 32, 4, 2, 8, 48, 264  # hidden, heads, key heads, head width, MLP width, vocabulary
ONE_LAYER = FOUNDATION | {"num_hidden_layers": 1}
LENGTHS = (5, 1, 9)
TOKENS, PAIRS, SQUARES = 15, 15 + 1 + 45, 25 + 1 + 81  # of these lengths: tokens, causal pairs, all pairs

PROJECTIONS = 2 * H * (A * D + 2 * K * D) + 2 * A * D * H  # q, k, v and o, of a token
SWIGLU = 3 * 2 * H * M
PAIR = A * 2 * (D + D)  # a score and a value, over all heads


def foundation_of(config: dict[str, Any], **others: Any) -> OmniModel:
    return build_omni_model(foundation=config, init_device="meta", **others).train()


def test_a_text_layer_with_grouped_heads_and_swiglu() -> None:
    passes = ModelFlops(foundation_of(ONE_LAYER)).of_samples(LENGTHS, predicted=7)
    products, head = TOKENS * (PROJECTIONS + SWIGLU), 7 * 2 * H * V
    # The loss computes the gradients of its head beside it, in the forward.
    assert passes.forward == Flops(products + 3 * head, PAIR * PAIRS, PAIR * SQUARES)
    assert passes.backward == Flops(2 * products, 2 * PAIR * PAIRS, 2 * PAIR * SQUARES)
    assert passes.again == Flops()
    assert passes.model.total == 3 * (products + head + PAIR * PAIRS)
    assert passes.model.total_full == 3 * (products + head + PAIR * SQUARES)


def test_the_rule_of_six_flops_per_parameter_and_token_holds_without_attention() -> None:
    model = foundation_of(FOUNDATION | {"tie_word_embeddings": False})
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    passes = ModelFlops(model).of_samples(LENGTHS, predicted=TOKENS)
    assert passes.model.products == 6 * matrices * TOKENS


def test_a_layer_of_experts_counts_those_that_a_token_meets_and_the_shared_one() -> None:
    experts, k, width, shared = 8, 2, 16, 24
    config = ONE_LAYER | {
        "model_type": "qwen2_moe",
        "num_experts": experts,
        "num_experts_per_tok": k,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "decoder_sparse_step": 1,
        "num_key_value_heads": K,
    }
    passes = ModelFlops(foundation_of(config)).of_samples(LENGTHS, predicted=0)
    router, chosen = 2 * H * experts, k * 3 * 2 * H * width
    of_shared = 3 * 2 * H * shared + 2 * H  # and its gate
    products = TOKENS * (PROJECTIONS + router + chosen + of_shared)
    # The gradient of a routing weight is the product of an expert's result and its gradient.
    of_weights = TOKENS * k * 2 * H
    assert passes.forward == Flops(products, PAIR * PAIRS, PAIR * SQUARES)
    assert passes.backward.products == 2 * products + of_weights


def test_a_window_counts_the_tokens_that_it_shows() -> None:
    config = ONE_LAYER | {"model_type": "mistral", "sliding_window": 4}
    passes = ModelFlops(foundation_of(config)).of_samples(LENGTHS, predicted=0)
    seen = (1 + 2 + 3 + 4 + 4) + 1 + (1 + 2 + 3 + 6 * 4)
    assert passes.forward == Flops(TOKENS * (PROJECTIONS + SWIGLU), PAIR * seen, PAIR * SQUARES)


PATCHES, WIDTH, MLP, HEADS = 16, 16, 32, 2  # of an image of 8 x 8, in the tower of tests.tiny


def of_an_image(trained: bool = True) -> Passes:
    encoder = {"tower": {"config": SIGLIP}, "projector": {"kind": "pixel_shuffle"}}
    model = tiny_model(encoders={"image_encoder": encoder}, decoders={})
    freeze(model, [] if trained else ["image_encoder.tower"])
    features, tokens = model.minimal_input("image_encoder")
    image = MediaGroup(dict(features), {name: (len(values),) for name, values in features.items()}, tokens, ("a",))
    return ModelFlops(model).of_media("image_encoder", image).components["image_encoder"]


TOWER = PATCHES * (4 * 2 * WIDTH * WIDTH + 2 * 2 * WIDTH * MLP)
PIXELS = PATCHES * 2 * (3 * 2 * 2) * WIDTH
PROJECTOR = 4 * (2 * 4 * WIDTH * H + 2 * H * H)  # four patches are one token
TIME = 2 * H * H  # of the frame's index, which needs no gradient
SCORES = HEADS * 2 * (8 + 8) * PATCHES**2


def test_a_layer_of_a_vision_tower_with_its_patches_and_projector() -> None:
    passes = of_an_image()
    assert passes.forward == Flops(PIXELS + TOWER + PROJECTOR + TIME, SCORES, SCORES)
    # Pixels need no gradient.
    assert passes.backward == Flops(PIXELS + 2 * (TOWER + PROJECTOR) + TIME, 2 * SCORES, 2 * SCORES)


def test_a_frozen_tower_has_a_forward_only_and_its_projector_a_backward() -> None:
    passes = of_an_image(trained=False)
    assert passes.forward == Flops(PIXELS + TOWER + PROJECTOR + TIME, SCORES, SCORES)
    # The norm before its first matrix trains, so that matrix passes on gradients.
    assert passes.backward == Flops(2 * PROJECTOR + TIME)


def test_a_layer_of_an_audio_encoder_with_its_convolutions() -> None:
    model = tiny_model()
    mels, frames, width, mlp, heads = 16, 50, 16, 32, 2
    features = {"input_features": torch.zeros(1, mels, frames), "num_rows": torch.tensor([13])}
    clip = MediaGroup(features, {"input_features": (1,), "num_rows": (1,)}, (13,), ("a",))
    (passes,) = ModelFlops(model).of_media("audio_encoder", clip).components.values()
    outputs = frames // 2  # the second convolution has a stride of 2
    first, second = frames * 2 * 3 * mels * width, outputs * 2 * 3 * width * width
    layer = outputs * (4 * 2 * width * width + 2 * 2 * width * mlp)
    projector = 13 * (2 * 2 * width * H + 2 * H * H)
    scores = heads * 2 * (8 + 8) * outputs**2
    assert passes.forward == Flops(first + second + layer + projector, scores, scores)
    assert passes.backward == Flops(first + 2 * (second + layer + projector), 2 * scores, 2 * scores)


def test_an_image_of_a_vlms_own_tower_counts_by_its_grid() -> None:
    model = build_omni_model(foundation=FAMILIES["qwen3_vl"]()).train()
    flops = ModelFlops(model)

    def image(height: int, width: int) -> Passes:
        grid, patches = torch.tensor([[1, height, width]]), height * width
        features = {"pixel_values": torch.zeros(patches, 96), "image_grid_thw": grid}
        rows = {"pixel_values": (patches,), "image_grid_thw": (1,)}
        found = flops.of_media(f"{NATIVE_PREFIX}image", MediaGroup(features, rows, (patches // 4,), ("a",)))
        return next(iter(found.components.values()))

    small, large = image(4, 4), image(4, 12)
    config = model.foundation.config.vision_config
    pairs = config.depth * 2 * 2 * config.hidden_size
    assert [p.forward.kept for p in (small, large)] == [pairs * 16**2, pairs * 48**2]
    assert large.model.products == 3 * small.model.products


def test_lora_adapters_have_gradients_of_weights_and_the_base_has_none() -> None:
    model, rank = build_omni_model(foundation=ONE_LAYER | {"tie_word_embeddings": False}).train(), 4
    plan = ComponentPlan(lora=Lora(rank=rank, targets=["q_proj"]))
    add_lora(model, adapters_for(model, ParallelPlan(components={"foundation": plan}))[0])
    passes = ModelFlops(model).of_samples(LENGTHS, predicted=0)
    adapter = 2 * H * rank + 2 * rank * A * D
    assert passes.forward.products == TOKENS * (PROJECTIONS + SWIGLU + adapter)
    # Of the frozen matrices, those after the queries pass on gradients: o and the MLP. B passes on its input's, and
    # both adapters have gradients of weights.
    assert passes.backward.products == TOKENS * (2 * A * D * H + SWIGLU + adapter + 2 * rank * A * D)
    # Of the queries alone: the products of the weights' gradients with values and of the scores' with keys.
    assert passes.backward.kept == A * 2 * (D + D) * PAIRS


def test_a_frozen_foundation_has_a_backward_only_where_it_reads_media_that_train() -> None:
    model = tiny_model(decoders={})
    freeze(model, ["foundation"])
    flops = ModelFlops(model)
    alone, after = (flops.of_samples(LENGTHS, 0, reads_trained=reads).backward for reads in (False, True))
    layers = 2
    assert alone == Flops()
    assert after == Flops(
        layers * TOKENS * (PROJECTIONS + SWIGLU), layers * 2 * PAIR * PAIRS, layers * 2 * PAIR * SQUARES
    )


def test_recompute_of_blocks_adds_their_forward_to_the_hardware_and_nothing_to_the_model() -> None:
    flops = ModelFlops(foundation_of(ONE_LAYER))
    plain = flops.of_samples(LENGTHS, 7)
    flops.follow(
        [name for name, _ in flops.model.named_parameters()], {"foundation": Recomputed(["foundation.model.layers.0"])}
    )
    again = flops.of_samples(LENGTHS, 7)
    assert again.model == plain.model
    assert again.again == Flops(TOKENS * (PROJECTIONS + SWIGLU), PAIR * PAIRS, PAIR * SQUARES)


@pytest.mark.parametrize("foundation", [FOUNDATION, pytest.param(FOUNDATION | EXPERTS, marks=pytest.mark.second)])
def test_a_mixed_pack_equals_the_forward_and_backward_of_the_whole_model_over_it(foundation: dict[str, Any]) -> None:
    model = tiny_model(foundation=foundation).train()
    pack = Pack.from_samples(tiny_samples(tiny_processor(model), 7))
    flops = ModelFlops(model)
    found = flops.of_pack(pack)
    for name, batch in {**pack.inputs, **pack.targets}.items():
        for group in batch.groups:
            found.add_all(flops.of_media(name, group))
    whole = count(lambda: [term.sum for term in flops.model(pack).losses.values()], flops.model).passes
    assert found.passes == whole
    assert set(found.components) == {"foundation", *model.encoder_names, *model.decoder_names}


@pytest.mark.parametrize(
    ("more", "frozen"),
    [
        ({}, ["foundation.model.embed_tokens"]),
        *(
            pytest.param(*case, marks=pytest.mark.second)
            for case in (({}, ["foundation.model.layers.0"]), (EXPERTS, []), (EXPERTS, ["foundation.model.layers.0"]))
        ),
    ],
    ids=str,
)
def test_layers_of_one_kind_count_as_if_each_was_run(
    more: dict[str, Any], frozen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = foundation_of(FOUNDATION | more | {"num_hidden_layers": 5})
    freeze(model, frozen)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    recomputed = {"foundation": Recomputed([f"foundation.model.layers.{layer}" for layer in range(5)])}
    found = []
    for is_short in (True, False):
        monkeypatch.setattr(ModelFlops, "_are_alike", ModelFlops._are_alike if is_short else lambda *_: False)
        flops = ModelFlops(model)
        flops.follow(trained, recomputed)
        assert flops._are_alike(text_blocks(flops.model.foundation)) == (is_short and "layers" not in str(frozen))
        found.append(flops.of_samples(LENGTHS, predicted=7))
    assert found[0] == found[1]


@pytest.mark.parametrize("layers", [1, pytest.param(48, marks=pytest.mark.slow)])
def test_the_widths_of_a_model_of_thirty_billion_parameters_need_no_memory_for_weights(layers: int) -> None:
    hidden, width, experts, k, heads, head, vocabulary = 2048, 768, 128, 8, 32, 128, 151936
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "num_experts": experts, "num_experts_per_tok": k}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": head, "vocab_size": vocabulary}
    config = FOUNDATION | EXPERTS | sizes | {"num_hidden_layers": layers, "tie_word_embeddings": False}
    model = foundation_of(config)
    assert sum(p.numel() for p in model.parameters()) > 29e9 * layers / 48
    passes = ModelFlops(model).of_samples([4096], predicted=100)
    active = hidden * head * (2 * heads + 2 * 4) + hidden * experts + k * 3 * hidden * width
    assert passes.model.products == 4096 * layers * (6 * active + k * 2 * hidden) + 100 * 6 * hidden * vocabulary
    assert passes.model.kept == 3 * layers * heads * 4 * head * (4096 * 4097 // 2)


@pytest.mark.second
def test_the_example_of_the_docs_is_what_is_counted() -> None:
    example = (Path(__file__).parents[3] / "docs" / "performance.md").read_text().split("### An example")[1]
    config = Recipe.load("quickstart").model.foundation.config
    passes = ModelFlops(foundation_of(config)).of_samples([100], predicted=60)
    parts = [
        (cells[2].replace(" x ", "*"), int(cells[3].replace(",", "")))
        for line in example.splitlines()
        if len(cells := line.split("|")) == 5 and "x" in cells[2]
    ]
    assert [eval(formula) for formula, _ in parts] == [figure for _, figure in parts] and len(parts) == 4
    assert passes.model.total == 3 * sum(figure for _, figure in parts)
    assert f"{passes.model.total:,} FLOPs" in example.replace("\n", " ")
    assert f"{passes.model.total_full:,}." in example
