"""LoRA on matrices that two ranks share: outputs and gradients are those of one rank."""

from __future__ import annotations

from collections import Counter

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed.tensor import DTensor

import omnitrain as ot
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.tensor.apply import add_up_over_tp, shard_matrices
from omnitrain.parallel.tensor.styles import styles_with_adapters
from tests.parallel.laid_out import counted, full
from tests.parallel.tensor.test_styles import HEADS, Layer, trained

WHOLE = "to_all_heads"
ADAPTED = (*HEADS, "fused", "out", WHOLE)
STYLES = HEADS | {"fused": "colwise_gather_output", "out": "rowwise_split_input"}
BY_PARAMETER = HEADS | {"into_heads.weight": "colwise", "into_heads.bias": "colwise"}
del BY_PARAMETER["into_heads"]


def adapted() -> tuple[Layer, dict[str, tuple[str, ...]]]:
    """With factors that are not zero, and all parameters trained; and what these are called now."""
    torch.manual_seed(0)
    layer = Layer()
    inject_adapter_in_model(LoraConfig(r=3, target_modules=list(ADAPTED)), layer)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_()
        if "lora_" in name:
            parameter.data.normal_()
    renamed = {f"{name}.bias": (f"{name}.base_layer.bias",) for name in ADAPTED}
    for name in ADAPTED:
        factors = (f"{name}.lora_{matrix}.default.weight" for matrix in "AB")
        renamed[f"{name}.weight"] = (f"{name}.base_layer.weight", *factors)
    return layer.double(), renamed


def errors(styles: dict[str, str]) -> tuple[float, dict[str, list[float]], dict[str, int]]:
    """Relative errors of the loss, and of gradients before and after they are added up; which dims are cut."""
    (whole, _), (layer, renamed) = adapted(), adapted()
    state = ot.init_parallel_state(tp_size=2)
    shard_matrices(layer, styles_with_adapters(styles, renamed), state.tp_mesh)
    expected = trained(whole, 1.0)["loss"]
    loss = float(abs(trained(layer, 1.0 if state.tp_rank == 0 else 0.0)["loss"] - expected) / expected.abs())
    found: dict[str, list[float]] = {name: [] for name, _ in layer.named_parameters()}
    for _ in range(2):
        for name, parameter in layer.named_parameters():
            grad = whole.get_parameter(name).grad
            found[name].append(float((full(parameter.grad) - grad).abs().max() / grad.abs().max()))
        add_up_over_tp(layer.parameters(), state)
    return loss, found, {n: p.placements[0].dim for n, p in layer.named_parameters() if isinstance(p, DTensor)}


def test_layers_with_adapters_cut_in_a_style_give_what_they_give_whole(ranks: RankPool) -> None:
    for styles in (STYLES, BY_PARAMETER):
        for loss, gradients, _ in ranks.run(errors, styles, timeout_s=60, world=2):
            assert loss < 1e-12 and max(after for _, after in gradients.values()) < 1e-12, gradients


def test_the_factor_that_has_the_cut_dim_is_cut_and_the_gradient_of_the_other_one_is_a_sum_over_ranks(
    ranks: RankPool,
) -> None:
    for _, gradients, cut in ranks.run(errors, STYLES, timeout_s=60, world=2):
        factors = {name.removesuffix(".default.weight"): dim for name, dim in cut.items() if "lora_" in name}
        assert factors == {"into_heads.lora_B": 0, "fused.lora_B": 0, "out_of_heads.lora_A": 1, "out.lora_A": 1}
        for name in ("into_heads.lora_A", "out_of_heads.lora_B", f"{WHOLE}.lora_A", f"{WHOLE}.lora_B"):
            before, after = gradients[f"{name}.default.weight"]
            assert before > 1e-2 and after < 1e-12


def collectives() -> list[Counter[str]]:
    """Of a forward and backward, without adapters and with them."""
    torch.manual_seed(0)
    mesh = ot.init_parallel_state(tp_size=2).tp_mesh
    found = []
    for layer, renamed in ((Layer(), {}), adapted()):
        shard_matrices(layer, styles_with_adapters(STYLES, renamed), mesh)
        with counted() as ops:
            trained(layer, 1.0)
        found.append(Counter({name: number for name, number in ops.items() if name.startswith("c10d.")}))
    return found


def test_adapters_bring_no_collectives(ranks: RankPool) -> None:
    bare, with_adapters = ranks.run(collectives, timeout_s=60, world=2)[0]
    two_sums_and_a_gather = 3
    assert bare.total() == 2 * two_sums_and_a_gather and bare == with_adapters
