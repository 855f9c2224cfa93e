"""The two ends of an edge between sections. Every rank knows in advance, and in order, which messages will come."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from omnitrain.errors import LostRankError
from omnitrain.parallel.sections.carriers.carrier import Arrival, Carrier, Departure
from omnitrain.parallel.sections.message import Ends, Message, Part


@dataclass(frozen=True)
class EdgeEnd:
    """This rank's end of an edge."""

    edge: Ends  # names of the sections
    carrier: Carrier  # brings the messages of this edge
    rank: int  # global rank of this process
    slots: int  # number of messages, at least 1, for which a receiver has room; equal at both ends

    @contextmanager
    def naming(self, section: str, number: int) -> Iterator[None]:
        """Name the section and the message if a rank of ``section`` is lost."""
        try:
            yield
        except LostRankError as error:
            verb = "take" if section == self.edge.source else "send"
            needs = f"rank {self.rank} cannot {verb} message {number} of {self.edge}"
            raise LostRankError(f"section {section}: {error}; {needs}", error.rank) from error


@dataclass(frozen=True)
class _Unposted:
    """A message that could not be posted. Those before it may be here, so the error waits for its turn."""

    error: LostRankError

    def wait(self) -> tuple[Tensor, ...]:
        raise self.error


class Inbox:
    """The messages of an edge that this rank receives.

    ``slots`` of them are posted ahead, and taking one posts the next. So messages land while this rank computes, and at
    most ``slots`` messages are in memory that were not taken. If a sender is lost, those that arrived can still be
    taken, and the error names the first one that did not arrive completely, whether it was pushed or not.
    """

    def __init__(self, end: EdgeEnd) -> None:
        self._end = end
        self._expected: deque[Message] = deque()
        self._posted: deque[Arrival] = deque()
        self._num_taken = 0

    def expect(self, messages: Sequence[Message]) -> None:
        """Add all messages of the edge, such as those of the next step; those of other receivers are ignored."""
        self._expected.extend(message for message in messages if message.receiver == self._end.rank)
        self._post()

    def take(self) -> tuple[Tensor, ...]:
        """Wait for the next message's tensors, without a graph; LostRankError: a sender has ended or is silent."""
        end, number = self._end, self._num_taken
        if not self._posted:
            raise ValueError(f"rank {end.rank} expects {number} messages of {end.edge}, and takes one more")
        with end.naming(end.edge.source, number):
            tensors = self._posted[0].wait()
        self._posted.popleft()
        self._num_taken += 1
        self._post()
        return tensors

    def _post(self) -> None:
        while self._expected and len(self._posted) < self._end.slots:
            message, number = self._expected.popleft(), self._num_taken + len(self._posted)
            try:
                self._posted.append(self._end.carrier.post(message, number))
            except LostRankError as error:
                self._posted.append(_Unposted(error))


class Outbox:
    """The parts of an edge's messages that this rank sends.

    A push does not wait as long as the receiver has room: only the push of message ``n`` to a receiver waits until
    message ``n - slots`` has left, which is when the receiver has posted it. A message that has left may not have been
    taken: if this rank ends, the receiver may lose it. If a receiver is lost, the error of push ``n`` names message
    ``n``, or ``n - slots`` for which it waits.
    """

    def __init__(self, end: EdgeEnd) -> None:
        self._end = end
        self._counts: Counter[int] = Counter()  # of all messages, by receiver
        self._expected: defaultdict[int, deque[tuple[int, Message, Part]]] = defaultdict(deque)
        self._sent: defaultdict[int, deque[tuple[int, Departure]]] = defaultdict(deque)

    def expect(self, messages: Sequence[Message]) -> None:
        """Add all messages of the edge, such as those of the next step; this rank sends its parts of them."""
        for message in messages:
            number = self._counts[message.receiver]
            self._counts[message.receiver] += 1
            own = [part for part in message.parts if part.sender == self._end.rank]
            self._expected[message.receiver].extend((number, message, part) for part in own)

    def push(self, receiver: int, tensors: Sequence[Tensor]) -> None:
        """Send the next part, ``[rows, ...]`` each, unchanged until the message has left, or raise LostRankError."""
        end = self._end
        if not self._expected[receiver]:
            raise ValueError(f"rank {end.rank} has no more parts of {end.edge} for rank {receiver}")
        number, message, part = self._expected[receiver][0]
        message.require(part, tensors)
        self._await_departures(receiver, number - end.slots)
        with end.naming(end.edge.target, number):
            whole = [tensor.detach().contiguous() for tensor in tensors]
            departure = end.carrier.send(whole, message, part, number)
        self._expected[receiver].popleft()
        self._sent[receiver].append((number, departure))

    def finish(self) -> None:
        """Wait until everything that was pushed has left. Raises LostRankError: a receiver has ended or is silent."""
        for receiver in self._sent:
            self._await_departures(receiver, self._counts[receiver])

    def _await_departures(self, receiver: int, last: int) -> None:
        """Wait until all messages up to ``last`` have left."""
        sent = self._sent[receiver]
        while sent and sent[0][0] <= last:
            number, departure = sent[0]
            with self._end.naming(self._end.edge.target, number):
                departure.wait()
            sent.popleft()
