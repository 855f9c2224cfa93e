"""Whether a foundation computes in bf16 what transformers' model in bf16 computes."""

from __future__ import annotations

from typing import Any

import pytest

from omnitrain.models.contract import checks_precision
from omnitrain.models.contract.check import contract_of
from omnitrain.models.contract.checks_precision import check_precision, precision_problem_of
from omnitrain.models.hf.load import foundation_class
from tests.families import FAMILIES, UNSHRINKABLE


def problem_of(family: str) -> str:
    config = (FAMILIES | UNSHRINKABLE)[family]()
    model_class = foundation_class(config)
    return check_precision(model_class, config, contract_of(model_class(config)))


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", pytest.param("emu3", marks=pytest.mark.second)])
def test_a_family_computes_in_bf16_as_transformers_does(family: str) -> None:
    config = (FAMILIES | UNSHRINKABLE)[family]()
    model = foundation_class(config)(config)
    assert precision_problem_of(model, contract_of(model)) == ""


def test_a_loss_that_rounding_does_not_explain_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = checks_precision._our_loss
    monkeypatch.setattr(checks_precision, "_our_loss", lambda *given: 1.02 * ours(*given))
    assert "is multiplied by 0.98" in problem_of("qwen3")


def test_a_model_that_only_transformers_can_compute_in_bf16_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch norms make floats."""
    assert problem_of("granite_speech") == ""

    def without_batch_norms(*_: Any) -> None: ...

    monkeypatch.setattr(checks_precision, "compute_in", without_batch_norms)
    assert problem_of("granite_speech").startswith("it fails: RuntimeError")
