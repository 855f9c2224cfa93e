from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest
import torch

from omnitrain.checkpoint.shared_memory import SharedMemory, received


@dataclass(frozen=True)
class Named:
    name: str
    tensor: torch.Tensor


def test_a_value_arrives_with_copies_of_its_tensors_and_the_memory_serves_the_next_one() -> None:
    memory = SharedMemory()
    for size in (3, 1000, 5):
        values = torch.arange(4 * size, dtype=torch.float64).view(4, size)
        tensors = [values, values.t(), values[1:3, 1:], values.bfloat16(), values[0, 0], values[:0], values > 2]
        sent = {"named": [Named(str(index), tensor) for index, tensor in enumerate(tensors)], "step": size}
        found = received(memory.message(sent), memory.descriptor)
        values.zero_()
        assert found["step"] == size
        expected = torch.arange(4 * size, dtype=torch.float64).view(4, size)
        whole = [
            expected,
            expected.t(),
            expected[1:3, 1:],
            expected.bfloat16(),
            expected[0, 0],
            expected[:0],
            expected > 2,
        ]
        for named, tensor in zip(found["named"], whole, strict=True):
            assert torch.equal(named.tensor, tensor) and named.tensor.dtype == tensor.dtype
            assert named.tensor.untyped_storage().nbytes() == tensor.nbytes  # torch copies a view of more
    memory.close()


def test_what_no_other_process_can_make_is_refused() -> None:
    memory = SharedMemory()
    of_script = type("OfScript", (dict,), {"__module__": "__main__"})
    with pytest.raises(pickle.PicklingError, match="OfScript is defined in the main script or notebook"):
        memory.message([of_script()])
    with pytest.raises(pickle.PicklingError):
        memory.message(lambda: 0)
    memory.close()
