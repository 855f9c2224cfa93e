"""Offloaded activations on a side stream that works as late as it may: what reads too early reads NaN."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from omnitrain.parallel.memory.offload import ActivationOffload

aten = torch.ops.aten


class LateStream:
    """Work that is handed to it is done when somebody waits for it, in order."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []
        self.num_given = self.num_seen = 0
        self.kept: set[int] = set()

    def wait_stream(self, other: LateStream) -> None:
        self.num_seen = other.num_given

    def record_event(self) -> tuple[LateStream, int]:
        return self, self.num_given

    def wait_event(self, event: tuple[LateStream, int]) -> None:
        stream, number = event
        while stream.num_given - len(stream.waiting) < number:
            stream.waiting.pop(0)()


class TwoStreams(TorchDispatchMode):
    """Operations go to the stream that is current; fresh memory is full of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = LateStream(), LateStream()
        self.current = self.main
        self.pinned: set[int] = set()
        self.of_device: set[int] = set()
        self._held: list[Tensor] = []  # so that no place is that of another later

    @contextmanager
    def on(self, stream: LateStream) -> Any:
        self.current = stream
        yield
        self.current = self.main

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return func(*args)
        self.current.num_given += 1
        if self.current is self.side:
            return self._later(func, *args)
        is_pinned = (kwargs or {}).pop("pin_memory", False)
        made = func(*args, **(kwargs or {}))
        if func is aten.empty_like.default:
            made.fill_(torch.nan)
            if is_pinned:
                self.pinned.add(storage(made))
        return made

    def _later(self, func: Any, out: Tensor, read: Tensor, non_blocking: bool) -> Tensor:
        assert func is aten.copy_.default and non_blocking
        assert self.side.num_seen == self.main.num_given, (
            "it may run before what it reads is written, or its place free"
        )
        self._held += out, read
        self.of_device |= {storage(out), storage(read)} - self.pinned
        self.side.waiting.append(lambda: func(out, read))
        return out


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> TwoStreams:
    two = TwoStreams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: two.main)
    monkeypatch.setattr(torch.cuda, "stream", two.on)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: stream.kept.add(storage(tensor)))
    return two


def gradients(model: nn.Module, around: AbstractContextManager[Any]) -> list[Tensor]:
    model.zero_grad()
    with around:
        model(torch.ones(32, 64)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_late_side_stream_changes_no_gradient_and_every_buffer_it_uses_is_kept_for_it(streams: TwoStreams) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3)))
    expected = [gradient.clone() for gradient in gradients(model, torch.enable_grad())]
    offload = ActivationOffload(torch.device("cpu"))
    offload._stream = streams.side
    for block in model:
        offload.attach(block)
    found = gradients(model, streams)
    assert all(torch.equal(ours, plain) for ours, plain in zip(found, expected, strict=True))
    assert len(streams.of_device) >= 6 and streams.of_device == streams.side.kept
    assert offload.num_bytes == 3 * 3 * 32 * 64 * 4  # inputs of both layers and of what lies between
