import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnitrain.errors import RecipeError
from omnitrain.recipe import Recipe, save_recipe

NAMES_A_MODEL_TYPE = """
from transformers import AutoConfig, PreTrainedConfig

class TestPluginConfig(PreTrainedConfig):
    model_type = "test_plugin_model"
    hidden_size: int = 8

class OwnPrefixConfig(TestPluginConfig):
    model_type = "omnitrain_test_plugin_model"


AutoConfig.register("test_plugin_model", TestPluginConfig)
AutoConfig.register("omnitrain_test_plugin_model", OwnPrefixConfig)
"""
FOUNDATION = "foundation: {config: {model_type: test_plugin_model, hidden_size: 4}}"


@pytest.fixture(autouse=True)
def restored_search_path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def recipe(folder: Path, plugin: str, foundation: str = FOUNDATION) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(f"plugins: [{plugin}]\nmodel: {{{foundation}}}\ndata: {{train: [{{path: x}}]}}\n")
    return Recipe.load(str(file))


def test_a_model_type_that_a_plugin_registers_is_known_and_its_keys_are_checked(tmp_path: Path) -> None:
    plugin = tmp_path / "test_plugin_names_a_type.py"
    plugin.write_text(NAMES_A_MODEL_TYPE)
    loaded = recipe(tmp_path, str(plugin))
    save_recipe(loaded, tmp_path / "saved.yaml")
    assert Recipe.load(str(tmp_path / "saved.yaml")) == loaded
    with pytest.raises(RecipeError, match="did you mean `hidden_size`"):
        Recipe.load(str(tmp_path / "recipe.yaml"), ["model.foundation.config.hiden_size=3"])


def test_a_plugins_model_type_may_begin_as_ours_do(tmp_path: Path) -> None:
    foundation = FOUNDATION.replace("test_plugin_model", "omnitrain_test_plugin_model")
    assert recipe(tmp_path, "json", foundation).model.foundation is not None


def test_a_plugin_named_by_file_is_importable_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_plugin_by_name.py").touch()
    monkeypatch.chdir(tmp_path)
    recipe(tmp_path, "test_plugin_by_name.py", "foundation: some/model")
    assert sys.modules["test_plugin_by_name"].__file__ == str(tmp_path / "test_plugin_by_name.py")
    assert str(tmp_path) in sys.path


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("no.such.module", "ModuleNotFoundError: No module named 'no'"),
        ("missing.py", "FileNotFoundError: no file /"),
        ("json.py", "ImportError: a module 'json' exists already"),
        ("broken_plugin_of_a_test.py", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("json.py").touch()
    Path("broken_plugin_of_a_test.py").write_text("1 / 0")
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, plugin)
    assert any(
        line.startswith(f"  plugins.0: plugin {plugin!r} cannot be imported ({reason}")
        for line in str(caught.value).splitlines()
    )
