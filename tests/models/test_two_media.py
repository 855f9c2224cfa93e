"""Two media in one sample, as transformers' processors return them: the loss of plain transformers, or refused.

All families: ``pytest -m slow tests/models/test_two_media.py``; ``-k`` picks some.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking
from omnitrain.models.discovery import native_inputs
from omnitrain.models.hf.samples import to_samples
from tests.families import AUDIO_FAMILIES, VISION_FAMILIES
from tests.models.every_family import every_family
from tests.models.two_media import SIZES, TOLERANCE, Tried, modalities_of, samples_of, tried

FOUND: Counter[str] = Counter()


def require_exact(found: Tried) -> None:
    assert found.error <= TOLERANCE < found.effect or found.refusal, found


@pytest.mark.parametrize("kind", [pytest.param("equal sizes", marks=pytest.mark.slow), "sizes of their own"])
def test_two_images_of_a_sample_have_the_loss_of_plain_transformers_which_cuts_only_single_ones_into_tiles(
    kind: str,
) -> None:
    """``batch_num_images`` says that the images are two: without it, the tower would look for the tiles of each."""
    found = tried("llava_onevision", "image", kind)
    assert not found.refusal and found.error <= TOLERANCE < found.effect
    _, native, samples = samples_of("llava_onevision", "image", kind)
    assert [sample["batch_num_images"].tolist() for sample in samples] == [[1], [2]]
    packed = Pack.from_samples(to_samples(native, samples))
    collated = OmniDataCollatorWithPacking(native_inputs(native))(samples)
    media, others = (pack.inputs["foundation.image"].groups for pack in (packed, collated))
    assert [group.features["batch_num_images"].tolist() for group in media] == [[1], [2]]
    for one, other in zip(media, others, strict=True):
        assert one.features.keys() == other.features.keys()
        assert all(torch.equal(value, other.features[name]) for name, value in one.features.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", every_family())
def test_two_media_of_a_sample_are_exact_or_refused(family: str) -> None:
    for modality in modalities_of(family):
        for kind in ("probe", *(SIZES if modality == "image" else ())):
            found = tried(family, modality, kind)
            FOUND["untried" if found.untried else "refused" if found.refusal else "exact"] += 1
            require_exact(found)
            assert not found.untried or kind != "probe" or family not in VISION_FAMILIES | AUDIO_FAMILIES, found


@pytest.mark.slow
def test_most_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts the tests above; alone it fails."""
    with capsys.disabled():
        print(f"\ntwo media in a sample: {dict(FOUND)}")
    assert FOUND["exact"] > 100
