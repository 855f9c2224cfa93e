from collections.abc import Iterator
from typing import Any

from omnitrain.recipe import json_schema


def fields(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, node in {"Recipe": schema, **schema["$defs"]}.items():
        for field, description in node["properties"].items():
            yield f"{name}.{field}", description


def test_every_node_and_field_has_a_description_and_no_node_takes_other_keys() -> None:
    schema = json_schema()
    assert [path for path, field in fields(schema) if not field.get("description")] == []
    assert [name for name, node in schema["$defs"].items() if node["additionalProperties"] is not False] == []
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["model", "data"]


def test_every_reference_resolves() -> None:
    schema = json_schema()

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from ([node["$ref"]] if "$ref" in node else [])
            node = list(node.values())
        if isinstance(node, list):
            for child in node:
                yield from references(child)

    assert {reference.removeprefix("#/$defs/") for reference in references(schema)} == set(schema["$defs"])


def test_a_source_may_be_a_string() -> None:
    options = json_schema()["$defs"]["Encoder"]["properties"]["tower"]["anyOf"]
    assert {"type": "string"} in options
