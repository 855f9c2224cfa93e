"""Decoders that write latents or films train and generate as one process, in any pack, batch and layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mode

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import SEEDS, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.clips import Clip
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import Token, to_tensors
from omnitrain.models.decoders.flow import waves
from omnitrain.models.omni.build import build_omni_model, require_trained_scales
from omnitrain.models.omni.generate import Answer, generate
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.draws import normals, uniforms
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe import Sampling
from omnitrain.recipe.component_configs import OmniConfig
from tests.covering import pairs
from tests.families import FAMILIES
from tests.models.decoders.continuous import (
    BOTH,
    DECODERS,
    DEFAULT,
    FLOW,
    POSSIBLE,
    TABLE,
    TABLE_OF_BOTH,
    Case,
    build,
    factory,
    samples,
    written,
)
from tests.parallel.laid_out import equals_one_sample_at_a_time, total
from tests.tiny import FOUNDATION, tiny_model, tiny_processor, tiny_row

PLAIN = {"image_decoder": Sampling(temperature=1.0)}  # of codes
GUIDED = {"image_decoder": Sampling(temperature=1.0, guidance=3.0)}
TOKENS = 11


def by_factory(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases of one model together: its run in one process is computed once."""

    def model(case: Case) -> tuple[str, bool]:
        return case.decoder, "ep" in case.layout

    return [list(together) for _, together in groupby(sorted(cases, key=model), key=model)]


def require_equal(ranks: RankPool, cases: list[Case]) -> None:
    layouts = [case.words for case in cases]
    of_model = samples(factory(cases[0])())
    report = verify(factory(cases[0]), of_model, layouts, nproc=ranks.nproc, timeout_s=120, pool=ranks)
    assert [row.status for row in report.rows] == ["equal"] * len(cases), str(report)


def test_the_table_has_every_possible_pair_and_the_default_rows_each_value() -> None:
    assert set().union(*map(pairs, TABLE)) == set().union(*map(pairs, POSSIBLE)) and len(TABLE) <= 40
    assert set().union(*map(enumerate, DEFAULT)) == set().union(*map(enumerate, POSSIBLE)) and len(DEFAULT) <= 9


SHORTEST, *OTHERS = sorted(by_factory(DEFAULT), key=len)


@pytest.mark.parametrize(
    "cases",
    [SHORTEST, *(pytest.param(cases, marks=pytest.mark.second) for cases in OTHERS)],
    ids=lambda cases: cases[0].words,
)
def test_each_value_of_the_table_trains_as_one_process(ranks: RankPool, cases: list[Case]) -> None:
    require_equal(ranks, cases)


@pytest.mark.slow
@pytest.mark.parametrize("cases", by_factory([case for case in TABLE if case not in DEFAULT]), ids=lambda c: c[0].words)
def test_every_pair_of_the_table_trains_as_one_process(ranks: RankPool, cases: list[Case]) -> None:
    require_equal(ranks, cases)


@pytest.mark.slow
@pytest.mark.parametrize("cases", by_factory(TABLE_OF_BOTH), ids=lambda cases: cases[0].words)
def test_codes_and_latents_of_one_modality_train_as_one_process(ranks: RankPool, cases: list[Case]) -> None:
    require_equal(ranks, cases)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS)
def test_mixed_precision_trains_within_its_rounding(ranks: RankPool, decoder: str) -> None:
    require_equal(ranks, [Case(decoder, layout, "", "") for layout in ("dp2.bf16", "sp2.bf16", "dp2.bf16_param")])


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_pack_of_codes_and_latents_is_one_sample_at_a_time(decoder: str) -> None:
    model = build(decoder)
    some = samples(model)
    assert "image_decoder.embedding.weight" in equals_one_sample_at_a_time(model, some)


def test_a_pack_of_three_sizes_two_encoders_codes_and_latents_is_one_sample_at_a_time() -> None:
    model = build(BOTH)
    some = samples(model)
    spans = [span for sample in some for span in sample.spans]
    assert {span.component for span in spans} == model.encoders.keys() | model.decoders.keys()
    assert len({span.item.num_tokens for span in spans if span.component == "image_codes"}) == 3
    found = equals_one_sample_at_a_time(model, some)
    assert {"image_codes.head.weight", "image_decoder.head.weight", "pixel_encoder.projector.layers.0.weight"} <= found


def prompted(decoder: str) -> tuple[OmniModel, OmniProcessor, list[Sample]]:
    """Prompts, some of which the model answers with an image or a film and then text, and some with text alone."""
    model = build(decoder)
    model.config.condition_dropout = True
    processor = tiny_processor(model)
    prompts = [processor.prompt(tiny_row(written(model), number), number, is_guided=True) for number in range(6)]
    drawn = [answer.tokens[0][1] for answer in generate(model, processor, prompts, max_new_tokens=1)]
    processor.start_tokens = dict.fromkeys(("image", "video"), mode(drawn)) | {"audio": 5}
    return model, processor, prompts


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    def modes(of: Sequence[Answer]) -> list[list[str]]:
        return [[one for one, _ in answer.tokens] for answer in of]

    def values(of: Sequence[Answer]) -> list[Token]:
        return [number for answer in of for _, token in answer.tokens for number in np.atleast_1d(token)]

    assert modes(answers) == modes(expected)
    np.testing.assert_allclose(values(answers), values(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("sampling", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_a_batch_writes_what_each_prompt_alone_writes_with_and_without_cache(
    decoder: str, sampling: dict[str, Sampling]
) -> None:
    model, processor, prompts = prompted(decoder)
    options = {"max_new_tokens": TOKENS, "sampling": sampling}
    together = generate(model, processor, prompts, **options)
    media = [part for answer in together for part in answer.parts if not isinstance(part, str)]
    shown = [b"".join(one.tobytes() for one in (part.frames if isinstance(part, Clip) else [part])) for part in media]
    assert len(set(shown)) == len(shown) >= 2 and {isinstance(part, Clip) for part in media} == {"film" in decoder}
    for number, prompt in enumerate(prompts):
        assert_same(generate(model, processor, [prompt], numbers=[number], **options), [together[number]])
    assert_same(generate(model, processor, prompts, use_cache=False, **options), together)


def answers_of(decoder: str, plan: dict[str, int]) -> list[list[Answer]]:
    """On a rank, without and with guidance; ranks that share sequences have all prompts."""
    model, processor, prompts = prompted(decoder)
    state = init_parallel_state(**plan)
    build_parallelize_model(model, parallel_state=state, enable_mixed_precision=False)
    own = range(len(prompts)) if plan else range(dist.get_rank(), len(prompts), dist.get_world_size())
    some = [prompts[number] for number in own]
    return [
        generate(model, processor, some, max_new_tokens=TOKENS, sampling=sampling, numbers=own)
        for sampling in (PLAIN, GUIDED)
    ]


@pytest.mark.parametrize(
    "decoder", [pytest.param(name, marks=[pytest.mark.slow] * (name == "film in context")) for name in DECODERS]
)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({}, id="dp2"),
        pytest.param({"pp_size": 2}, id="pp2"),
        pytest.param({"tp_size": 2}, id="tp2", marks=pytest.mark.slow),
        pytest.param({"cp_size": 2}, id="cp2", marks=pytest.mark.slow),
    ],
)
def test_ranks_write_what_one_process_writes(ranks: RankPool, decoder: str, plan: dict[str, int]) -> None:
    model, processor, prompts = prompted(decoder)
    made = ranks.run(answers_of, decoder, plan, timeout_s=120, world=2)
    for which, sampling in enumerate((PLAIN, GUIDED)):
        alone = generate(model, processor, prompts, max_new_tokens=TOKENS, sampling=sampling)
        for rank, of_rank in enumerate(made):
            assert_same(of_rank[which], alone if plan else alone[rank::2])


def test_guidance_moves_velocities_as_two_flows_by_hand() -> None:
    model = build("flow head").image_decoder
    hidden = torch.randn(4, 1, 32)  # two sequences with the condition, then without
    noise = torch.randn(2, 48)

    class ByHand:
        def guided(self, values: torch.Tensor) -> torch.Tensor:
            return values[2:] + 3.0 * (values[:2] - values[2:])

        def noise(self, width: int) -> torch.Tensor:
            return noise

    _, found = model.lm_embed(hidden, ByHand())
    expected = noise
    for step in range(4):
        time = torch.full((2, 1), step / 4)
        c, u = (model.velocity(expected, time, states) for states in hidden[:, 0].split(2))
        expected = expected + (u + 3.0 * (c - u)) / 4
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-6, atol=1e-6)


def test_patches_of_pixels_are_an_exact_inverse() -> None:
    model = build("flow head").image_decoder
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    features, num_tokens = model.adapter().prepare("image", picture)
    latents = model.codec.encode(to_tensors(features))
    assert num_tokens == 4 and latents.shape == (4, 48)
    assert np.array_equal(model.lm_generate(latents.tolist()), picture)


def test_noise_is_a_function_of_run_sample_and_token() -> None:
    model = build("flow head")

    def seeds(some: list[Sample]) -> list[int]:
        (group,) = Pack.from_samples(some).targets["image_decoder"].groups
        return group.features[SEEDS].tolist()

    first, *_, last = samples(model)
    assert sorted(seeds([first, last])) == sorted(seeds([first]) + seeds([last]))
    assert len({*seeds([first, last])}) == 8
    other = tiny_processor(model).sample(tiny_row("text_to_image", 0), index=7)
    assert set(seeds([other])).isdisjoint(seeds([first]))


def test_drawn_numbers_are_those_of_splitmix64_and_of_a_normal_distribution() -> None:
    def mixed(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    bits = [mixed((mixed(11) + place * 0x9E3779B97F4A7C15) % 2**64) for place in (1, 2, 3)]
    assert uniforms(torch.tensor([7, 11]), 3)[1].tolist() == [(one >> 11) * 2**-53 for one in bits]
    drawn = normals(torch.arange(4000), 16)
    assert torch.equal(drawn[5:6], normals(torch.tensor([5]), 16))
    assert drawn.mean().abs() < 0.01 and abs(drawn.std() - 1) < 0.01 and abs(drawn.pow(4).mean() - 3) < 0.1
    assert (torch.corrcoef(drawn.T) - torch.eye(16)).abs().max() < 0.07


def test_what_a_decoder_of_latents_cannot_write_is_said_in_words() -> None:
    with pytest.raises(
        UserError, match="a decoder of latents needs image_size, a multiple of 4 for PatchCodec; found 6"
    ):
        tiny_model(encoders={}, decoders={"image_decoder": FLOW | {"image_size": 6}})
    with pytest.raises(UserError, match="size '8x8': FlowDecoder writes one size alone; leave it out"):
        build("flow head").image_decoder.next_classes([], "8x8")


def test_tokens_of_an_image_see_each_other_and_nothing_later_as_by_a_mask_by_hand() -> None:
    model = build("in context").double()
    model.image_decoder.tokenizer.float()
    (sample,) = samples(model, 1)
    pack = Pack.from_samples([sample])
    encoded = model.encode_media(pack)
    ((positions, embeds),) = encoded.inserted
    rows = model.foundation.get_input_embeddings()(pack.input_ids).index_put((torch.tensor(0), positions), embeds)
    sees = torch.ones(pack.num_tokens, pack.num_tokens, dtype=torch.bool).tril()
    sees[positions[:, None], positions] = True
    mask = torch.zeros_like(sees, dtype=torch.float64).masked_fill(~sees, -torch.inf)[None, None]
    plain = build("in context").double().foundation  # its attention is that of transformers
    states = plain.model(inputs_embeds=rows, attention_mask=mask, use_cache=False).last_hidden_state
    expected = model.image_decoder.lm_head(states[0, positions], encoded.labels["image_decoder"])
    found = model(pack).losses["image_decoder"]
    torch.testing.assert_close(found.rows, expected.rows, rtol=1e-6, atol=1e-6)
    causal = plain.model(inputs_embeds=rows, use_cache=False).last_hidden_state
    other = model.image_decoder.lm_head(causal[0, positions], encoded.labels["image_decoder"])
    assert (other.rows - expected.rows).abs().max() > 1e-3


def test_noise_has_one_time_for_an_image_and_images_of_prompts_have_none() -> None:
    decoder = build("in context").image_decoder
    features, num_tokens = decoder.adapter().prepare("image", Image.new("RGB", (8, 8), "red"))
    clean = to_tensors(features)
    embeds, _ = decoder.lm_encode(clean, (num_tokens,))
    latents, ones = decoder.codec.encode(clean), torch.ones(num_tokens, 1)
    torch.testing.assert_close(embeds, decoder._embedded(latents[None], ones[None])[0])
    bare, known = embeds - decoder.embedding(latents) - decoder.time(waves(ones)), decoder.places.weight
    torch.testing.assert_close(bare[2], known[0] + known[1 + 1] + known[3 + 0])  # the only frame, row 1, column 0
    seeds = torch.arange(5, 5 + num_tokens)
    noised, labels = decoder.lm_encode(clean | {SEEDS: seeds}, (num_tokens,))
    time = torch.sigmoid(0.8 * normals(seeds[:1], 1, stream=1) - 0.8) * ones
    noise = normals(seeds, 48)
    by_hand = decoder._embedded((time * latents + (1 - time) * noise)[None], time[None])[0]
    torch.testing.assert_close(noised, by_hand)
    torch.testing.assert_close(labels, torch.cat([latents, 1 - time], dim=1))
    hidden = torch.randn(num_tokens, 32)
    velocity = (decoder.head(hidden) - time * latents - (1 - time) * noise) / (1 - time)
    expected = (velocity - (latents - noise)).square().mean(dim=1)
    torch.testing.assert_close(decoder.lm_head(hidden, labels).rows, expected)


def test_denoising_in_context_follows_the_guided_velocities_by_hand() -> None:
    decoder = build("in context").image_decoder
    steps = decoder.config.num_steps
    states = torch.randn(steps, 4, 4, 32)  # of two sequences with the condition, then without
    expected = noise = torch.randn(2, 4 * 48)

    class ByHand:
        state = None

        def guided(self, values: torch.Tensor) -> torch.Tensor:
            return values[2:] + 3.0 * (values[:2] - values[2:])

        def noise(self, width: int) -> torch.Tensor:
            return noise

    draw, expected = ByHand(), expected.unflatten(1, (4, 48))
    decoder.lm_embed(torch.empty(4, 1, 32), draw)
    for step in range(steps):
        _, found = decoder.lm_embed(states[step], draw)
        c, u = ((decoder.head(of) - expected) / (1 - step / steps) for of in states[step].split(2))
        expected = expected + (u + 3.0 * (c - u)) / steps
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_foundation_with_windows_trains_and_writes_blocks_as_each_sample_alone() -> None:
    windows = {"model_type": "gemma3_text", "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_model(foundation=FOUNDATION | windows, encoders={}, decoders={"image_decoder": DECODERS["in context"]})
    processor = tiny_processor(model)
    some = [processor.sample(tiny_row("text_to_image", number), number) for number in range(3)]
    together, *apart = (float(total(model(Pack.from_samples(pack))).detach()) for pack in (some, *([s] for s in some)))
    assert together == pytest.approx(sum(apart), rel=1e-5)
    prompts = [processor.prompt(tiny_row("text_to_image", number), number) for number in range(3)]
    drawn = [answer.tokens[0][1] for answer in generate(model, processor, prompts, max_new_tokens=1)]
    processor.start_tokens = {"image": mode(drawn)}
    answers = generate(model, processor, prompts, max_new_tokens=TOKENS)
    assert any(isinstance(part, Image.Image) for answer in answers for part in answer.parts)
    assert_same(generate(model, processor, prompts, max_new_tokens=TOKENS, use_cache=False), answers)


def test_a_foundation_that_cannot_look_ahead_is_refused() -> None:
    decoders = {"image_decoder": DECODERS["in context"]}
    model = build_omni_model(foundation=FAMILIES["qwen3_next"](), decoders=decoders)
    with pytest.raises(UserError, match=r"decoders.image_decoder: .* it has recurrent layers; set `flow.kind: head`"):
        assert model.runner


def test_a_vae_that_cannot_be_loaded_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> OmniModel:
        (tmp_path / "config.json").write_text(json.dumps({"_class_name": name}))
        decoder = {"tokenizer": str(tmp_path), "image_size": 8}
        return build_omni_model(foundation=FOUNDATION, decoders={"image_decoder": decoder})

    with pytest.raises(
        UserError, match=r"image_decoder: .* has the class AutoencoderDC of diffusers; expected an Autoenc"
    ):
        load("AutoencoderDC")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UserError, match=r"an AutoencoderKL needs diffusers .*pip install 'omnitrain\[vae\]'"):
        load("AutoencoderKL")


def test_latents_of_another_scale_than_a_decoder_was_trained_on_are_refused(tmp_path: Path) -> None:
    configs = {}
    for name, scale in (("trained", 0.18215), ("changed", 0.3611)):
        tokenizer = {"model_type": "omnitrain_vae", "vae": {"scaling_factor": scale, "shift_factor": 0.0}}
        configs[name] = OmniConfig(foundation=FOUNDATION, decoders={"image_decoder": {"tokenizer": tokenizer}})
        configs[name].save_pretrained(tmp_path / name)
    with pytest.raises(
        UserError, match=r"image_decoder: .*changed have .*0\.3611.* it was trained on .*0\.18215.*trained\); use these"
    ):
        build_omni_model(tmp_path / "changed", tmp_path / "trained")
    require_trained_scales(configs["trained"], "the same config", tmp_path / "trained")
