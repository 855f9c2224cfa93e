import numpy as np
import pytest
import torch

from omnitrain.data.pack import Pack
from omnitrain.data.sample import MediaItem, MediaSpan, Sample


def sample(ids: list[int], trained: list[int], index: int = 0, spans: tuple[MediaSpan, ...] = ()) -> Sample:
    mask = np.zeros(len(ids), dtype=bool)
    mask[trained] = True
    return Sample(f"s{index}", "src", np.array(ids), mask, np.arange(len(ids)), spans, index)


def span(component: str, start: int, rows: int, is_target: bool = False) -> MediaSpan:
    return MediaSpan(component, start, MediaItem({"x": np.full((1, 2), start, dtype=np.float32)}, rows), is_target)


def test_samples_lie_end_to_end_shortest_first() -> None:
    pack = Pack.from_samples([sample([1, 2, 3], [2], 0), sample([4, 5], [1], 1)])
    assert pack.input_ids.tolist() == [[4, 5, 1, 2, 3]]
    assert pack.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert pack.cu_seqlens.tolist() == [0, 2, 5]
    assert pack.info.ids == ("s1", "s0") and pack.max_seqlen == 3


def test_labels_are_shifted_within_each_sample() -> None:
    pack = Pack.from_samples([sample([1, 2, 3], [1, 2], 0), sample([4, 5], [0, 1], 1)])
    assert pack.text_rows.tolist() == [0, 2, 3]
    assert pack.text_labels.tolist() == [5, 2, 3]  # the first token of a sample is predicted by nothing


def test_media_rows_land_on_their_tokens() -> None:
    long = sample([0] * 6, [5], 0, (span("eye", 1, 2), span("pen", 4, 1, is_target=True)))
    short = sample([0] * 3, [2], 1, (span("eye", 1, 1),))
    pack = Pack.from_samples([long, short])
    assert pack.inputs["eye"].positions.tolist() == [1, 4, 5]
    assert pack.inputs["eye"].num_tokens == (1, 2)
    assert pack.inputs["eye"].features["x"].shape == (2, 2)
    assert pack.targets["pen"].positions.tolist() == [7]
    assert pack.loss_counts() == {"text": 2, "pen": 1}


def test_an_empty_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Pack.from_samples([])


def test_a_pack_moves_whole() -> None:
    moved = Pack.from_samples([sample([1, 2], [1], 0, (span("eye", 0, 1),))]).to("meta")
    tensors = [moved.input_ids, moved.text_rows, moved.inputs["eye"].positions, moved.inputs["eye"].features["x"]]
    assert {tensor.device for tensor in tensors} == {torch.device("meta")}
