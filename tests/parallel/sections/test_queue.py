"""Messages between sections arrive in order, in a bounded memory, and a rank that is lost is named."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from omnitrain.errors import LostRankError, UserError
from omnitrain.parallel.sections.carriers.nixl import NixlCarrier
from omnitrain.parallel.sections.carriers.torch_p2p import Transfer
from omnitrain.parallel.sections.edges import EdgeEnd, Inbox, Outbox
from omnitrain.parallel.sections.message import Message, Part, Rows
from omnitrain.parallel.spawn.pool import RankError, RankPool
from tests.parallel.sections.exchanges import (
    CPU,
    EDGE,
    MOVED_BY_VICTIM,
    SLOTS,
    MakeCarrier,
    by_nixl,
    by_torch,
    gathered_shards,
    lost,
    paced,
    there_and_back,
)

pytestmark = pytest.mark.ranks
CARRIERS = [by_torch, by_nixl]


@pytest.mark.parametrize(
    ("make", "world", "count"),
    [
        (by_torch, 3, 300),
        pytest.param(by_torch, 5, 700, marks=pytest.mark.second),
        pytest.param(by_nixl, 3, 40, marks=pytest.mark.second),
        *(pytest.param(make, world, 5000, marks=pytest.mark.slow) for make in CARRIERS for world in (3, 5)),
    ],
)
def test_ragged_messages_arrive_in_order_and_within_the_slots(
    sections: RankPool, make: MakeCarrier, world: int, count: int
) -> None:
    """Rows from two ranks to the others, and at least as many messages with gradients back.

    By default 2,000 over torch together, and slowly 10,000 for each carrier and number of ranks.
    """
    most = sections.run(there_and_back, count, make, 2, timeout_s=180, world=world)
    for found in most[:2]:
        assert 1 <= found["sent"] <= (world - 2) * SLOTS * 2  # a message has at most two parts
    for found in most[2:]:
        assert found["posted"] == SLOTS
        assert found.get("alive", 1) <= SLOTS + 1  # and the one that was taken


@pytest.mark.parametrize("make", [by_torch, pytest.param(by_nixl, marks=pytest.mark.slow)])
def test_shards_of_tp2_x_cp2_are_gathered_at_tp4_and_gradients_come_back(sections: RankPool, make: MakeCarrier) -> None:
    assert sections.run(gathered_shards, make, timeout_s=60, world=8) == [0.0] * 8


@pytest.mark.parametrize("make", CARRIERS)
def test_a_fast_sender_waits_for_a_slow_receiver(sections: RankPool, make: MakeCarrier) -> None:
    pushes, takes = sections.run(paced, make, 20, 0.0, 0.02, timeout_s=60, world=2)
    for number in range(2 * SLOTS, 20):
        assert pushes[number][1] > takes[number - 2 * SLOTS][0]
    assert pushes[SLOTS - 1][1] < takes[1][0]  # as long as there is room, it does not wait


@pytest.mark.parametrize("make", CARRIERS)
def test_a_fast_receiver_waits_for_a_slow_sender(sections: RankPool, make: MakeCarrier) -> None:
    pushes, takes = sections.run(paced, make, 20, 0.02, 0.0, timeout_s=60, world=2)
    for push, take in zip(pushes, takes, strict=True):
        assert push[0] < take[1]
    assert takes[-1][1] - pushes[-1][1] < 1


@pytest.mark.parametrize("make", CARRIERS)
@pytest.mark.parametrize(
    ("victim", "verb"),
    [
        pytest.param(1, "main: rank 1 is gone .*; rank 0 cannot send", id="receiver killed"),
        pytest.param(0, "vision: rank 0 is gone .*; rank 1 cannot take", id="sender killed"),
    ],
)
def test_a_lost_rank_is_named_with_section_and_message_within_5_s(
    sections: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, verb: str, make: MakeCarrier
) -> None:
    monkeypatch.setattr("omnitrain.parallel.spawn.pool._GRACE_SECONDS", 5.0)
    with pytest.raises(RankError):
        sections.run(lost, make, str(tmp_path), victim, timeout_s=30, world=2)
    ended = float((tmp_path / "ended").read_text())
    at, rank, done, error = (tmp_path / "error").read_text().split("\n", 3)
    assert float(at) - ended < 5
    assert int(rank) == victim
    match = re.fullmatch(rf"section {verb} message (\d+) of vision -> main", error)
    assert match is not None, error
    named, moved = int(match[1]), int(done)  # messages that the other rank has pushed or taken
    if victim == 0:  # what it pushed may be lost with it
        assert named == moved <= MOVED_BY_VICTIM
    else:  # it has posted the next SLOTS messages; the one after these cannot leave
        assert MOVED_BY_VICTIM <= moved <= MOVED_BY_VICTIM + 2 * SLOTS
        assert named in (moved, moved - SLOTS) and named < MOVED_BY_VICTIM + 2 * SLOTS


class EndsEarly:
    """A wait of gloo that nothing ends; torch gives it whole milliseconds."""

    def wait(self, limit: timedelta) -> None:
        time.sleep(limit // timedelta(milliseconds=1) / 1e3)
        raise RuntimeError("Timed out waiting")


def test_a_rank_that_is_silent_is_not_taken_for_one_that_is_gone() -> None:
    for microseconds in range(0, 1000, 50):
        limit = 0.003 + microseconds / 1e6
        with pytest.raises(LostRankError, match=r"rank 1 did nothing for 0\.00\d+ s"):
            Transfer((), 1, [EndsEarly()]).wait(limit)  # type: ignore[list-item]


def test_messages_that_arrived_before_their_sender_was_lost_can_be_taken() -> None:
    class Here(NamedTuple):
        number: int

        def wait(self) -> tuple[torch.Tensor, ...]:
            return (torch.tensor([float(self.number)]),)

    class LosesItsSender:
        def post(self, message: Message, number: int) -> Here:
            if number >= SLOTS:
                raise LostRankError("rank 0 is gone", 0)
            return Here(number)

    inbox = Inbox(EdgeEnd(EDGE, LosesItsSender(), 1, SLOTS))  # type: ignore[arg-type]
    inbox.expect([Message(1, (Rows((), torch.float32),), (Part(0, 0, 1),))] * 5)
    assert [inbox.take()[0].item() for _ in range(SLOTS)] == [0.0, 1.0, 2.0]
    with pytest.raises(LostRankError, match="section vision: rank 0 is gone; rank 1 cannot take message 3 of vision"):
        inbox.take()


def test_a_message_without_rows_comes_from_nobody_and_gives_back_nothing() -> None:
    message = Message(1, (Rows((3,), torch.float32),), ())
    assert message.rows == 0 and message.returned(message.tensors) == ()
    assert [tuple(tensor.shape) for tensor in message.empty(CPU)] == [(0, 3)]


def test_what_is_not_in_the_list_is_refused() -> None:
    class Nobody:
        def post(self, *_: object) -> None: ...

        def send(self, *_: object) -> None: ...

    message = Message(1, (Rows((3,), torch.float32),), (Part(0, 0, 2),))
    outbox = Outbox(EdgeEnd(EDGE, Nobody(), 0, SLOTS))  # type: ignore[arg-type]
    outbox.expect([message])
    with pytest.raises(ValueError, match=r"rows 0 to 1 of a message are .*\(2, 3\).*; found .*\(3, 3\)"):
        outbox.push(1, [torch.zeros(3, 3)])
    outbox.push(1, [torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="rank 0 has no more parts of vision -> main for rank 1"):
        outbox.push(1, [torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="rank 1 expects 0 messages of vision -> main, and takes one more"):
        Inbox(EdgeEnd(EDGE, Nobody(), 1, SLOTS)).take()  # type: ignore[arg-type]


def test_without_nixl_its_carrier_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnitrain.parallel.sections.carriers.nixl._PACKAGES", ("nixl_of_nobody",))
    with pytest.raises(UserError, match=r"needs the package nixl-cu12; pip install 'omnitrain\[nixl\]'"):
        NixlCarrier([0], [1], 1)
