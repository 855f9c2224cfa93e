"""The quickstart's judges: fair to media they never saw, and to media that went through the tokenizers."""

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import JanusVQVAE

from omnitrain.models.decoders.mel_vq import MelVQ, log_mel

QUICKSTART = Path(__file__).parents[2] / "tasks" / "quickstart"
TRAIN, HELDOUT = QUICKSTART / "data" / "train.parquet", QUICKSTART / "data" / "heldout.parquet"

sys.path.insert(0, str(QUICKSTART))
import judges  # noqa: E402
from make_films import make_films  # noqa: E402


@pytest.fixture(scope="module")
def fitted() -> tuple[judges.ImageJudge, judges.SpeechJudge]:
    return judges.load_judges(TRAIN)


def share_right(predictions: list[str], labels: list[str]) -> float:
    return float(np.mean([prediction == label for prediction, label in zip(predictions, labels, strict=True)]))


def test_heldout_media_are_distinct_balanced_and_not_in_training():
    for kind, count in ("image", 200), ("speech", 200):
        media, labels = judges.media_of(HELDOUT, kind)
        seen = {np.asarray(medium).tobytes() for medium in judges.media_of(TRAIN, kind)[0]}
        assert len(media) == count and {labels.count(digit) for digit in "0123456789"} == {count // 10}
        assert not seen & {np.asarray(medium).tobytes() for medium in media}


def test_image_judge_reads_heldout_images(fitted):
    images, labels = judges.media_of(HELDOUT, "image")
    assert share_right(fitted[0].predict(images), labels) >= 0.97


def test_speech_judge_understands_heldout_voices(fitted):
    waveforms, labels = judges.media_of(HELDOUT, "speech")
    assert waveforms[0].dtype == np.float32
    assert share_right(fitted[1].predict(waveforms), labels) >= 0.97


def test_image_judge_takes_any_mode_and_size(fitted):
    images, _ = judges.media_of(HELDOUT, "image")
    large = [image.convert("RGB").resize((32, 32), Image.Resampling.NEAREST) for image in images]
    assert fitted[0].predict(large) == fitted[0].predict(images)


def test_speech_judge_ignores_loudness_and_silence_around_the_word(fitted):
    waveforms, labels = judges.media_of(HELDOUT, "speech")
    quiet = [np.pad(0.1 * waveform, (800, 1600)) for waveform in waveforms]
    assert share_right(fitted[1].predict(quiet), labels) >= 0.97


def test_silence_and_hardly_any_samples_are_judged_without_failing(fitted):
    nothing = [np.zeros(320, np.float32), np.ones(1, np.float32), np.zeros(0, np.float32)]
    assert len(fitted[1].predict(nothing)) == 3


def test_nothing_to_judge_is_an_empty_list(fitted):
    assert [judge.predict([]) for judge in fitted] == [[], []]


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"kind is .*, not 'film'"):
        judges.media_of(TRAIN, "film")


def test_speech_survives_the_mel_vq_tokenizer(fitted):
    waveforms, labels = (found[:50] for found in judges.media_of(HELDOUT, "speech"))  # five of each digit
    model = MelVQ.from_pretrained(QUICKSTART / "tokenizers" / "mel_vq")
    codes = [model.encode(log_mel(torch.from_numpy(waveform), model.config)) for waveform in waveforms]
    decoded = [model.decode(clip).numpy() for clip in codes]
    assert share_right(fitted[1].predict(decoded), labels) >= 0.96


def test_images_survive_the_image_vq_tokenizer(fitted):
    images, labels = judges.media_of(HELDOUT, "image")
    pixels = torch.stack([torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) for image in images])
    model = JanusVQVAE.from_pretrained(QUICKSTART / "tokenizers" / "image_vq")
    with torch.no_grad():
        codes = model.encode(pixels / 127.5 - 1).image_tokens.view(len(pixels), 16)
        values = ((model.decode(codes).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    decoded = [Image.fromarray(value.numpy()) for value in values.permute(0, 2, 3, 1)]
    assert share_right(fitted[0].predict(decoded), labels) >= 0.965


def test_video_judge_reads_films_of_heldout_images():
    films, labels = judges.media_of(TRAIN, "video")
    judge = judges.VideoJudge().fit(films[:1200], labels[:1200])
    heldout, truth = judges.media_of(HELDOUT, "video")
    assert len(films[0]) == 4 and {truth.count(label) for label in truth} == {5}
    assert share_right(judge.predict(heldout), truth) >= 0.9


def test_films_to_write_are_those_to_read(tmp_path):
    make_films(tmp_path)
    for split, read in (("train", TRAIN), ("heldout", HELDOUT)):
        written = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        expected = pq.read_table(read, filters=[("task", "==", "video_to_text")]).to_pylist()
        assert [row["videos"] for row in written] == [row["videos"] for row in expected]
        for row in written[:50]:
            question, answer = (message["content"] for message in row["messages"])
            assert all(word in question[0]["text"] for word in row["label"].split()) and answer[0]["type"] == "video"
