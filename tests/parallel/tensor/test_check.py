from __future__ import annotations

import pytest

import omnitrain as ot
from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankPool
from tests.parallel import factories


def built(globs: dict[str, str] | None) -> str:
    """What building on two tensor parallel ranks says; empty: it is done."""
    ot.init_parallel_state(tp_size=2)
    model = factories.qwen3()
    before = dict(model.named_parameters())
    try:
        ot.build_parallelize_model(model, parallel_plan=ot.ParallelPlan(tp_plan=globs), enable_mixed_precision=False)
    except UserError as error:
        assert all(before[name] is parameter for name, parameter in model.named_parameters())
        return " ".join(str(error).split())
    return ""


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        (None, ""),
        ({"layers.*.mlp": "all_reduce"}, "the logits of sample 0 differ by"),  # twice what it should be
        ({"layers.*.mlp.up_proj": "colwise"}, "it does not run: RuntimeError"),
    ],
    ids=["its own plan", "silently wrong", "does not run"],
)
def test_a_plan_that_makes_another_model_is_refused_before_anything_changes(
    ranks: RankPool, globs: dict[str, str] | None, message: str
) -> None:
    for said in ranks.run(built, globs, timeout_s=60, world=2):
        assert message in said and bool(said) == bool(message)
        assert not said or "Qwen3ForCausalLM gives other results with this plan" in said
