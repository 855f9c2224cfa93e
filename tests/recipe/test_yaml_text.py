import pytest

from omnitrain.errors import RecipeError
from omnitrain.recipe.yaml_text import dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 0.001), ("1E5", 1e5), ("-2e+3", -2e3), ("1.5e3", 1500.0), ("1e", "1e"), ("3", 3)]
)
def test_exponents_without_a_dot_are_floats(text: str, value: object) -> None:
    parsed = parse_yaml(text, "text")
    assert parsed == value
    assert type(parsed) is type(value)


def test_dumped_values_parse_to_themselves() -> None:
    value = {"float": 1e-8, "text": "1e-8", "number": "1", "end": "<|im_end|>\n", "list": [None, True, "null"], 3: "é"}
    assert parse_yaml(dump_yaml(value), "text") == value


def test_every_duplicate_key_is_reported_with_line_and_column() -> None:
    with pytest.raises(RecipeError) as error:
        parse_yaml("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n", "file.yaml")
    assert sorted(str(error.value).splitlines()) == [
        "file.yaml:4:3: key `c` was already given in line 3; remove one of them",
        "file.yaml:5:1: key `a` was already given in line 1; remove one of them",
    ]


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("a: [1,\nb: 2\n", "3:1"),
        ("a: 1\n b: 2\n", "2:3"),
        ("a:\n\tb: 1\n", "2:1"),
        ("a: 1\nb: \x00", "2:4"),
        ("a: *x", "1:4"),
    ],
)
def test_bad_syntax_names_file_line_and_column(text: str, position: str) -> None:
    with pytest.raises(RecipeError, match=rf"^file.yaml:{position}: not valid YAML: \w+"):
        parse_yaml(text, "file.yaml")


def test_anchors_do_not_share_and_do_not_contain_themselves() -> None:
    value = parse_yaml("a: &x {k: 1}\nb: *x\n", "text")
    value["a"]["k"] = 2
    assert value["b"]["k"] == 1
    with pytest.raises(RecipeError, match="1:4: this anchor contains itself"):
        parse_yaml("a: &x [*x]", "text")
