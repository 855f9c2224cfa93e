import pytest

from omnitrain.errors import UserError
from omnitrain.recipe import Layout, parse_layout
from omnitrain.recipe.parallel import Section

LAYOUTS = {
    "dp1": Layout(),
    "dp4": Layout(dp_shard=4),
    "hsdp2x2": Layout(mode="hsdp", dp_replicate=2, dp_shard=2),
    "replicate2": Layout(mode="replicate", dp_replicate=2),
    "dp2.accum2.recompute": Layout(dp_shard=2, accumulation=2, recompute=True),
    "dp2.sp2": Layout(dp_shard=2, ulysses=2),
    "tp2.dp2": Layout(tp=2, dp_shard=2),
    "dp4.ep4": Layout(dp_shard=4, ep=4),
    "pp2.tp2.hsdp2x4.cp2.ep8.accum3.offload": Layout(
        pp=2, tp=2, mode="hsdp", dp_replicate=2, dp_shard=4, cp=2, ep=8, accumulation=3, offload=True
    ),
    "offload": Layout(offload=True),
    "vision1+dp2": Layout(dp_shard=2, sections=(("vision", Section(components=["image_encoder"], ranks=1)),)),
    "vision2.twice.window2.slots1+audio1.slots3.flight4+pp2.dp2.accum4": Layout(
        pp=2,
        dp_shard=2,
        accumulation=4,
        sections=(
            (
                "vision",
                Section(components=["image_encoder"], ranks=2, encode_twice=True, micro_batch=2, slots=1),
            ),
            ("audio", Section(components=["audio_encoder"], ranks=1, slots=3, in_flight=4)),
        ),
    ),
    "encoders1+dp1": Layout(sections=(("encoders", Section(components=["image_encoder", "audio_encoder"], ranks=1)),)),
    "my_tower12+tp2": Layout(tp=2, sections=(("my_tower", Section(components=["my_tower"], ranks=12)),)),
    "pp2.v2.dp2.ep2.paired": Layout(pp=2, chunks=2, dp_shard=2, ep=2, paired=True),
}


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_layout_reads_and_writes_as_the_same_text(text: str) -> None:
    assert parse_layout(text) == LAYOUTS[text]
    assert str(LAYOUTS[text]) == text


@pytest.mark.parametrize("field", ["dp_shard", "accumulation"])
@pytest.mark.parametrize("found", [0, "2", True])
def test_a_layout_has_whole_numbers_from_one(field: str, found: object) -> None:
    with pytest.raises(UserError, match=f"layout: {field} is {found!r}; expected a whole number from 1"):
        Layout(**{field: found})


def test_words_of_a_layout_may_stand_in_any_order_and_degrees_of_one_say_nothing() -> None:
    assert parse_layout("recompute.sp2.tp1.dp2") == parse_layout("dp2.sp2.recompute")
    assert parse_layout("accum1") == parse_layout("dp1") == Layout()


def test_experts_take_no_ranks_of_their_own() -> None:
    assert parse_layout("dp4.ep4").num_ranks == 4
    assert parse_layout("tp2.hsdp2x2.sp2.accum3").num_ranks == 16


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("dp", "dp"),
        ("dp0", "dp0"),
        ("hsdp2", "hsdp2"),
        ("dp2x2", "dp2x2"),
        ("dp2.zp3", "zp3"),
        ("", ""),
        ("dp2..sp2", ""),
    ],
)
def test_a_bad_word_is_named_with_the_valid_ones(text: str, word: str) -> None:
    with pytest.raises(UserError, match=rf"`{word}`: not understood") as refusal:
        parse_layout(text)
    assert all(valid in str(refusal.value) for valid in ("dp2", "hsdp2x2", "sp2", "accum2", "recompute"))


@pytest.mark.parametrize(
    "text", ["vision+dp2", "vision0+dp2", "vision1.dp2+dp2", "vision1.slots0+dp2", "1+dp2", "+dp2"]
)
def test_a_section_without_ranks_or_with_a_strange_word_is_named(text: str) -> None:
    with pytest.raises(UserError, match=r"not understood; a section looks like `vision1` or `vision1.twice.window2`"):
        parse_layout(text)


def test_sections_have_ranks_of_their_own_and_go_into_the_plan() -> None:
    layout = parse_layout("vision2+audio1+hsdp2x2.sp2")
    assert layout.num_ranks == 2 + 1 + 8
    plan = layout.plan()
    assert {name: (s.components, s.ranks) for name, s in plan.sections.items()} == {
        "vision": (["image_encoder"], 2),
        "audio": (["audio_encoder"], 1),
    }
    assert (plan.of("image_encoder").ulysses, plan.of("foundation").ulysses) == (None, 2)


def test_all_bad_words_are_told_at_once_with_the_nearest_valid_one() -> None:
    with pytest.raises(UserError) as refusal:
        parse_layout("dp2.recompte.acum2.dp4.replicate2")
    lines = str(refusal.value).splitlines()
    assert "`recompte`: not understood; did you mean a word like `recompute`?" in lines[1]
    assert "`acum2`: not understood; did you mean a word like `accum2`?" in lines[2]
    assert "`dp4`: dp_shard and mode set twice" in lines[3]
    assert "`replicate2`: mode set twice" in lines[4]


def test_a_layout_is_a_plan_for_all_components() -> None:
    plan = parse_layout("hsdp2x2.sp2.recompute.offload").plan().of("image_encoder")
    assert (plan.mode, plan.dp_replicate, plan.dp_shard, plan.ulysses) == ("hsdp", 2, 2, 2)
    assert (plan.memory.recompute, plan.memory.offload) == ("full", ["activations", "parameters", "optimizer"])
    replicated = parse_layout("replicate2.offload").plan().of("foundation")
    assert (replicated.memory.offload, replicated.memory.recompute) == (["activations", "optimizer"], None)
