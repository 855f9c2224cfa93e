"""Python values between ranks on the host, for work without a step plan."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

from omnitrain.groups import PATIENCE, shared_group
from omnitrain.parallel.sections.carriers.torch_p2p import receive_tensors, send_tensors

_SIZE, _BYTES = 0, 1  # numbers of the two messages of a value


class HostLink:
    """Sends pickled values from rank to rank, without a time limit. All ranks of the run create it, in the same order.

    Args:
        device: where the tensors in received values are.
    """

    def __init__(self, device: torch.device) -> None:
        # A limit that has passed breaks the group: it is not that of peers.
        self._group = shared_group("link", range(dist.get_world_size()), "link", backend="gloo", timeout=PATIENCE)
        self._device = device

    def send(self, value: object, *ranks: int, timeout_s: float | None = None) -> None:
        """Send a value that can be pickled, with tensors on any device, to global ranks; wait until they have it.

        Args:
            value: the value.
            ranks: the receivers.
            timeout_s: limit in seconds for each message; None: no limit. After it, the link is broken.

        Raises:
            LostRankError: a receiver has ended, or took nothing within the limit.
        """
        assert self._group is not None
        stream = io.BytesIO()
        torch.save(value, stream)
        data = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        begun = [
            send_tensors([tensor], self._group, rank, number)
            for number, tensor in ((_SIZE, size), (_BYTES, data))
            for rank in ranks
        ]
        for transfer in begun:
            transfer.wait(timeout_s)

    def receive(self, rank: int) -> Any:
        """Wait for the next value of a global rank.

        Raises:
            LostRankError: the sender has ended.
        """
        assert self._group is not None
        size = torch.empty(1, dtype=torch.int64)
        receive_tensors([size], self._group, rank, _SIZE).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        receive_tensors([data], self._group, rank, _BYTES).wait()
        return torch.load(io.BytesIO(data.numpy().tobytes()), map_location=self._device, weights_only=False)
