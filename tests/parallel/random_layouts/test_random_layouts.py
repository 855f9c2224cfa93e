"""Random layouts train as plain transformers, sample by sample, in one process.

A failed test names its row; ``python -m tests.parallel.random_layouts "ROW"`` runs it alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy

import pytest

from omnitrain.parallel.spawn.pool import RankPool
from tests.parallel.random_layouts.compare import Compared, compare
from tests.parallel.random_layouts.rows import Row, draw

SEED, NUMBER = 0, 150
MOST_REFUSED = 0.05  # of the rows
MOST_BLIND = 0.01  # of the gradients in fp32
FEW = (  # the first by default
    "any_to_any pp2 world all adamw fp32 text again 2",
    "taught dp2 - lora-foundation sgd compute empty clip 1",
    "reading vision1+dp1 - frozen-one adamw fp32 uneven calls 4",
    "granite_speech pp2.sp2 - lora adamw fp32 even - 1",  # frozen batch norms
    "llama4 pp2 - all sgd fp32 even clip 1",  # norms of large tensors
)
COMPILED = (  # each takes a minute
    "qwen3_moe dp2.ep2 - all sgd fp32 uneven compile 1",
    "any_to_any sp2 world lora adamw fp32 even compile 1",
    "qwen3_vl pp2 world all sgd fp32 even compile 1",
)
MUTANTS = (
    ("reading sp2 group all sgd fp32 uneven - 3", "foundation.model.layers.0.mlp.down_proj.weight"),
    ("reading sp2 group all sgd fp32 uneven - 3", "foundation.model.layers.1.self_attn.q_norm.weight"),
    ("reading sp2 group all sgd fp32 uneven - 3", "image_encoder.tower.encoder.layers.0.mlp.fc1.weight"),
    ("reading sp2 group all sgd fp32 uneven - 3", "audio_encoder.projector.layers.1.bias"),
    ("qwen3_moe dp2.ep2 - all adamw fp32 even clip 3", "foundation.model.layers.0.mlp.experts.down_proj"),
    ("qwen3_moe dp2.ep2 - all adamw fp32 even clip 3", "foundation.model.layers.1.mlp.gate.weight"),
    ("qwen3_moe pp2.tp2 - lora-experts sgd fp32 even - 3", "foundation.model.layers.1.mlp.experts.down_proj_lora_B"),
)
FOUND: Counter[str] = Counter()
BLIND: list[float] = []


@pytest.fixture(scope="module")
def eight_ranks(ranks: RankPool) -> Iterator[RankPool]:
    """Up to eight ranks, of which four are those of all tests."""
    more = copy(ranks)
    more.nproc = 8
    yield more
    for rank in range(ranks.nproc, 8):
        more._discard(rank)


def require_equal(found: Compared) -> None:
    assert found.status == "equal", f'{found}\npython -m tests.parallel.random_layouts "{found.row}"'


@pytest.mark.parametrize("line", [FEW[0], *(pytest.param(line, marks=pytest.mark.slow) for line in FEW[1:])])
def test_a_layout_trains_as_plain_transformers(ranks: RankPool, line: str) -> None:
    require_equal(compare(ranks, Row.parse(line)))


@pytest.mark.slow
@pytest.mark.parametrize("line", COMPILED)
def test_compiled_blocks_train_as_plain_transformers(ranks: RankPool, line: str) -> None:
    require_equal(compare(ranks, Row.parse(line), timeout_s=400))


@pytest.mark.slow
@pytest.mark.parametrize("row", draw(SEED, NUMBER), ids=str)
def test_a_random_layout_trains_as_plain_transformers_or_is_refused_in_words(eight_ranks: RankPool, row: Row) -> None:
    found = compare(eight_ranks, row)
    FOUND[found.status] += 1
    if row.precision == "fp32" and found.status != "refused":
        BLIND.append(found.blind)
    if found.status != "refused":
        require_equal(found)


@pytest.mark.slow
def test_few_rows_are_refused_and_few_gradients_are_only_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts the tests above; alone it fails."""
    share = sum(BLIND) / len(BLIND)
    with capsys.disabled():
        print(
            f"\nrandom layouts: {dict(FOUND)}; an error of a thousandth would not show in {share:.1%} of the gradients"
        )
    assert FOUND.total() == NUMBER
    assert FOUND["refused"] <= MOST_REFUSED * NUMBER
    assert share <= MOST_BLIND


@pytest.mark.parametrize(
    ("line", "parameter"), [MUTANTS[0], *(pytest.param(*mutant, marks=pytest.mark.slow) for mutant in MUTANTS[1:])]
)
def test_a_gradient_scaled_by_1_001_on_one_rank_is_found(ranks: RankPool, line: str, parameter: str) -> None:
    row = Row.parse(line)
    found = compare(ranks, row, mutant=(row.parsed.num_ranks - 1, parameter, 1.001))
    assert found.status == "different"
    wrong = {name for name, error in found.errors.items() if error > 1 and name.startswith("gradients")}
    assert wrong == {f"gradients {parameter}"}
