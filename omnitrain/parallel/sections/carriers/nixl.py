"""Bring messages with NIXL: senders write into the receiver's memory, and the receiver takes no part."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.errors import LostRankError, UserError
from omnitrain.groups import new_group
from omnitrain.packages import install_command
from omnitrain.parallel.sections.message import Message, Part

_ALIGNMENT = 64  # bytes; of slots, and of the tensors in a slot
_HEAD = 64  # bytes at the start of each rank's memory, which others write to learn whether the rank lives
_PACKAGES = ("nixl_cu12", "nixl_cu13")
_PING_SECONDS = 0.25  # between two signs of life while waiting
_POLL_SECONDS = 0.0002
_LINGER_SECONDS = 0.05  # of the thread that polls, when nothing is under way


@dataclass(frozen=True)
class _Peer:
    """Another rank: the name of its agent, and the address of its memory."""

    name: str
    address: int


@dataclass(eq=False)
class _Write:
    """A write into another rank's memory, which begins when the receiver has posted its message.

    ``tensors``: offsets and numbers of bytes, in this rank's memory and in the other's.
    """

    peer: int
    number: int
    ranges: list[tuple[int, int, int]]
    note: bytes
    carrier: NixlCarrier
    handle: Any = None
    is_done: bool = False

    def wait(self, timeout_s: float | None) -> None:
        self.carrier.await_peers([self.peer], lambda: self.is_done, timeout_s)


@dataclass(eq=False)
class _Landing:
    """A message that others write into a slot of this rank's memory."""

    message: Message
    number: int
    carrier: NixlCarrier

    def wait(self, timeout_s: float | None) -> tuple[Tensor, ...]:
        """Copy the tensors out of the slot, which the next message may then use."""
        senders = sorted({part.sender for part in self.message.parts})
        self.carrier.await_peers(senders, lambda: self.carrier.has_landed(self.message, self.number), timeout_s)
        return self.carrier.copied(self.message, self.number)


class NixlCarrier:
    """:class:`~omnitrain.parallel.sections.carriers.carrier.Carrier` with one-sided writes between hosts' memories.

    A receiver has ``slots`` slots of registered memory, and tells the senders of a message when its slot is free. A
    sender copies rows into registered memory of its own, and a thread starts the write when the slot is free and drives
    it: UCX needs calls from the sender to finish a write.

    Args:
        rank: global rank of this process.
        senders: global ranks of the section that sends.
        receivers: global ranks of the section that receives.
        slots: number of messages for which a receiver has room.
        slot_bytes: bytes of a slot.
    """

    def __init__(
        self, rank: int, senders: Sequence[int], receivers: Sequence[int], *, slots: int, slot_bytes: int
    ) -> None:
        api = _api()
        self._agent = api.nixl_agent(f"{os.getpid()}-{id(self)}-{rank}", api.nixl_agent_config(backends=["UCX"]))
        self._slots, self._slot_bytes = slots, _aligned(slot_bytes)
        self._of_receiver = {receiver: index for index, receiver in enumerate(receivers)} if rank in senders else {}
        num_slots = slots * max(1, len(self._of_receiver))
        self._memory = torch.zeros(_HEAD + num_slots * self._slot_bytes, dtype=torch.uint8)
        self._agent.register_memory(self._memory)
        self._peers: dict[int, _Peer] = {}
        self._ranks: dict[str, int] = {}
        self._landed: Counter[int] = Counter()  # parts, by message
        self._is_posted: Counter[int] = Counter()  # number of messages that each receiver has posted
        self._writes: list[_Write] = []
        self._pings: dict[int, _Write] = {}
        self._lost: dict[int, str] = {}
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's registered memory, which does not grow."""
        return self._memory.nbytes

    def address(self) -> tuple[bytes, int]:
        """Return what the others need to write here: the agent's metadata, and the address of the memory."""
        return self._agent.get_agent_metadata(), self._memory.data_ptr()

    def meet(self, addresses: Mapping[int, tuple[bytes, int]]) -> None:
        """Learn the addresses of the other ranks of the edge, by global rank."""
        for rank, (metadata, address) in addresses.items():
            name = self._agent.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else name
            self._peers[rank], self._ranks[name] = _Peer(name, address), rank

    def prepare(self, messages: Sequence[Message]) -> None:
        """Do nothing: the slots stay as large as they are."""

    def post(self, message: Message, number: int) -> _Landing:
        """Tell the senders of a message that its slot is free."""
        self._offsets(message)
        with self._lock:
            for sender in sorted({part.sender for part in message.parts}):
                self._try(sender, lambda name: self._agent.send_notif(name, b"posted %d" % number))
        return _Landing(message, number, self)

    def send(self, tensors: Sequence[Tensor], message: Message, part: Part, number: int) -> _Write:
        """Copy a part into registered memory; it is written when the receiver has posted the message."""
        slot = self._of_receiver[message.receiver] * self._slots + number % self._slots
        ranges = []
        for tensor, rows, offset in zip(tensors, message.tensors, self._offsets(message), strict=True):
            start, count = offset + part.start * rows.bytes, part.rows * rows.bytes
            own = self._start(slot) + start
            self._memory[own : own + count].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            ranges.append((own, self._start(number % self._slots) + start, count))
        write = _Write(message.receiver, number, ranges, b"landed %d" % number, self)
        with self._lock:
            self._writes.append(write)
            self._poll()
            if self._writes and self._thread is None:
                self._thread = threading.Thread(target=self._drive, name="nixl", daemon=True)
                self._thread.start()
        return write

    def has_landed(self, message: Message, number: int) -> bool:
        """Return whether all parts of a message are in its slot."""
        return self._landed[number] == len(message.parts)

    def copied(self, message: Message, number: int) -> tuple[Tensor, ...]:
        """Return new tensors with the message in a slot, ``[rows, ...]`` each."""
        del self._landed[number]
        tensors = message.empty(torch.device("cpu"))
        for tensor, offset in zip(tensors, self._offsets(message), strict=True):
            start = self._start(number % self._slots) + offset
            tensor.copy_(self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        return tensors

    def await_peers(self, peers: Sequence[int], is_ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until ``is_ready``.

        Raises:
            LostRankError: one of ``peers`` has ended, or nothing came within ``timeout_s`` seconds.
        """
        began = last_ping = time.monotonic()
        while True:
            with self._lock:
                self._poll()
                if is_ready():
                    return
                now = time.monotonic()
                if now - last_ping > _PING_SECONDS:
                    last_ping = now
                    self._ping(peers)
            for peer in peers:
                if peer in self._lost:
                    reason = self._lost[peer]
                    raise LostRankError(f"rank {peer} is gone (killed, or its connection broke: {reason})", peer)
            if timeout_s is not None and now - began > timeout_s:
                silent = " and ".join(map(str, peers))
                raise LostRankError(f"rank {silent} did nothing for {timeout_s:g} s", peers[0])
            time.sleep(_POLL_SECONDS)

    def _drive(self) -> None:
        """Start writes and see them through while this rank computes; end when nothing was under way for a while."""
        idle_since = time.monotonic()
        while True:
            time.sleep(_POLL_SECONDS)
            with self._lock:
                self._poll()
                if self._writes:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > _LINGER_SECONDS:
                    self._thread = None
                    return

    def _poll(self) -> None:
        for name, notes in self._agent.get_new_notifs().items():
            for note in notes:
                word, number = note.split()
                if word == b"landed":
                    self._landed[int(number)] += 1
                elif word == b"posted":
                    self._is_posted[self._ranks[name]] = int(number) + 1
        for write in self._writes:
            if write.handle is None and write.number < self._is_posted[write.peer]:
                self._begin(write)
            if write.handle is not None:
                self._check(write)
        self._writes = [write for write in self._writes if not write.is_done and write.peer not in self._lost]

    def _ping(self, peers: Sequence[int]) -> None:
        """Write a byte into each rank's memory, which fails if the rank has ended."""
        for peer in peers:
            ping = self._pings.get(peer)
            if ping is None:
                ping = self._pings[peer] = _Write(peer, -1, [(0, 0, 1)], b"ping 0", self)
                self._begin(ping)
            if ping.handle is not None:
                self._check(ping)
            if ping.is_done:
                del self._pings[peer]

    def _begin(self, write: _Write) -> None:
        peer, own = self._peers[write.peer], self._memory.data_ptr()
        here = self._agent.get_xfer_descs([(own + start, count, 0) for start, _, count in write.ranges], "DRAM")
        there = self._agent.get_xfer_descs([(peer.address + to, count, 0) for _, to, count in write.ranges], "DRAM")

        def begin(name: str) -> None:
            write.handle = self._agent.initialize_xfer("WRITE", here, there, name, write.note)
            self._note_state(write, self._agent.transfer(write.handle))

        self._try(write.peer, begin)

    def _check(self, write: _Write) -> None:
        self._try(write.peer, lambda _: self._note_state(write, self._agent.check_xfer_state(write.handle)))

    def _note_state(self, write: _Write, state: str) -> None:
        if state == "DONE":
            write.is_done = True
            self._agent.release_xfer_handle(write.handle)
        elif state != "PROC":
            self._lost[write.peer] = f"state {state} of a write"

    def _try(self, peer: int, call: Callable[[str], object]) -> None:
        """Call with the name of a rank's agent; note the rank as lost if NIXL cannot reach it."""
        try:
            call(self._peers[peer].name)
        except Exception as error:  # nixl raises types of its own, which are not exported
            self._lost.setdefault(peer, f"{type(error).__name__} {error}".strip())

    def _start(self, slot: int) -> int:
        return _HEAD + slot * self._slot_bytes

    def _offsets(self, message: Message) -> list[int]:
        """Offset of each tensor in the slot, in bytes."""
        *offsets, end = _offsets(message)
        if end > self._slot_bytes:
            raise UserError(f"a message has {end} bytes, and a slot has {self._slot_bytes}")
        return offsets


def _offsets(message: Message) -> list[int]:
    """Offset of each tensor of a message from its start, in bytes, and its end."""
    offsets = [0]
    for rows in message.tensors:
        offsets.append(offsets[-1] + _aligned(message.rows * rows.bytes))
    return offsets


class GrowingNixlCarrier:
    """:class:`NixlCarrier` whose slots are as large as the largest message so far needs. All ranks must create it.

    Args:
        senders: global ranks of the section that sends.
        receivers: global ranks of the section that receives.
        slots: number of messages for which a receiver has room.

    Raises:
        UserError: NIXL is not installed.
    """

    def __init__(self, senders: Sequence[int], receivers: Sequence[int], slots: int) -> None:
        _api()
        self._senders, self._receivers, self._slots, self._slot_bytes = senders, receivers, slots, 0
        self._group = new_group(sorted({*senders, *receivers}), "section_edge", "gloo")
        self._carrier: NixlCarrier | None = None

    def prepare(self, messages: Sequence[Message]) -> None:
        """Make the slots larger if a message does not fit. All ranks of the edge call it with the same messages."""
        largest = max((_offsets(message)[-1] for message in messages), default=0)
        if largest > self._slot_bytes:
            assert self._group is not None
            self._slot_bytes = 2 * largest
            self._carrier = _connected(self._senders, self._receivers, self._slots, self._slot_bytes, self._group)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the slots take on this rank."""
        return 0 if self._carrier is None else self._carrier.memory_bytes

    def post(self, message: Message, number: int) -> _Landing:
        """See :meth:`NixlCarrier.post`."""
        assert self._carrier is not None
        return self._carrier.post(message, number)

    def send(self, tensors: Sequence[Tensor], message: Message, part: Part, number: int) -> _Write:
        """See :meth:`NixlCarrier.send`."""
        assert self._carrier is not None
        return self._carrier.send(tensors, message, part, number)


def _connected(
    senders: Sequence[int], receivers: Sequence[int], slots: int, slot_bytes: int, group: dist.ProcessGroup
) -> NixlCarrier:
    """Make a carrier, and exchange addresses with the other ranks of ``group``; all of them call this."""
    rank, members = dist.get_rank(), dist.get_process_group_ranks(group)
    carrier = NixlCarrier(rank, senders, receivers, slots=slots, slot_bytes=slot_bytes)
    addresses: list[Any] = [None] * len(members)
    dist.all_gather_object(addresses, carrier.address(), group=group)
    carrier.meet({member: address for member, address in zip(members, addresses, strict=True) if member != rank})
    dist.barrier(group)  # nobody writes before all know each other
    return carrier


def nixl_is_installed() -> bool:
    """Return whether NIXL's Python package is installed."""
    return any(find_spec(package) is not None for package in _PACKAGES)


def _api() -> Any:
    """Import NIXL's Python interface; without this, it writes lines about each agent."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    for package in _PACKAGES:
        if find_spec(package) is not None:
            return importlib.import_module(f"{package}._api")
    raise UserError(f"the carrier nixl needs the package nixl-cu12; {install_command('nixl')}")


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
