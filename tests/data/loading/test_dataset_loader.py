"""Map-style and iterable datasets of Python in a training loop: the same steps on any ranks, workers and resumes."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import pytest
import torch
from datasets import Dataset
from torch.utils.data import IterableDataset

import omnitrain as ot
from omnitrain.data.loading.dataset_loader import DatasetLoader
from omnitrain.errors import DataError, UserError
from omnitrain.recipe import Data
from tests.tiny import TASKS, png, tiny_model, tiny_processor, tiny_row, tiny_samples, write_parquet

ROWS = [f"row {number}" for number in range(22)]


class Stream(IterableDataset):
    """Rows in order; later epochs begin with another row."""

    def __init__(self) -> None:
        self.epoch, self.read = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[str]:
        for row in (*ROWS[self.epoch :], *ROWS[: self.epoch]):
            self.read += 1
            yield row


def loader_of(rows: Any, rank: int = 0, ranks: int = 1, **options: Any) -> DatasetLoader:
    options = {"micro_batch_size": 2, "global_batch_size": 8, "collate_fn": list} | options
    return ot.build_dataloader(rows, rank=rank, ranks=ranks, **options)


def steps_of(rows: Any, ranks: int = 1, epochs: int = 1, **options: Any) -> list[list[str]]:
    """The rows of each step of all ranks."""
    loaders = [loader_of(rows, rank, ranks, **options) for rank in range(ranks)]
    of_ranks = [[packs for _ in range(epochs) for packs in loader] for loader in loaders]
    assert len({len(steps) for steps in of_ranks}) == 1
    return [[row for packs in step for pack in packs for row in pack] for step in zip(*of_ranks, strict=True)]


class Counted(Stream):
    """A stream that knows its length, as HF `Trainer` wants."""

    def __len__(self) -> int:
        return len(ROWS)


HF = Dataset.from_dict({"row": ROWS})


@pytest.mark.parametrize("make", [lambda: ROWS, Stream, Counted, lambda: HF])
@pytest.mark.parametrize(("ranks", "workers"), [(3, 0), (4, 0), (2, 1)])
def test_a_step_has_the_same_rows_on_any_ranks_and_workers(make: Any, ranks: int, workers: int) -> None:
    whole = steps_of(make(), epochs=2)
    divided = steps_of(make(), ranks, epochs=2, num_workers=workers)
    assert [len(step) for step in whole] == [8, 8, 6] * 2
    assert [set(map(str, step)) for step in whole] == [set(map(str, step)) for step in divided]
    rows = [str(row) for step in whole for row in step]
    assert sorted(rows[:22]) == sorted(rows[22:]) and rows[:22] != rows[22:] and len(set(rows)) == 22


def test_several_processes_make_the_same_steps_also_where_they_are_sent_their_loader() -> None:
    whole = steps_of(ROWS, epochs=2)
    assert steps_of(ROWS, epochs=2, num_workers=2) == whole
    loader = loader_of(ROWS, num_workers=2)
    next(iter(loader))
    sent = pickle.loads(pickle.dumps(loader))
    assert [[row for pack in step for row in pack] for step in sent] == whole[1:3]


class Noisy(torch.utils.data.Dataset):
    """Rows that are a random number, as of an augmentation."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return torch.rand(()).item()


def test_workers_draw_other_random_numbers_in_each_epoch_and_rank_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    found = [[row for step in steps_of(Noisy(), 2, 2, num_workers=1, seed=seed) for row in step] for seed in (0, 0, 1)]
    assert torch.equal(before, torch.get_rng_state())
    assert found[0] == found[1] and len(set(found[0] + found[2])) == 32


@pytest.mark.parametrize("make", [lambda: ROWS, Stream])
@pytest.mark.parametrize("done", [2, 3, 5])
def test_a_state_continues_after_its_step_on_other_ranks(make: Any, done: int) -> None:
    whole = [set(step) for step in steps_of(make(), epochs=3)]
    first = loader_of(make(), 1, 2)
    steps = (packs for _ in range(3) for packs in first)
    assert len(list(islice(steps, done))) == done
    state = first.state_dict()
    assert (state["epoch"], state["steps"], state["rows"]) == (
        (done - 1) // 3,
        (done - 1) % 3 + 1,
        8 * ((done - 1) % 3 + 1),
    )
    rest = []
    for rank in range(3):
        loader = loader_of(make(), rank, 3)
        loader.load_state_dict(state)
        rest.append([packs for _ in range(state["epoch"], 3) for packs in loader])
    found = [{row for packs in step for pack in packs for row in pack} for step in zip(*rest, strict=True)]
    assert found == whole[done:]


class Prepared(IterableDataset):
    """Two samples of text, the same in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        yield from tiny_samples(tiny_processor(tiny_model()), 2, ["text"])


def test_the_seed_of_noise_follows_the_seed_of_the_loader_and_the_epoch_of_a_stream() -> None:
    def seeds(rows: Any, seed: int) -> list[set[int | None]]:
        loader = loader_of(rows, micro_batch_size=2, global_batch_size=2, seed=seed, max_tokens=99)
        return [{one.seed for step in loader for batch in step for one in batch} for _ in range(2)]

    rows = list(Prepared())
    assert seeds(rows, 0) == [{0}, {0}] and seeds(rows, 1) == [{1}, {1}]  # the index of a row goes on over epochs
    of_stream = [*seeds(Prepared(), 0), *seeds(Prepared(), 1)]
    assert len(set.union(*of_stream)) == 4


def test_iterating_again_goes_on_where_the_loop_was_left() -> None:
    loader = loader_of(ROWS)
    first = list(islice(loader, 1))
    assert first + list(loader) == list(loader_of(ROWS)) and (loader.epoch, loader.steps) == (1, 0)


def test_a_stream_is_read_no_further_than_its_steps() -> None:
    stream = Stream()
    list(islice(loader_of(stream), 1))
    assert stream.read == 8


def test_a_stream_of_hf_datasets_is_shuffled_by_itself() -> None:
    stream = HF.to_iterable_dataset().shuffle(seed=1, buffer_size=10)
    whole = [[row["row"] for row in step] for step in steps_of(stream, epochs=2)]
    assert [{row["row"] for row in step} for step in steps_of(stream, 2, epochs=2)] == [set(step) for step in whole]
    assert sorted(row for step in whole[:3] for row in step) == sorted(ROWS) and whole[:3] != whole[3:]


def test_order_and_length_are_as_asked() -> None:
    assert len(loader_of(ROWS)) == 3
    assert [row for step in steps_of(ROWS, shuffle=False) for row in step] == ROWS
    assert steps_of(ROWS, seed=1) != steps_of(ROWS, seed=2)
    with pytest.raises(TypeError, match="no len"):
        len(loader_of(Stream()))


def test_rows_become_samples_with_a_processor_and_bad_ones_are_skipped(tmp_path: Path) -> None:
    processor = tiny_processor(tiny_model())
    rows = [tiny_row(TASKS[i % len(TASKS)], i) for i in range(14)]
    records = [
        {"id": row.id, "task": row.source, "messages": row.messages}
        | {f"{m}s": files for m, files in row.media.items()}
        for row in rows
    ]
    expected = tiny_samples(processor)
    for dataset in (
        rows,
        records,
        ot.data.open_sources([ot.recipe.DataSource(path=str(write_parquet(tmp_path / "r.parquet", rows)))])[0],
    ):
        loader = loader_of(dataset, collate_fn=None, processor=processor, shuffle=False)
        packs = [pack for packs in loader for pack in packs]
        assert [pack.info.indices for pack in packs] == [
            ot.Pack.from_samples(expected[i : i + 2]).info.indices for i in range(0, 14, 2)
        ]
        assert torch.equal(packs[0].input_ids, ot.Pack.from_samples(expected[:2]).input_ids)
    records[1]["images"] = [b"no image"]
    longest = max(map(len, expected))
    loader = loader_of(records, collate_fn=None, processor=processor, shuffle=False, max_tokens=longest - 1)
    packed = [name for packs in loader for pack in packs for name in pack.info.ids]
    assert sorted(packed) == sorted({row.id for row in rows} - loader.rejected.keys()) and len(loader.rejected) > 1
    assert "unreadable image of 8 bytes" in loader.rejected[records[1]["id"]].reason


def test_messages_may_have_their_files() -> None:
    shown = ({"type": "image_url", "image_url": {"url": f"data:,{quote_from_bytes(png(1))}"}}, {"type": "image_url"})
    asked = [[part, {"type": "text", "text": "what?"}] for part in shown]
    answer = {"role": "assistant", "content": "7"}
    rows = [{"id": None, "messages": [{"role": "user", "content": content}, answer]} for content in asked]
    processor = tiny_processor(tiny_model())
    loader = loader_of(rows, collate_fn=None, processor=processor, global_batch_size=2, shuffle=False)
    (((pack,),),) = [list(loader)]
    assert len(pack.info.ids) == 1 and list(pack.inputs) == ["image_encoder"]
    assert "part 1 of message 1 (image_url) has no file" in loader.rejected["dataset[1]"].reason


def test_all_pieces_of_a_long_document_are_trained(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("word " * 20)
    (rows,) = ot.data.open_sources([ot.recipe.DataSource(path=str(tmp_path / "book.txt"))])
    loader = loader_of(rows, collate_fn=None, processor=tiny_processor(tiny_model()), max_tokens=30)
    ((pack,),) = list(loader)
    assert pack.info.lengths == (11, 30, 30, 30) and pack.num_tokens == len("word " * 20) + 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_packs_of_a_number_of_tokens_are_dense_and_a_step_has_the_same_rows(ranks: int) -> None:
    draw = random.Random(0)
    rows = [{"input_ids": [1] * draw.randint(2, 40)} for _ in range(70)]
    options = {"micro_batch_size": None, "pack_tokens": 64, "global_batch_size": 32, "collate_fn": None}
    loaders = [loader_of(rows, rank, ranks, **options) for rank in range(ranks)]
    steps = list(zip(*loaders, strict=True))
    packs = [pack for step in steps for of_rank in step for pack in of_rank]
    assert max(pack.num_tokens for pack in packs) <= 64 and len(steps) == 3
    assert sum(pack.num_tokens for pack in packs) / (64 * len(packs)) > (0.9, 0.85, 0.8)[ranks - 1]
    assert [sorted(i for of_rank in step for pack in of_rank for i in pack.info.indices) for step in steps] == [
        list(range(start, min(start + 32, 70))) for start in (0, 32, 64)
    ]


def test_ranks_that_fill_packs_have_equally_many_rows_of_a_step_up_to_one() -> None:
    rows = [{"input_ids": [1, 2]}] * 14
    options = {"micro_batch_size": None, "pack_tokens": 64, "global_batch_size": 14, "collate_fn": None}
    steps = [next(iter(loader_of(rows, rank, 5, **options))) for rank in range(5)]
    assert [sum(len(pack.info.ids) for pack in packs) for packs in steps] == [2, 3, 3, 3, 3]


def test_samples_longer_than_a_pack_are_skipped_and_listed() -> None:
    rows = [{"input_ids": [1] * length, "id": f"{length}", "source": "books"} for length in (3, 9, 4)]
    loader = loader_of(rows, micro_batch_size=None, pack_tokens=8, global_batch_size=3, collate_fn=None)
    ((pack,),) = list(loader)
    assert pack.info.ids == ("3", "4") and list(loader.rejected) == ["9"]
    assert loader.rejected["9"].reason == "9 tokens, but a pack holds at most 8" and loader.rejected["9"].is_overlong


def test_dicts_of_features_are_packed_with_their_places_in_the_order() -> None:
    rows = [{"input_ids": [number, 1, 2]} for number in range(4)]
    loader = loader_of(rows, collate_fn=ot.OmniDataCollatorWithPacking(), global_batch_size=4)
    found = [[pack.info.indices for pack in packs] for _ in range(2) for packs in loader]
    assert found == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_cannot_be_used_end_the_loop_in_words(workers: int) -> None:
    processor = tiny_processor(tiny_model(encoders={}))
    loader = loader_of([tiny_row("image_to_text", 0)], processor=processor, num_workers=workers)
    with pytest.raises(UserError, match=r"asks the model to read image.*model\.encoders"):
        list(loader)
    damaged = [tiny_row("text", number).__dict__ | {"messages": None} for number in range(8)]
    loader = loader_of(damaged, processor=processor, num_workers=workers)
    with pytest.raises(
        DataError, match=r"all of 8 rows were rejected; the last, .*messages of the row are .None., expected"
    ):
        list(loader)
    for rows, problem in ((["a"], "row 0 is a str; with a processor"), ([{"text": "a"}], "no 'messages'; found")):
        with pytest.raises(UserError, match=problem):
            list(loader_of(rows, processor=processor, num_workers=workers))


@pytest.mark.parametrize(
    ("rows", "options", "problem"),
    [
        (ROWS, {"global_batch_size": 7}, "global_batch_size: found 7; expected a multiple of micro_batch_size 2"),
        (ROWS, {"micro_batch_size": 0}, "expected a multiple of micro_batch_size 0"),
        (ROWS, {"micro_batch_size": None}, "micro_batch_size, pack_tokens: found None and None; with a dataset pass"),
        (ROWS, {"pack_tokens": 9}, "micro_batch_size, pack_tokens: found 2 and 9; with a dataset pass one of them"),
        (ROWS, {"pack_tokens": 9, "micro_batch_size": None}, "collate_fn: with pack_tokens it must be an OmniData"),
        (
            ROWS,
            {"pack_tokens": 9, "micro_batch_size": None, "global_batch_size": None},
            "global_batch_size: found None; expected the rows of a step over all ranks, 1 or more",
        ),
        (ROWS, {"rank": None, "ranks": 2}, "rank, ranks: found None and 2; expected a rank from 0 to below the number"),
        (ROWS, {"rank": 2, "ranks": 2}, "rank, ranks: found 2 and 2; expected"),
        (ROWS, {"ranks": 5}, "8 samples are 4 micro-batches of 2, but 5 ranks need at least one each; raise it to 10"),
        (Stream(), {"shuffle": True}, "shuffle: an iterable dataset is read in its own order"),
        (Stream(), {"num_workers": 2}, "num_workers: an iterable dataset .* by at most one worker"),
        ([], {}, "dataset: it has no rows"),
        (7, {}, "dataset: found a int; expected the `data` of a recipe, a map-style dataset"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(rows: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises((UserError, DataError), match=problem):
        loader_of(rows, **options)


def test_a_state_of_other_steps_and_data_without_a_processor_are_refused() -> None:
    with pytest.raises(UserError, match="found 4, but the state has 3 steps of 24 rows; pass the one that the run"):
        loader_of(ROWS, global_batch_size=4).load_state_dict(
            {"epoch": 0, "steps": 3, "rows": 24, "length": 22, "seed": 0}
        )
    with pytest.raises(UserError, match="dataset: found 21 rows, but the state is of 22 rows; pass the dataset that"):
        loader_of(ROWS[1:]).load_state_dict(loader_of(ROWS).state_dict())
    for options, found in (({"seed": 1}, 1), ({"shuffle": False}, None)):
        with pytest.raises(UserError, match=f"shuffle, seed: found the seed {found}, but the state is of 0; pass"):
            loader_of(ROWS, **options).load_state_dict(loader_of(ROWS).state_dict())
    data, processor = Data.model_validate({"train": [{"path": "rows.jsonl"}]}), tiny_processor(tiny_model())
    with pytest.raises(UserError, match="processor: the `data` of a recipe needs an OmniProcessor"):
        ot.build_dataloader(data)
    with pytest.raises(
        UserError, match=r"micro_batch_size: the `data` of a recipe fills packs up to data\.pack_tokens"
    ):
        ot.build_dataloader(data, processor, micro_batch_size=2)
    assert loader_of(ROWS, 1, 2, global_batch_size=None).global_batch_size == 4
