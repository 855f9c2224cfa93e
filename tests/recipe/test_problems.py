"""Problems of a recipe name the key, also inside of lists and pairs."""

import pytest

from omnitrain.errors import UserError
from omnitrain.recipe import Recipe


def test_a_missing_entry_of_a_pair_is_told() -> None:
    with pytest.raises(UserError, match=r"train\.optimizer\.betas\.1: required, but missing; add `1`: a value"):
        Recipe.load("quickstart", ["train.optimizer.betas=[0.9]"])
