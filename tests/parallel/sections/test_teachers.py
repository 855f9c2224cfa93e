"""A frozen language model as a teacher: losses read its hidden states, on any ranks the same as in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.verify import verify
from tests.tiny import FOUNDATION, tiny_model, tiny_processor, tiny_samples

TEACHER = FOUNDATION | {"hidden_size": 48, "num_hidden_layers": 3}


def distilled(logits: torch.Tensor, labels: torch.Tensor, big: torch.Tensor) -> torch.Tensor:
    """Cross entropy with what a head over the teacher's hidden states predicts."""
    head = torch.randn(logits.size(1), big.size(1), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(logits, (big @ head.t()).softmax(-1), reduction="none")


def taught() -> OmniModel:
    model = tiny_model(encoders={}, decoders={}, teachers={"big": TEACHER})
    model.runner.loss_function = distilled
    return model


def texts(number: int = 6) -> list[Sample]:
    return tiny_samples(tiny_processor(taught()), number, ["text"])


def test_a_loss_reads_the_last_hidden_state_of_each_predicting_token() -> None:
    model, pack, read = taught(), Pack.from_samples(texts()), []

    def loss(logits: torch.Tensor, labels: torch.Tensor, big: torch.Tensor) -> torch.Tensor:
        read.append(big)
        return distilled(logits, labels, big)

    model.runner.loss_function = loss
    model.train()(pack).loss.backward()
    alone = [
        model.get_submodule("big").model.model(input_ids=sample[None]).last_hidden_state[0]
        for sample in pack.input_ids[0].split(pack.info.lengths)
    ]
    torch.testing.assert_close(torch.cat(read), torch.cat(alone)[pack.text_rows], rtol=1e-5, atol=1e-5)
    assert all(parameter.grad is None for parameter in model.get_submodule("big").parameters())
    assert not model.get_submodule("big").model.training


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layouts",
    [
        ["dp2", "dp2.world.accum2", "sp2", "big1+dp2.accum3", "big2+dp2", "big1.ahead.window2.slots1+dp2.accum3"],
    ],
)
def test_a_student_on_any_ranks_learns_as_in_one_process(sections: RankPool, layouts: list[str]) -> None:
    report = verify(taught, texts(12), layouts, nproc=4, timeout_s=120, pool=sections)
    assert [row.status for row in report.rows] == ["equal"] * len(layouts), str(report)
