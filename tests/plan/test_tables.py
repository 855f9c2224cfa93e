from collections.abc import Sequence
from dataclasses import fields
from itertools import islice

import numpy as np
import pytest

from omnitrain.plan import (
    ItemFacts,
    MicroBatchFacts,
    Placement,
    StepTables,
    Topology,
    decode_tables,
    encode_table,
    needed_capacity,
    padded,
    plan_step,
    shape_key,
)
from tests.plan.random_steps import random_facts, random_topology

TINY = Topology(1, (Placement("encoder", (0,), ("image",)),), ("text",))


@pytest.mark.parametrize("seed", range(10))
def test_the_tables_of_all_ranks_arrive_as_they_were_sent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = random_topology(rng)
    facts = random_facts(rng, topology)
    sent = [encode_table(topology, own) for own in facts]
    assert all(words.dtype == np.int64 and words[0] == len(words) for words in sent)
    gathered = np.stack([padded(words, needed_capacity(sent)) for words in sent])
    tables = decode_tables(topology, gathered)

    media = topology.media
    listed = [
        (rank, m * len(media) + p, item.num_tokens, item.cost, item.shape)
        for rank, own in enumerate(facts)
        for m, batch in enumerate(own)
        for p, medium in enumerate(media)
        for item in batch.items[medium]
    ]
    arrived = zip(tables.owner, tables.slot, tables.item_tokens, tables.cost, strict=True)
    assert list(arrived) == [item[:4] for item in listed]
    assert len({*zip(tables.shape.tolist(), (i[4] for i in listed), strict=True)}) == len({i[4] for i in listed})
    for rank, own in enumerate(facts):
        for m in range(len(tables.counts)):
            batch = own[m] if m < len(own) else MicroBatchFacts()
            assert tables.counts[m, :, rank].tolist() == [batch.counts.get(loss, 0) for loss in topology.losses]
            assert (tables.num_samples[m, rank], tables.tokens[m, rank]) == (len(batch.lengths), sum(batch.lengths))


def decoded_rank_by_rank(topology: Topology, gathered: Sequence[np.ndarray]) -> StepTables:
    """What :func:`decode_tables` returns, word by word, by the layout that the module of tables describes."""
    most, media = max(int(words[1]) for words in gathered), []
    counts = np.zeros((most, len(topology.losses), len(gathered)), dtype=np.int64)
    num_samples, tokens, squares = np.zeros((3, most, len(gathered)), dtype=np.int64)
    for rank, words in enumerate(gathered):
        rest = iter(words.tolist())
        _, batches, _, num_shapes, num_items = islice(rest, 5)
        num_samples[:batches, rank] = list(islice(rest, batches))
        for batch in range(batches):
            counts[batch, :, rank] = list(islice(rest, len(topology.losses)))
        for batch in range(batches):
            lengths = list(islice(rest, int(num_samples[batch, rank])))
            tokens[batch, rank], squares[batch, rank] = sum(lengths), sum(length**2 for length in lengths)
        shapes = list(islice(rest, num_shapes))
        items = (list(islice(rest, 5)) for _ in range(num_items))
        media += [(rank, *sizes, shapes[shape]) for *sizes, shape in items]
    owner, slot, item_tokens, cost, elements, key = np.array(media, dtype=np.int64).reshape(-1, 6).T
    keys = {found: index for index, found in enumerate(sorted({key for *_, key in media}))}
    shape = np.array([keys[found] for found in key.tolist()], dtype=np.int64)
    drawn = np.array([words[1] for words in gathered])
    of_items = (owner, slot, item_tokens, cost, elements, shape, key % 2 == 1)
    return StepTables(drawn, counts, num_samples, tokens, squares, *of_items)


@pytest.mark.parametrize("seed", range(20))
def test_tables_decoded_together_are_those_decoded_rank_by_rank(seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = random_topology(rng)
    sent = [encode_table(topology, own) for own in random_facts(rng, topology)]
    expected = decoded_rank_by_rank(topology, sent)
    for gathered in (sent, np.stack([padded(words, needed_capacity(sent) + seed) for words in sent])):
        tables = decode_tables(topology, gathered)
        for field in fields(StepTables):
            found, other = getattr(tables, field.name), getattr(expected, field.name)
            assert (found.dtype, found.shape) == (other.dtype, other.shape) and (found == other).all(), field.name
            assert found.dtype == (bool if field.name == "together" else np.int64)


@pytest.mark.parametrize("seed", range(10))
def test_a_data_group_calls_the_foundation_and_a_head_where_one_of_its_ranks_drew_something(seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = random_topology(rng)
    tables = decode_tables(topology, [encode_table(topology, own) for own in random_facts(rng, topology)])
    found = plan_step(topology, tables).calls_with_data
    drawn = {"forward": tables.num_samples, "head": tables.counts[:, topology.losses.index("drawing")]}
    for index, call_site in enumerate(topology.call_sites):
        if call_site.kind != "encode":
            for group in topology.data_groups:
                expected = drawn[call_site.kind][:, list(group)].any(axis=1)
                assert all((found[:, index, rank] == expected).all() for rank in group)


def test_a_table_that_does_not_fit_is_known_by_all_and_refused() -> None:
    words = encode_table(TINY, (MicroBatchFacts(lengths=(1,) * 20),))
    cut = padded(words, 10)
    assert needed_capacity([cut]) == len(words) == 5 + 1 + 1 + 20
    with pytest.raises(ValueError, match="rank 0: found 10 of 27 words; gather again"):
        decode_tables(TINY, [cut])


def test_an_item_takes_five_words() -> None:
    images = tuple(ItemFacts(num_tokens=3, cost=5, shape=1) for _ in range(1000))
    assert len(encode_table(TINY, (MicroBatchFacts(items={"image": images}),))) == 5000 + 5 + 1 + 1 + 1


def test_unknown_losses_and_ports_and_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"found \['imgae', 'txt'\]"):
        encode_table(TINY, (MicroBatchFacts(counts={"txt": 1}, items={"imgae": ()}),))
    with pytest.raises(ValueError, match="negative number, but one is -1"):
        encode_table(TINY, (MicroBatchFacts(items={"image": (ItemFacts(num_tokens=-1, cost=1),)}),))


def test_a_shape_key_is_the_same_in_every_process() -> None:
    assert shape_key(("pixel_values", "float32", (3, 14, 14))) == 3522278729401765491
    assert shape_key(("pixel_values", "float32", (3, 14, 16))) != 3522278729401765491


def test_a_topology_lists_all_of_its_contradictions() -> None:
    with pytest.raises(ValueError, match="ranks in exactly one") as refusal:
        Topology(
            world_size=4,
            components=(
                Placement("a", (0, 1), ("image",), place="local"),
                Placement("b", (0, 9), ("image",)),
                Placement("c", (0, 1, 2), num_replicas=2),
                Placement("d", (0, 1), ("sound",), place="group", head="sound"),
                Placement("e", (0,), ("film",), place="group"),
            ),
            losses=("text",),
            data_groups=((0, 1), (2, 2)),
        )
    lines = str(refusal.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "data groups ((0, 1), (2, 2))",
        *"abcdde",
        "media 'image' exists 2 times",
    ]
