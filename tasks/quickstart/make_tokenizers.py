"""Make the quickstart's frozen tokenizers from the training split: `tokenizers/text`, `mel_vq` and `image_vq`.

    python tasks/quickstart/make_tokenizers.py      # about two minutes on one core

text      byte-level BPE, a Hugging Face tokenizer
mel_vq    omnitrain's MelVQ: k-means over log-mel frames, 40 ms a code
image_vq  transformers' JanusVQVAE: an 8x8 image is 4x4 codes

Seeds are fixed. The script prints how much the held-out split loses in each tokenizer: the accuracy of the judges on
decoded and on real media, and how evenly the codes are used.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from sklearn.cluster import KMeans
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import JanusVQVAE, PreTrainedTokenizerFast
from transformers.models.janus.configuration_janus import JanusVQVAEConfig

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from judges import ImageJudge, SpeechJudge, media_of  # noqa: E402

from omnitrain.models.decoders.mel_vq import MelVQ, MelVQConfig, log_mel  # noqa: E402

TRAIN, HELDOUT = HERE / "data" / "train.parquet", HERE / "data" / "heldout.parquet"
SEED = 0

TEXT_VOCABULARY = 384
PAD, END = "<|pad|>", "<|end|>"
OTHER_SPECIALS = ("<|system|>", "<|user|>", "<|assistant|>", "<|image|>", "<|audio|>", "<|video|>")

IMAGE_CONFIG = JanusVQVAEConfig(
    embed_dim=8,
    num_embeddings=32,
    latent_channels=16,
    base_channels=32,
    channel_multiplier=[1, 1],
    num_res_blocks=1,
    num_patches=4,
)
STEPS = 1500
BATCH = 64
LEARNING_RATE = 2e-3
SHARPNESS = 10.0  # of the softmax over directions
NAMING = 0.1  # weight of the naming loss relative to the painting loss


# ------------------------------------------------------------------------------------------------------------ text


def make_text_tokenizer(parquet: Path) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the texts of all messages. A digit is always a separate token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_VOCABULARY,
        special_tokens=[PAD, END, *OTHER_SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts_of(parquet), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(OTHER_SPECIALS),
        clean_up_tokenization_spaces=False,
    )


def texts_of(parquet: Path) -> list[str]:
    """Return the texts of all messages, in order."""
    conversations = pq.read_table(parquet, columns=["messages"])["messages"].to_pylist()
    parts = [part for messages in conversations for message in messages for part in message["content"]]
    return [part["text"] for part in parts if part["text"] is not None]


# ---------------------------------------------------------------------------------------------------------- speech


def make_mel_vq(waveforms: Sequence[np.ndarray]) -> MelVQ:
    """Return a MelVQ whose codebook is the k-means of the clips' frames; clips are float32 [samples]."""
    model = MelVQ(MelVQConfig())
    frames = torch.cat([log_mel(torch.from_numpy(waveform), model.config) for waveform in waveforms])
    vectors = frames.view(-1, model.codebook.size(1)).numpy()
    kmeans = KMeans(model.config.codebook_size, n_init=1, random_state=SEED).fit(vectors)
    model.codebook.copy_(torch.from_numpy(kmeans.cluster_centers_))
    return model


def speech_report(model: MelVQ, judge: SpeechJudge, waveforms: Sequence[np.ndarray], labels: Sequence[str]) -> str:
    """Report the accuracy of the judge before and after, and the use of the codes."""
    codes = [model.encode(log_mel(torch.from_numpy(waveform), model.config)) for waveform in waveforms]
    decoded = [model.decode(clip).numpy() for clip in codes]
    return (
        f"judge {accuracy(judge.predict(waveforms), labels)} on real, {accuracy(judge.predict(decoded), labels)} on "
        f"decoded; {len(torch.cat(codes)) / len(codes):.1f} codes a clip; "
        f"{use_of_codes(torch.cat(codes), model.config.codebook_size)}"
    )


# ---------------------------------------------------------------------------------------------------------- images


def make_image_vq(images: Sequence[Image.Image]) -> JanusVQVAE:
    """Return a JanusVQVAE in which each code describes the 2x2 pixels at its position.

    The encoder sees the whole image, so codes trained only for reconstruction depend on all of it, and a small language
    model needs very long to learn how they relate. So the codes are supervised: the encoder learns to predict the
    k-means cluster of the pixels under each code, and the decoder learns to paint images from the clusters.
    """
    torch.manual_seed(SEED)
    model = JanusVQVAE(IMAGE_CONFIG).train()
    model.quantize.embedding.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS, pct_start=0.05)
    pixels = pixels_of(images)
    clusters = KMeans(IMAGE_CONFIG.num_embeddings, n_init=1, random_state=SEED).fit(
        patches(pixels).flatten(0, 1).numpy()
    )
    centres = torch.from_numpy(clusters.cluster_centers_)
    for _ in range(STEPS):
        batch = shifted(pixels[torch.randint(len(pixels), (BATCH,))])
        loss = image_loss(model, batch, torch.cdist(patches(batch), centres[None]).argmin(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        model.quantize.embedding.weight.copy_(unit_vectors(model))
    return model.eval()


def image_loss(model: JanusVQVAE, pixels: torch.Tensor, clusters: torch.Tensor) -> torch.Tensor:
    """Cross entropy of naming `clusters` [batch, 16] and squared error of painting `pixels` [batch, 3, 8, 8] from them.

    `encode` compares raw latents with raw vectors, `decode` normalises the vectors. With unit vectors the first is the
    nearest direction and the second changes nothing, so training on directions is exact.
    """
    vectors = unit_vectors(model)
    latents = F.normalize(model.quant_conv(model.encoder(pixels)), dim=1).flatten(2).transpose(1, 2)
    naming = F.cross_entropy((SHARPNESS * latents @ vectors.t()).flatten(0, 1), clusters.flatten())
    side = IMAGE_CONFIG.num_patches
    chosen = vectors[clusters].view(-1, side, side, IMAGE_CONFIG.embed_dim).permute(0, 3, 1, 2)
    return F.mse_loss(model.decoder(model.post_quant_conv(chosen)), pixels) + NAMING * naming


def unit_vectors(model: JanusVQVAE) -> torch.Tensor:
    """Return the codebook as directions [num_codes, embed_dim]."""
    return F.normalize(model.quantize.embedding.weight, dim=1)


def patches(pixels: torch.Tensor) -> torch.Tensor:
    """The 2x2 pixels under each code: grey [batch, 3, 8, 8] -> [batch, 16, 4]."""
    side = IMAGE_CONFIG.num_patches
    size = pixels.size(-1) // side
    blocks = pixels[:, 0].unflatten(2, (side, size)).unflatten(1, (side, size))
    return blocks.transpose(2, 3).reshape(len(pixels), side * side, size * size)


def shifted(pixels: torch.Tensor) -> torch.Tensor:
    """Shift half of the batches [batch, channels, height, width] by up to one pixel each way, padded with black."""
    down, right = torch.randint(3, (2,)).tolist() if torch.rand(()) < 0.5 else (1, 1)
    height, width = pixels.shape[2:]
    return F.pad(pixels, (1, 1, 1, 1), value=-1.0)[:, :, down : down + height, right : right + width]


def pixels_of(images: Sequence[Image.Image]) -> torch.Tensor:
    """Convert images to float32 [num_images, 3, height, width] in [-1, 1]."""
    arrays = np.stack([np.asarray(image.convert("RGB"), np.float32) for image in images])
    return torch.from_numpy(arrays).permute(0, 3, 1, 2).contiguous() / 127.5 - 1


def images_from(pixels: torch.Tensor) -> list[Image.Image]:
    """Invert `pixels_of`; values beyond [-1, 1] are clamped."""
    values = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return [Image.fromarray(image.numpy()) for image in values.permute(0, 2, 3, 1)]


@torch.no_grad()
def image_report(model: JanusVQVAE, judge: ImageJudge, images: Sequence[Image.Image], labels: Sequence[str]) -> str:
    """Report the accuracy of the judge before and after, the error, and the use of the codes."""
    pixels = pixels_of(images)
    codes = model.encode(pixels).image_tokens.view(len(pixels), -1)
    decoded = images_from(model.decode(codes))
    error = (pixels_of(decoded) - pixels).square().mean().item()
    return (
        f"judge {accuracy(judge.predict(images), labels)} on real, {accuracy(judge.predict(decoded), labels)} on "
        f"decoded; PSNR {10 * np.log10(4 / error):.1f} dB; {codes.size(1)} codes an image; "
        f"{use_of_codes(codes.flatten(), model.config.num_embeddings)}"
    )


# --------------------------------------------------------------------------------------------------------- reports


def accuracy(predictions: Sequence[str], labels: Sequence[str]) -> str:
    """Return the share of correct predictions, as "98.5%"."""
    return f"{np.mean([prediction == label for prediction, label in zip(predictions, labels, strict=True)]):.1%}"


def use_of_codes(codes: torch.Tensor, num_codes: int) -> str:
    """Report how many of `num_codes` occur in `codes` [n], and exp(entropy) of their shares."""
    shares = torch.bincount(codes, minlength=num_codes) / len(codes)
    perplexity = torch.special.entr(shares).sum().exp().item()
    return f"{int((shares > 0).sum())} of {num_codes} codes used, perplexity {perplexity:.0f}"


def size_of(folder: Path) -> str:
    """Return the size of all files in `folder`, as "1.2 kB"."""
    return f"{sum(file.stat().st_size for file in folder.iterdir()) / 1e3:.1f} kB"


def main() -> None:
    """Make and save the three tokenizers, then load and measure them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE / "tokenizers", help="where the three folders go")
    folder = parser.parse_args().folder
    speech, images = media_of(TRAIN, "speech"), media_of(TRAIN, "image")

    text = make_text_tokenizer(TRAIN)
    text.save_pretrained(folder / "text")
    longest = max(len(text(sentence).input_ids) for sentence in set(texts_of(HELDOUT)))
    print(f"text ({size_of(folder / 'text')}): {len(text)} tokens; the longest held-out text has {longest}")

    make_mel_vq(speech[0]).save_pretrained(folder / "mel_vq")
    mel_vq = MelVQ.from_pretrained(folder / "mel_vq")
    report = speech_report(mel_vq, SpeechJudge().fit(*speech), *media_of(HELDOUT, "speech"))
    print(f"mel_vq ({size_of(folder / 'mel_vq')}): {report}")

    make_image_vq(images[0]).save_pretrained(folder / "image_vq")
    image_vq = JanusVQVAE.from_pretrained(folder / "image_vq")
    report = image_report(image_vq, ImageJudge().fit(*images), *media_of(HELDOUT, "image"))
    print(f"image_vq ({size_of(folder / 'image_vq')}): {report}")


if __name__ == "__main__":
    main()
