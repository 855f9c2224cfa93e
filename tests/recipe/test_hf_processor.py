from pathlib import Path

import pytest

from omnitrain.errors import RecipeError
from omnitrain.recipe import Recipe


def refusal(file: Path, processor: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        Recipe.load(file, [f"model.encoders.image_encoder.processor={processor}"])
    start = "  model.encoders.image_encoder.processor."
    return [line.removeprefix(start) for line in str(error.value).splitlines()[1:]]


def test_arguments_of_the_named_class_only(recipe_file: Path) -> None:
    named = "feature_extractor_type: WhisperFeatureExtractor"
    Recipe.load(recipe_file, [f"model.encoders.image_encoder.processor={{{named}, sampling_rate: 8000}}"])
    assert refusal(recipe_file, f"{{{named}, sampling_rat: 8000, image_mean: [0.5]}}")[0] == (
        "sampling_rat: unknown key, found 8000; did you mean `sampling_rate`?"
    )


def test_class_that_transformers_does_not_have(recipe_file: Path) -> None:
    assert refusal(recipe_file, "{image_processor_type: SiglipImageProcesor}") == [
        "image_processor_type: found 'SiglipImageProcesor'; expected a class of the installed transformers; change it"
    ]


def test_sizes_are_checked_too(recipe_file: Path) -> None:
    assert refusal(recipe_file, "{size: {heigth: 8, width: 8}}") == [
        "size.heigth: unknown key, found 8; did you mean `height`?"
    ]


def test_rates_lengths_and_sizes_must_be_positive(recipe_file: Path) -> None:
    wrong = "{sampling_rate: 0, hop_length: -1, padding_value: 0.0, size: {height: 0, width: 8}}"
    assert refusal(recipe_file, wrong) == [
        "sampling_rate: found 0; expected a number greater than 0; change it",
        "hop_length: found -1; expected a number greater than 0; change it",
        "size.height: found 0; expected a number greater than 0; change it",
    ]
