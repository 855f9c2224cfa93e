"""Messages of a component that has ranks of its own.

Its features go to the section that reads them, and their gradients come back. A decoder gets hidden states from the
foundation's last stage, and sends its losses back.

Both ends of an edge know in advance, and in order, which messages will come.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress, groupby
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.errors import LostRankError
from omnitrain.models.discovery import MediaFeatures
from omnitrain.models.omni.encode import call_component, divided_labels
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.collectives import gathered_objects
from omnitrain.ops.host_values import to_device
from omnitrain.parallel.sections.carriers.nixl import NixlCarrier
from omnitrain.parallel.sections.carriers.torch_p2p import torch_carrier
from omnitrain.parallel.sections.message import Arrival, Carrier, Departure, Ends, Message, Part, Rows
from omnitrain.parallel.state import ParallelState
from omnitrain.plan import StepPlan
from omnitrain.plan.ragged import ranges
from omnitrain.recipe.parallel import MAIN, Section


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


_ANY = 2**31  # slots without a limit


class FeatureForm(NamedTuple):
    """The form of an encoder's features, which ranks without the encoder cannot measure."""

    pattern: MediaFeatures  # features without items
    is_trained: bool  # whether their gradients go back

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The tensors of a message with features."""
        return tuple(Rows(tuple(tensor.shape[1:]), tensor.dtype) for tensor in self.pattern.tensors())

    @property
    def has_gradient(self) -> tuple[bool, ...]:
        """For each tensor, whether a gradient goes back."""
        return tuple(self.is_trained and tensor.is_floating_point() for tensor in self.pattern.tensors())

    def sent_and_returned(self, *, trains: bool) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
        """Return the tensors of a message with features, and of one with gradients; ``trains``: there are any."""
        return self.rows, tuple(compress(self.rows, self.has_gradient)) if trains else ()


class LossForm(NamedTuple):
    """The form of a decoder's losses, and of the hidden states from which it computes them."""

    hidden: Rows  # a hidden state
    num_columns: int  # of the loss of a token, and of the metrics of a recipe

    def sent_and_returned(self, *, trains: bool) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
        """Return the tensors of a message with losses (and gradients of hidden states), and of one with such states."""
        return (Rows((self.num_columns,), torch.float32), *[self.hidden] * trains), (self.hidden,)


class _Share(NamedTuple):
    """A part of a message, as its sender sees it."""

    receiver: int  # global rank
    rows: np.ndarray  # ``[rows of the part]`` int64: which rows of the sender's features these are


class FeatureEdge:
    """This rank's end of the edge of a component. Ranks of both ends create it, in the same order.

    Ranks are global. ``senders`` are of its section, ``receivers`` read the features: of ``main``, those of the first
    pipeline stage, or for a teacher of the last one. A receiver has room for ``slots`` messages. The carrier ``nixl``,
    between hosts' memories, brings features only. :attr:`kept`: window -> features of a later step, which this rank has
    encoded ahead.

    With a :class:`LossForm`, it is the edge of a decoder's losses: ``receivers`` are the ranks of the last stage,
    ``behind`` ranks after those of the first one, and hidden states are given back before losses are taken.
    """

    def __init__(
        self,
        component: str,
        form: FeatureForm | LossForm,
        ends: Ends,
        senders: Sequence[int],
        receivers: Sequence[int],
        *,
        slots: int,
        device: torch.device,
        carrier: Literal["torch", "nixl"] = "torch",
        behind: int = 0,
    ) -> None:
        self.component, self.slots, self._form, self._behind = component, slots, form, behind
        self._rank, self._device = dist.get_rank(), device
        self._is_sender = self._rank in senders
        by_nixl = carrier == "nixl"
        self._carrier: Carrier = (
            NixlCarrier(senders, receivers, slots) if by_nixl else torch_carrier(senders, receivers, device)
        )
        back = torch_carrier(receivers, senders, device)
        of_losses = isinstance(form, LossForm)  # a rank posts them when it has sent the hidden states
        features = EdgeEnd(ends, self._carrier, self._rank, _ANY if of_losses else slots)
        # A section posts the gradients of a window when it has encoded it: `in_flight` bounds them.
        gradients = EdgeEnd(ends.returned, back, self._rank, _ANY if self._is_sender else slots)
        self._features = (Outbox if self._is_sender else Inbox)(features)
        self._gradients = (Inbox if self._is_sender else Outbox)(gradients)
        self._messages: dict[int, list[Message]] = {}
        self._windows_of: defaultdict[int, list[int]] = defaultdict(list)  # receiver -> windows of its messages
        self._shares: dict[int, list[_Share]] = {}
        self._rows: tuple[Rows, ...] = ()  # the tensors of a message of this step
        self._back: tuple[Rows, ...] = ()  # the tensors of a message that comes back
        self.kept: dict[int, tuple[Tensor, ...]] = {}
        self._kept_of: StepPlan | None = None

    @property
    def form(self) -> FeatureForm:
        """The form of the features."""
        assert isinstance(self._form, FeatureForm)
        return self._form

    @property
    def hidden(self) -> Rows:
        """A hidden state, as it is sent."""
        assert isinstance(self._form, LossForm)
        return self._form.hidden

    def take_kept(self, plan: StepPlan) -> dict[int, tuple[Tensor, ...]]:
        """Return window -> features of a step that this rank has encoded ahead, and keep them no longer."""
        if self._kept_of is not plan:
            return {}
        kept, self.kept, self._kept_of = self.kept, {}, None
        return kept

    def keep_for(self, plan: StepPlan) -> None:
        """From now on, :attr:`kept` has features of the step of ``plan`` alone."""
        self.kept, self._kept_of = {}, plan

    def has_kept(self, plan: StepPlan) -> bool:
        """Return whether the features of a step were encoded ahead."""
        return self._kept_of is plan

    def expect(self, plan: StepPlan, windows: Sequence[int], *, trains: bool) -> None:
        """Prepare for the messages of a step with these windows, in their order; ``trains``: it has backwards."""
        self._rows, self._back = self._form.sent_and_returned(trains=trains)
        of_edge = {window: messages_of(plan, self.component, window, self._rows) for window in windows}
        self._messages = {
            window: [replace(message, receiver=message.receiver + self._behind) for message in messages]
            for window, messages in of_edge.items()
        }
        self._carrier.prepare([message for messages in self._messages.values() for message in messages])
        self._windows_of.clear()
        for window, messages in self._messages.items():
            if self._is_sender or isinstance(self._form, FeatureForm):
                self._features.expect(messages)
            for message in messages:
                self._windows_of[message.receiver].append(window)
            if self._is_sender:
                shares = _shares(plan, self.component, window, self._rank)
                self._shares[window] = [share._replace(receiver=share.receiver + self._behind) for share in shares]
            else:
                self._gradients.expect(self._returned(window))

    def _returned(self, window: int) -> list[Message]:
        """The messages with the gradients of a window, or with the hidden states."""
        return [back for message in self._messages[window] if self._back for back in message.returned(self._back)]

    def expect_back(self, window: int) -> None:
        """Post the receives of what comes back to this rank of a window; its features have left."""
        assert isinstance(self._gradients, Inbox)
        self._gradients.expect(self._returned(window))

    def peers(self, window: int) -> tuple[int, ...]:
        """Return the ranks at the other end of this rank's messages of a window, until its gradients are back."""
        if self._is_sender:
            return tuple(dict.fromkeys(share.receiver for share in self._shares[window]))
        own = [message for message in self._messages[window] if message.receiver == self._rank]
        return tuple(dict.fromkeys(part.sender for message in own for part in message.parts))

    def room_for(self, window: int) -> Iterator[tuple[int, int | None]]:
        """Yield the receivers that :meth:`send` waits for, and the window that each must have taken; None: begun."""
        for receiver in self.peers(window):
            to_it = self._windows_of[receiver]
            number = to_it.index(window)
            if number >= self.slots:  # message `number - slots` must have left: its receive is posted
                taken = number - 2 * self.slots
                yield receiver, to_it[taken] if taken >= 0 else None

    def send(self, window: int, tensors: Sequence[Tensor]) -> None:
        """Send this rank's features of a window, ``[encoded features, ...]`` each, to the ranks that need them."""
        assert isinstance(self._features, Outbox)
        for share in self._shares[window]:
            index = to_device(torch.from_numpy(share.rows), self._device)
            self._features.push(share.receiver, [tensor.detach().index_select(0, index) for tensor in tensors])

    def take(self, window: int) -> tuple[Tensor, ...]:
        """Wait for the features that this rank needs of a window: ``[features, ...]`` each, without a graph."""
        assert isinstance(self._features, Inbox)
        if any(message.receiver == self._rank for message in self._messages[window]):
            return self._features.take()
        return Message(self._rank, self._rows, ()).empty(self._device)

    def give_back(self, window: int, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of what :meth:`take` returned: ``[features, ...]`` for each tensor that has one."""
        assert isinstance(self._gradients, Outbox)
        own = [message for message in self._messages[window] if message.receiver == self._rank]
        if isinstance(self._form, LossForm):
            self._features.expect(own)
        for message in own:
            for part in message.parts:
                rows = slice(part.start, part.stop)
                self._gradients.push(part.sender, [gradient[rows].contiguous() for gradient in gradients])

    def take_gradients(self, window: int, num_rows: int) -> list[Tensor]:
        """Wait for a window's gradients ``[num_rows, ...]``, summed over ranks in fp32 always in the same order."""
        assert isinstance(self._gradients, Inbox)
        shares, rows = self._shares[window], self._back
        dtypes = [torch.promote_types(dtype, torch.float32) if len(shares) > 1 else dtype for _, dtype in rows]
        totals = [
            torch.zeros(num_rows, *shape, dtype=dtype, device=self._device)
            for (shape, _), dtype in zip(rows, dtypes, strict=True)
        ]
        for share in shares:
            index = to_device(torch.from_numpy(share.rows), self._device)
            for total, part in zip(totals, self._gradients.take(), strict=True):
                total.index_add_(0, index, part.to(total.dtype))
        return [total.to(dtype) for total, (_, dtype) in zip(totals, rows, strict=True)]

    def finish(self) -> None:
        """End a step: wait until everything that was sent has left."""
        for end in (self._features, self._gradients):
            if isinstance(end, Outbox):
                end.finish()
        self._messages.clear()
        self._shares.clear()


def messages_of(plan: StepPlan, component: str, window: int, rows: tuple[Rows, ...]) -> list[Message]:
    """Return the messages with the features of a window: one for each rank that needs some, by rank.

    A message has the features of its items in the order of the receiver's packs. Items that follow each other there and
    have the same sender are one part.
    """
    parts: dict[int, list[Part]] = {}
    for receiver, sender, items in _runs(plan, component, window):
        own = parts.setdefault(receiver, [])
        start = own[-1].stop if own else 0
        own.append(Part(sender, start, start + int(plan.item_tokens[items].sum())))
    return [Message(receiver, rows, tuple(own)) for receiver, own in parts.items()]


def _shares(plan: StepPlan, component: str, window: int, rank: int) -> list[_Share]:
    """The parts that a rank sends of :func:`messages_of`, in their order."""
    made = np.array([item for call in plan.calls_of(rank, component, window) for item in call.items], dtype=np.int64)
    lengths = plan.item_tokens[made]
    start_of = dict(zip(made.tolist(), (np.cumsum(lengths) - lengths).tolist(), strict=True))
    return [
        _Share(receiver, ranges(np.array([start_of[item] for item in items]), plan.item_tokens[items]))
        for receiver, sender, items in _runs(plan, component, window)
        if sender == rank
    ]


def _runs(plan: StepPlan, component: str, window: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield receiver, sender and items of each part of the messages of a window."""
    routes = plan.routes(component, window)
    columns = (routes.consumer, routes.producer, routes.item)
    entries = zip(*(column[routes.rows > 0].tolist() for column in columns), strict=True)
    for (receiver, sender), run in groupby(entries, key=itemgetter(0, 1)):
        yield receiver, sender, [item for _, _, item in run]


def connect_sections(
    model: OmniModel,
    sections: Mapping[str, Section],
    state: ParallelState,
    device: torch.device,
    *,
    dtype: torch.dtype,
    last_stage: int,
) -> tuple[dict[str, FeatureEdge], dict[str, FeatureEdge]]:
    """Return component -> this rank's end of its edge, and decoder -> its end of the edge of its losses.

    All ranks must call it, with a sharded model. An edge goes to the section with the component that reads the
    features: most often the foundation in ``main``. Each section encodes its smallest input once, and tells the other
    ranks the form of the features. ``dtype``: of hidden states. ``last_stage``: the pipeline rank that has it.
    """
    own = sections[state.section].components if state.section in sections else ()
    forms = {name: _form(model, name, device) for name in own}
    for of_rank in gathered_objects(forms):
        forms |= of_rank
    edges, losses = dict[str, FeatureEdge](), dict[str, FeatureEdge]()
    section_of = {component: name for name, section in sections.items() for component in section.components}
    reader_of = {read: section_of.get(reader, MAIN) for reader, read in model.reads.items()}
    for section_name, section in sections.items():
        senders = state.of_section(section_name).ranks
        for component in section.components:
            form = forms[component]._replace(pattern=_on(forms[component].pattern, device))
            ends = Ends(section_name, reader_of.get(component, MAIN))
            reading = state.of_section(ends.target)
            of_stage = reading.size("stage")
            behind = last_stage * of_stage
            at_end = reading.ranks[behind : behind + of_stage]
            receivers = at_end if component in model.teachers else reading.ranks[:of_stage]
            made = FeatureEdge(
                component, form, ends, senders, receivers, slots=section.slots, device=device, carrier=section.carrier
            )
            if state.rank in (*senders, *receivers):
                edges[component] = made
            if component in model.decoder_names:
                hidden, columns = Rows(form.rows[0].shape, dtype), 1 + len(loss_metrics(model, component))
                made = FeatureEdge(
                    component,
                    LossForm(hidden, columns),
                    ends,
                    senders,
                    at_end,
                    slots=section.slots,
                    device=device,
                    behind=behind,
                )
                if state.rank in (*senders, *at_end):
                    losses[component] = made
    return edges, losses


def loss_metrics(model: OmniModel, decoder: str) -> tuple[str, ...]:
    """Return the names of the metrics of a decoder's losses, besides the loss."""
    return tuple(model.decoders[decoder].token_metrics)


def _form(model: OmniModel, component: str, device: torch.device) -> FeatureForm:
    """Encode the smallest input of a component; all ranks of its section take part."""
    first = model.media_names[component][0]
    of_gpu = [device] if device.type == "cuda" else []  # by default, those of all GPUs of the node
    with torch.no_grad(), torch.random.fork_rng(of_gpu):
        features, _ = call_component(model, component, {}, {first: 1})
    without_labels = divided_labels(features)[0] if component in model.decoder_names else features
    return FeatureForm(_on(without_labels.without_items(), torch.device("cpu")), model.has_backward(component))


def _on(pattern: MediaFeatures, device: torch.device) -> MediaFeatures:
    moved = pattern.with_tensors([tensor.to(device) for tensor in pattern.tensors()], ())
    return replace(moved, shared={name: tensor.to(device) for name, tensor in pattern.shared.items()})
