"""What ranks of two sections do in the tests of the queue."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.errors import LostRankError
from omnitrain.parallel.sections.carriers.nixl import NixlCarrier
from omnitrain.parallel.sections.carriers.torch_p2p import torch_carrier
from omnitrain.parallel.sections.edges import EdgeEnd, Inbox, Outbox
from omnitrain.parallel.sections.message import Arrival, Carrier, Departure, Ends, Message, Part, Rows

SLOTS, HOLD = 3, 4
MOVED_BY_VICTIM = 5  # messages, in :func:`lost`
EDGE = Ends("vision", "main")
CPU = torch.device("cpu")
MakeCarrier = Callable[[Sequence[int], Sequence[int]], Carrier]


def by_torch(senders: Sequence[int], receivers: Sequence[int]) -> Carrier:
    return torch_carrier(senders, receivers, CPU)


def by_nixl(senders: Sequence[int], receivers: Sequence[int]) -> Carrier:
    carrier = NixlCarrier(senders, receivers, SLOTS)
    if dist.get_rank() in (*senders, *receivers):
        carrier.prepare([Message(receivers[0], (Rows((4096,), torch.float32),), (Part(senders[0], 0, 1),))])
        assert carrier._memory.nbytes <= 64 + SLOTS * 32_768 * (len(receivers) if dist.get_rank() in senders else 1)
    return carrier


def ends(make: MakeCarrier, senders: Sequence[int], receivers: Sequence[int]) -> tuple[EdgeEnd, EdgeEnd]:
    """The ends of this rank of the edge for rows and of the edge for gradients."""
    there, back = make(senders, receivers), make(receivers, senders)
    return EdgeEnd(EDGE, there, dist.get_rank(), SLOTS), EdgeEnd(EDGE.returned, back, dist.get_rank(), SLOTS)


@dataclass
class Counting:
    """A carrier that counts posted messages that were not taken, live tensors of messages, and parts that wait."""

    carrier: Carrier
    most: Counter[str] = field(default_factory=Counter)
    now: Counter[str] = field(default_factory=Counter)

    def post(self, message: Message, number: int) -> Arrival:
        arrival = self.carrier.post(message, number)
        self._add("posted", 1)
        return _Counted(arrival, self, "posted")

    def send(self, tensors: Sequence[Tensor], message: Message, part: Part, number: int) -> Departure:
        self._add("sent", 1)
        return _Counted(self.carrier.send(tensors, message, part, number), self, "sent")

    def hold(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._add("alive", 1)
            weakref.finalize(tensor, self._add, "alive", -1)

    def _add(self, what: str, count: int) -> None:
        self.now[what] += count
        self.most[what] = max(self.most[what], self.now[what])


@dataclass
class _Counted:
    transfer: Arrival | Departure
    counting: Counting
    what: str

    def __post_init__(self) -> None:
        if self.what == "posted":
            self.counting.hold(getattr(self.transfer, "tensors", ()))

    def wait(self) -> tuple[Tensor, ...]:
        ended = self.transfer.wait()
        self.counting._add(self.what, -1)
        return ended if isinstance(ended, tuple) else ()


def ragged(count: int, senders: Sequence[int], receivers: Sequence[int]) -> list[Message]:
    """Messages of 1 to 16 rows from one or two ranks."""
    draw = np.random.default_rng(0)
    messages = []
    for number in range(count):
        rows, cut = int(draw.integers(1, 17)), int(draw.integers(0, 17))
        first, second = (int(draw.choice(senders)) for _ in range(2))
        is_whole = first == second or not 0 < cut < rows
        parts = (Part(first, 0, rows),) if is_whole else (Part(first, 0, cut), Part(second, cut, rows))
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        messages.append(Message(int(draw.choice(receivers)), (Rows((8,), dtype),), parts))
    return messages


def filled(message: Message, number: int) -> Tensor:
    """``[rows, 8]``: other values for each message, row and column; exact in bfloat16."""
    values = torch.arange(message.rows * 8).view(-1, 8) + number * 7
    return (values % 251).to(message.tensors[0].dtype)


def there_and_back(count: int, make: MakeCarrier, num_senders: int) -> dict[str, int]:
    """``count`` messages from the first ranks to the others, and a message with gradients for each part of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    senders, receivers = list(range(num_senders)), list(range(num_senders, world))
    ahead, back = ends(make, senders, receivers)
    counting = Counting(ahead.carrier)
    ahead = EdgeEnd(EDGE, counting, rank, SLOTS)
    messages = ragged(count, senders, receivers)
    returned = [gradient for message in messages for gradient in message.returned(message.tensors)]
    outbox, inbox = (Outbox(ahead), Inbox(back)) if rank in senders else (Outbox(back), Inbox(ahead))
    outbox.expect(messages if rank in senders else returned)
    inbox.expect(returned if rank in senders else messages)
    if rank in senders:
        own = [(n, m, part) for n, m in enumerate(messages) for part in m.parts if part.sender == rank]
        for index in range(len(own) + HOLD):
            if index < len(own):
                number, message, part = own[index]
                outbox.push(message.receiver, [filled(message, number)[part.start : part.stop]])
            if index >= HOLD:
                number, message, part = own[index - HOLD]
                (gradient,) = inbox.take()
                assert torch.equal(gradient, -filled(message, number)[part.start : part.stop]), number
    else:
        for number, message in enumerate(messages):
            if message.receiver == rank:
                (rows,) = inbox.take()
                assert rows.is_leaf and torch.equal(rows, filled(message, number)), number
                for part in message.parts:
                    outbox.push(part.sender, [-rows[part.start : part.stop]])
                del rows
    outbox.finish()
    dist.barrier()
    return dict(counting.most)


def parts_at(places: np.ndarray, counts: Sequence[int], senders: Sequence[int]) -> tuple[Part, ...]:
    """The parts of a message whose rows lie at ``places``, by sender: those of a sequence that ranks share."""
    sender = np.repeat(np.asarray(senders), counts)
    firsts = np.flatnonzero((np.diff(places, prepend=-2) != 1) | (np.diff(sender, prepend=-1) != 0))
    lengths = np.diff(firsts, append=len(places))
    runs = zip(sender[firsts].tolist(), places[firsts].tolist(), lengths.tolist(), strict=True)
    return tuple(sorted((Part(rank, start, start + length) for rank, start, length in runs), key=lambda p: p.start))


def gathered_shards(make: MakeCarrier) -> float:
    """Ranks 0 to 3 are tp2 x cp2, ranks 4 to 7 are tp4. Return the largest error of the summed gradients."""
    rank, senders, receivers = dist.get_rank(), list(range(4)), list(range(4, 8))
    ahead, back = ends(make, senders, receivers)
    messages, wholes = [], []
    for number in range(10):
        rows = 8 * (number + 1)
        halves = np.arange(rows).reshape(4, -1)
        of_cp = [np.concatenate([halves[0], halves[3]]), np.concatenate([halves[1], halves[2]])]  # a zigzag
        for receiver in receivers:
            tp = receiver % 2  # both tp ranks have all rows of their cp rank; each serves two receivers
            parts = parts_at(np.concatenate(of_cp), [rows // 2] * 2, [tp, 2 + tp])
            messages.append(Message(receiver, (Rows((4,), torch.float32), Rows((2, 2), torch.float32)), parts))
        whole = torch.arange(rows * 4, dtype=torch.float32).view(rows, 4) + number
        wholes += [(whole, whole.view(rows, 2, 2) * 2)] * 4
    returned = [gradient for message in messages for gradient in message.returned(message.tensors)]
    worst = 0.0
    if rank in senders:
        outbox, inbox = Outbox(ahead), Inbox(back)
        outbox.expect(messages)
        inbox.expect(returned)
        for first in range(0, len(messages), 4):
            own: dict[tuple[int, int], list[Tensor]] = {}
            for message, whole in zip(messages[first : first + 4], wholes[first : first + 4], strict=True):
                for part in message.parts:
                    if part.sender == rank:
                        outbox.push(message.receiver, [tensor[part.start : part.stop] for tensor in whole])
                        own.setdefault((part.start, part.stop), []).append(torch.tensor(float(message.receiver)))
            sums: dict[tuple[int, int], Tensor] = {}
            for message in messages[first : first + 4]:
                for part in message.parts:
                    if part.sender == rank:
                        gradient, _ = inbox.take()
                        key = (part.start, part.stop)
                        sums[key] = sums.get(key, torch.zeros_like(gradient)) + gradient
            for (start, stop), total in sums.items():
                expected = wholes[first][0][start:stop] * sum(own[start, stop])
                worst = max(worst, float((total - expected).abs().max()))
        assert len(sums) == (2 if rank < 2 else 1), sums.keys()  # the second cp rank's rows are one run
    else:
        outbox, inbox = Outbox(back), Inbox(ahead)
        outbox.expect(returned)
        inbox.expect(messages)
        for message, whole in zip(messages, wholes, strict=True):
            if message.receiver == rank:
                for tensor, expected in zip(found := inbox.take(), whole, strict=True):
                    assert torch.equal(tensor, expected)
                for part in message.parts:
                    outbox.push(part.sender, [tensor[part.start : part.stop] * rank for tensor in found])
    outbox.finish()
    dist.barrier()
    return worst


def paced(make: MakeCarrier, count: int, before_push: float, before_take: float) -> list[tuple[float, float]]:
    """One sender and one receiver. Return the time before and behind each push, or each take."""
    rank = dist.get_rank()
    messages = [Message(1, (Rows((1000,), torch.float32),), (Part(0, 0, 1 + n % 5),)) for n in range(count)]
    end = EdgeEnd(EDGE, make([0], [1]), rank, SLOTS)
    box = (Outbox, Inbox)[rank](end)
    box.expect(messages)
    dist.barrier()
    times = []
    for number, message in enumerate(messages):
        time.sleep(before_take if rank else before_push)
        began = time.monotonic()
        if isinstance(box, Inbox):
            (rows,) = box.take()
            assert torch.equal(rows, torch.full((message.rows, 1000), float(number)))
        else:
            box.push(1, [torch.full((message.rows, 1000), float(number))])
        times.append((began, time.monotonic()))
    if isinstance(box, Outbox):
        box.finish()
    dist.barrier()
    return times


def lost(make: MakeCarrier, folder: str, victim: int) -> None:
    """The victim ends after a few messages; the other rank writes its error."""
    rank = dist.get_rank()
    messages = [Message(1, (Rows((4,), torch.float32),), (Part(0, 0, 2),))] * 40
    box = (Outbox, Inbox)[rank](EdgeEnd(EDGE, make([0], [1]), rank, SLOTS))
    box.expect(messages)
    dist.barrier()
    number = 0
    try:
        for number in range(40):
            if rank == victim and number == MOVED_BY_VICTIM:
                Path(folder, "ended").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            if isinstance(box, Inbox):
                assert torch.equal(box.take()[0], torch.full((2, 4), float(number)))
            else:
                time.sleep(0.01)
                box.push(1, [torch.full((2, 4), float(number))])
    except LostRankError as error:
        Path(folder, "error").write_text(f"{time.monotonic()}\n{error.rank}\n{number}\n{error}")
        raise
