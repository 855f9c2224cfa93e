from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from omnitrain.data.sources.media import Waveform
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import ComponentAdapter, to_tensors
from omnitrain.models.decoders.tokens import TokenDecoder
from omnitrain.models.omni.build import build_omni_model
from tests.families import VQ
from tests.tiny import FOUNDATION, JANUS_VQ, MEL_VQ

IMAGE_TOKENIZERS = {
    "janus": JANUS_VQ,
    "emu3": {
        "model_type": "emu3_vqgan",
        "codebook_size": 16,
        "attn_resolutions": [],
        "hidden_size": 32,
        "num_attention_heads": 1,
        **VQ,
        "latent_channels": 4,
    },
    "chameleon": {"model_type": "chameleon_vqgan", "num_embeddings": 16, "resolution": 8, **VQ},
}
AUDIO_TOKENIZERS: dict[str, dict] = {
    "mel_vq": MEL_VQ,
    "mimi": {
        "model_type": "mimi",
        "sampling_rate": 8000,
        "hidden_size": 16,
        "num_filters": 4,
        "upsampling_ratios": [4, 2],
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "codebook_size": 16,
        "codebook_dim": 8,
        "num_quantizers": 3,
        "num_semantic_quantizers": 1,
        "vector_quantization_hidden_dimension": 8,
        "frame_rate": 500.0,
        "upsample_groups": 16,
    },
    "dac": {
        "model_type": "dac",
        "encoder_hidden_size": 8,
        "downsampling_ratios": [2, 4],
        "decoder_hidden_size": 32,
        "upsampling_ratios": [4, 2],
        "n_codebooks": 3,
        "codebook_size": 16,
        "codebook_dim": 4,
        "hidden_size": 32,
        "sampling_rate": 8000,
    },
    "encodec": {
        "model_type": "encodec",
        "sampling_rate": 8000,
        "num_filters": 4,
        "upsampling_ratios": [4, 2],
        "hidden_size": 16,
        "codebook_size": 16,
        "codebook_dim": 16,
        "num_lstm_layers": 1,
        "target_bandwidths": [12.0],
        "normalize": False,
    },
}


def decoder(tokenizer: dict, **settings: object) -> TokenDecoder:
    torch.manual_seed(0)
    spec = {"tokenizer": {"config": tokenizer}, **settings}
    return build_omni_model(foundation=FOUNDATION, decoders={"decoder": spec}).decoders["decoder"]


def sound(seconds: float) -> Waveform:
    return Waveform(np.random.default_rng(0).normal(scale=0.1, size=int(8000 * seconds)).astype(np.float32), 8000)


@pytest.mark.parametrize("name", IMAGE_TOKENIZERS)
def test_any_vq_model_writes_images(name: str) -> None:
    model = decoder(IMAGE_TOKENIZERS[name], image_size=8)
    pictures = [Image.fromarray(np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)) for i in (0, 1)]
    prepared = [model.adapter().prepare("image", picture) for picture in pictures]
    features = {"pixel_values": np.concatenate([f["pixel_values"] for f, _ in prepared])}
    embeds, labels = model.lm_encode(to_tensors(features), (16, 16))
    assert embeds.shape == (32, 32) and labels.shape == (32,) and [n for _, n in prepared] == [16, 16]
    alone = torch.cat([model.lm_encode(to_tensors(f), (n,))[1] for f, n in prepared])
    assert torch.equal(labels, alone)
    assert not model.is_complete([0] * 15) and model.is_complete([0] * 16)
    if name == "chameleon":
        with pytest.raises(UserError, match="ChameleonVQVAE has no `decode`"):
            model.lm_generate(labels[:16].tolist())
    else:
        assert model.lm_generate(labels[:16].tolist()).size == (8, 8)


@pytest.mark.parametrize("name", AUDIO_TOKENIZERS)
def test_any_audio_tokenizer_writes_sound(name: str) -> None:
    model = decoder(AUDIO_TOKENIZERS[name], num_codebooks=1 if name == "mel_vq" else 2)
    clips = [sound(0.1), sound(0.23)]
    prepared = [model.adapter().prepare("audio", clip) for clip in clips]
    features = {k: np.concatenate([f[k] for f, _ in prepared]) for k in prepared[0][0]}
    counts = tuple(n for _, n in prepared)
    _, labels = model.lm_encode(to_tensors(features), counts)
    end = model.codec.num_codes
    assert (labels == end).nonzero().flatten().tolist() == [counts[0] - 1, sum(counts) - 1]
    alone = torch.cat([model.lm_encode(to_tensors(f), (n,))[1] for f, n in prepared])
    assert torch.equal(labels, alone)
    codes = labels[: counts[0]].tolist()
    assert model.is_complete(codes) and not model.is_complete(codes[:-1])
    made = model.lm_generate(codes)
    assert made.rate == 8000 and abs(len(made.samples) - 800) <= 400 and np.isfinite(made.samples).all()


class ShadesConfig(PreTrainedConfig):
    model_type = "shades_of_the_tests"
    num_codes: int = 4


class ShadesAdapter(ComponentAdapter):
    modalities = ("image",)

    def prepare(self, modality: str, media: Image.Image) -> tuple[dict[str, np.ndarray], int]:
        return {"shades": np.asarray(media.convert("L").resize((2, 1)), dtype=np.float32)}, 2


class Shades(PreTrainedModel):
    """A media tokenizer of a user's own: an image is two shades of grey."""

    config_class = ShadesConfig
    modality = "image"

    def __init__(self, config: ShadesConfig) -> None:
        super().__init__(config)
        self.num_codes = config.num_codes
        self.levels = torch.nn.Parameter(torch.linspace(0, 255, config.num_codes))
        self.post_init()

    def length(self, codes: Sequence[int]) -> int:
        return 2

    def adapter(self) -> ComponentAdapter:
        return ShadesAdapter()

    def encode(self, features: dict[str, torch.Tensor], num_tokens: tuple[int, ...]) -> torch.Tensor:
        return (features["shades"].flatten()[:, None] - self.levels).abs().argmin(1)

    def decode(self, codes: torch.Tensor) -> Image.Image:
        return Image.fromarray(self.levels[codes][None].byte().numpy())

    def minimal_input(self) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:
        return {"shades": torch.zeros(1, 2)}, (2,)


AutoConfig.register("shades_of_the_tests", ShadesConfig)
AutoModel.register(ShadesConfig, Shades)


def test_a_tokenizer_of_ones_own_writes_images_ready_or_from_its_config() -> None:
    picture = Image.fromarray(np.array([[0, 255]], dtype=np.uint8))
    for tokenizer in (Shades(ShadesConfig(num_codes=3)), {"config": {"model_type": "shades_of_the_tests"}}):
        model = build_omni_model(foundation=FOUNDATION, decoders={"own": {"tokenizer": tokenizer}}).decoders["own"]
        labels = model.lm_encode(to_tensors(model.adapter().prepare("image", picture)[0]), (2,))[1].tolist()
        assert labels == [0, model.tokenizer.num_codes - 1] and model.head.out_features == model.tokenizer.num_codes
        assert np.array_equal(model.lm_generate(labels), picture)


def test_what_is_no_media_tokenizer_says_what_one_must_offer() -> None:
    class Bare(PreTrainedModel):
        config_class = ShadesConfig

        def encode(self, pixel_values: torch.Tensor) -> None: ...

    with pytest.raises(UserError, match=r"decoders\.own: Bare .* no channel_multiplier, .*\.MediaTokenizer$"):
        build_omni_model(foundation=FOUNDATION, decoders={"own": {"tokenizer": Bare(ShadesConfig())}})
    with pytest.raises(UserError, match=r"decoders\.own: found Bare, expected a dict with `tokenizer`"):
        build_omni_model(foundation=FOUNDATION, decoders={"own": Bare(ShadesConfig())})
    with pytest.raises(UserError, match=r"encoders\.own\.projecter: unknown key, found 1; did you mean `projector`\?"):
        build_omni_model(foundation=FOUNDATION, encoders={"own": {"tower": "x", "projecter": 1}})


def test_the_media_tokenizer_never_trains() -> None:
    model = decoder(JANUS_VQ, image_size=8).train()
    assert not model.tokenizer.training and model.training
    assert not any(p.requires_grad for p in model.tokenizer.parameters())
    assert all(p.requires_grad for p in (model.embedding.weight, model.head.weight))


@pytest.mark.parametrize(("tokenizer", "size"), [(JANUS_VQ, 8), (MEL_VQ, None)])
def test_a_decoder_takes_part_without_data(tokenizer: dict, size: int | None) -> None:
    model = decoder(tokenizer, image_size=size)
    embeds, labels = model.lm_encode(*model.minimal_input())
    (embeds.sum() + model.lm_head(embeds.detach(), labels).sum).backward()
    assert model.embedding.weight.grad is not None and model.head.weight.grad is not None


def test_settings_that_do_not_fit_name_the_decoder_and_the_allowed_values() -> None:
    with pytest.raises(UserError, match=r"model\.decoders\.decoder: .*multiple of 2"):
        decoder(JANUS_VQ, image_size=7)
    with pytest.raises(UserError, match=r"model\.decoders\.decoder: .*image_size"):
        decoder(IMAGE_TOKENIZERS["emu3"])
    with pytest.raises(UserError, match="no media tokenizer"):
        decoder(
            {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
        )


@pytest.mark.parametrize("name", AUDIO_TOKENIZERS)
def test_sounds_of_another_rate_are_resampled_to_that_of_the_codec(name: str) -> None:
    adapter = decoder(AUDIO_TOKENIZERS[name]).adapter()
    tones = [
        Waveform(np.sin(np.arange(rate // 2) * 880 / rate).astype(np.float32), rate) for rate in (8000, 16000, 44100)
    ]
    (wanted, count), *others = [adapter.prepare("audio", tone) for tone in tones]
    (expected,) = wanted.values()
    for features, found in others:
        (values,) = features.values()
        assert found == count and values.shape == expected.shape
        np.testing.assert_allclose(values[5:-5], expected[5:-5], atol=0.1)
