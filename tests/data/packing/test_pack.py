import dataclasses

import numpy as np
import pytest
import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import MediaItem, MediaSpan, Sample


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
    assert pack.info.ids == ("s1", "s0")


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
    assert pack.inputs["eye"].samples == (0, 1)
    assert pack.inputs["eye"].groups[0].features["x"].shape == (2, 2)
    assert pack.targets["pen"].positions.tolist() == [7]
    assert pack.loss_counts() == {"text": 2, "pen": 1}


def test_a_model_is_not_given_what_no_loss_reads_at_the_end() -> None:
    answered = dataclasses.replace(sample([1, 2, 3, 4, 5], [2, 3], 0), token_inputs={"kind": np.arange(5)})
    other = dataclasses.replace(sample([6, 7], [1], 1), token_inputs={"kind": np.arange(2)})
    pack = Pack.from_samples([answered.without_tail(), other.without_tail()])
    assert pack.input_ids.tolist() == [[6, 1, 2, 3]] and pack.position_ids.tolist() == [[0, 0, 1, 2]]
    assert pack.token_inputs["kind"].tolist() == [[0, 0, 1, 2]] and pack.info.lengths == (1, 3)
    assert pack.text_rows.tolist() == [0, 2, 3] and pack.text_labels.tolist() == [7, 3, 4]


def test_media_at_the_end_are_given_whole() -> None:
    drawing = sample([1, 2, 0, 0, 3], [1], 0, (span("pen", 2, 2, is_target=True),))
    assert len(drawing.without_tail()) == 4
    assert len(sample([1, 2], []).without_tail()) == 1


def test_an_empty_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Pack.from_samples([])


def test_a_pack_moves_and_which_rows_are_meant_stays_on_the_host() -> None:
    moved = Pack.from_samples([sample([1, 2], [1], 0, (span("eye", 0, 1),))]).to("meta")
    eye = moved.inputs["eye"]
    there = [moved.input_ids, moved.text_labels, eye.groups[0].features["x"]]
    assert {tensor.device for tensor in there} == {torch.device("meta")}
    assert {tensor.device for tensor in (moved.text_rows, moved.read_rows, eye.positions)} == {torch.device("cpu")}


def test_rows_of_one_item_may_lie_apart() -> None:
    movie = MediaSpan("eye", 1, MediaItem({"x": np.zeros((3, 2))}, 3), False, np.array([1, 2, 5]))
    pack = Pack.from_samples([sample([0] * 3, [2], 0), sample([0] * 7, [6], 1, (movie,))])
    assert pack.inputs["eye"].positions.tolist() == [4, 5, 8]


def test_items_of_another_shape_are_never_padded() -> None:
    def shot(start: int, rows: int, width: int) -> MediaSpan:
        features = {"x": np.full((rows, width), start, np.float32), "grid": np.array([[1, rows, width]])}
        return MediaSpan("eye", start, MediaItem(features, 1), False)

    spans = (shot(0, 2, 3), shot(1, 1, 4), shot(2, 3, 3))
    batch = Pack.from_samples([sample([0] * 4, [3], 0, spans)]).inputs["eye"]
    assert [group.features["x"].shape for group in batch.groups] == [(5, 3), (1, 4)]
    assert batch.positions.tolist() == [0, 2, 1]  # in order of groups
    assert batch.groups[0].num_rows == {"x": (2, 3), "grid": (1, 1)}
    first, third = batch.groups[0].split([1, 1])
    assert first.features["x"].shape == (2, 3) and third.features["grid"].tolist() == [[1, 3, 3]]
    assert torch.equal(third.features["x"], torch.full((3, 3), 2.0))


def test_position_axes_and_token_inputs_are_packed_along_the_tokens() -> None:
    def typed(length: int, index: int) -> Sample:
        axes = np.stack([np.arange(length) + 10 * axis for axis in range(3)])
        kinds = {"mm_token_type_ids": np.full(length, index)}
        return dataclasses.replace(sample([0] * length, [1], index), position_ids=axes, token_inputs=kinds)

    pack = Pack.from_samples([typed(3, 0), typed(2, 1)])
    assert pack.position_ids.shape == (3, 1, 5)
    assert pack.position_ids[1, 0].tolist() == [10, 11, 10, 11, 12]
    assert pack.token_inputs["mm_token_type_ids"].tolist() == [[1, 1, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"samples 's2' and 's0' cannot share a pack: position ids \(2,\) and"):
        Pack.from_samples([typed(3, 0), sample([1, 2], [1], 2)])
