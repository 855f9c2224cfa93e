"""Bring messages with NIXL: senders write into the receiver's memory, and the receiver takes no part."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.errors import LostRankError, UserError
from omnitrain.groups import new_group
from omnitrain.ops.collectives import gathered_objects
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
    """A write into another rank's memory, which begins when the receiver has posted its message."""

    peer: int
    number: int
    ranges: list[tuple[int, int, int]]  # offsets in this rank's memory and in the other's, and numbers of bytes
    note: bytes
    carrier: NixlCarrier
    handle: Any = None
    is_done: bool = False

    def wait(self) -> None:
        self.carrier.await_peers([self.peer], lambda: self.is_done)


@dataclass(eq=False)
class _Landing:
    """A message that other ranks write into a slot of this rank's memory."""

    message: Message
    number: int
    carrier: NixlCarrier

    def wait(self) -> tuple[Tensor, ...]:
        """Copy the tensors out of the slot, which the next message may then use."""
        senders = sorted({part.sender for part in self.message.parts})
        self.carrier.await_peers(senders, lambda: self.carrier.has_landed(self.message, self.number))
        return self.carrier.copied(self.message, self.number)


class NixlCarrier:
    """:class:`~omnitrain.parallel.sections.message.Carrier` with one-sided writes between hosts' memories.

    A receiver has ``slots`` slots of registered memory, as large as the largest message so far needs, and tells the
    senders of a message when its slot is free. A sender copies rows into registered memory of its own, and a thread
    starts the write when the slot is free and drives it: UCX needs calls from the sender to finish a write. All ranks
    must create it.
    """

    def __init__(self, senders: Sequence[int], receivers: Sequence[int], slots: int) -> None:
        _api()
        self._rank, self._slots, self._slot_bytes = dist.get_rank(), slots, 0
        self._of_receiver = {rank: n for n, rank in enumerate(receivers)} if self._rank in senders else {}
        self._group = new_group(sorted({*senders, *receivers}), "section_edge", "gloo")
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def prepare(self, messages: Sequence[Message]) -> None:
        """Make the slots larger if a message does not fit. All ranks of the edge call it with the same messages."""
        largest = max((_offsets(message)[-1] for message in messages), default=0)
        if largest > self._slot_bytes:
            self._slot_bytes = _aligned(2 * largest)
            with self._lock:
                self._register()

    def _register(self) -> None:
        """Register new memory, and exchange addresses with the other ranks."""
        api = _api()
        self._agent = api.nixl_agent(f"{os.getpid()}-{uuid4()}", api.nixl_agent_config(backends=["UCX"]))
        num_slots = self._slots * max(1, len(self._of_receiver))
        self._memory = torch.zeros(_HEAD + num_slots * self._slot_bytes, dtype=torch.uint8)
        self._agent.register_memory(self._memory)
        self._peers: dict[int, _Peer] = {}
        self._ranks: dict[str, int] = {}
        self._landed: Counter[int] = Counter()  # parts, by message
        self._is_posted: Counter[int] = Counter()  # number of messages that each receiver has posted
        self._writes: list[_Write] = []
        self._pings: dict[int, _Write] = {}
        self._lost: dict[int, str] = {}
        address = self._agent.get_agent_metadata(), self._memory.data_ptr()
        assert self._group is not None
        addresses = gathered_objects(address, self._group)  # all that others need to write here
        for rank, (metadata, start) in zip(dist.get_process_group_ranks(self._group), addresses, strict=True):
            if rank != self._rank:
                name = self._agent.add_remote_agent(metadata)
                name = name.decode() if isinstance(name, bytes) else name
                self._peers[rank], self._ranks[name] = _Peer(name, start), rank
        dist.barrier(self._group)  # nobody writes before all know each other

    def post(self, message: Message, number: int) -> _Landing:
        """Tell the senders of a message that its slot is free."""
        with self._lock:
            for sender in sorted({part.sender for part in message.parts}):
                self._try(sender, lambda name: self._agent.send_notif(name, b"posted %d" % number))
        return _Landing(message, number, self)

    def send(self, tensors: Sequence[Tensor], message: Message, part: Part, number: int) -> _Write:
        """Copy a part into registered memory; it is written when the receiver has posted the message."""
        slot = self._of_receiver[message.receiver] * self._slots + number % self._slots
        ranges = []
        for tensor, rows, offset in zip(tensors, message.tensors, _offsets(message)[:-1], strict=True):
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
        for tensor, offset in zip(tensors, _offsets(message)[:-1], strict=True):
            start = self._start(number % self._slots) + offset
            tensor.copy_(self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        return tensors

    def await_peers(self, peers: Sequence[int], is_ready: Callable[[], bool]) -> None:
        """Wait until ``is_ready``. Raises LostRankError: one of ``peers`` has ended."""
        last_ping = time.monotonic()
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


def _offsets(message: Message) -> list[int]:
    """Offset of each tensor of a message from its start, in bytes, and its end."""
    offsets = [0]
    for rows in message.tensors:
        offsets.append(offsets[-1] + _aligned(message.rows * rows.bytes))
    return offsets


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
