"""The tables of keys in docs/recipes.md. ``python -m tests.recipe.recipes_page`` writes them again."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from omnitrain.recipe.strict import Strict, descriptions
from omnitrain.recipe.tree import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
HEAD = "| key | type | default | meaning |\n|---|---|---|---|\n"
TABLE = re.compile(rf"^#+ (.*)\n((?:(?!#+ |\| key \|).*\n)*){re.escape(HEAD)}(?:\|.*\n)*", re.MULTILINE)
# Class -> its heading, where the heading is not the words of the class.
HEADINGS = {
    "ChatFormat": "Chat",
    "DataSource": "Data source",
    "EMA": "EMA",
    "EncodePlan": "Encode",
    "ExpertsBalance": "Experts",
    "ExpertsPlan": "Experts of a component",
    "HFSource": "Source",
    "Lora": "LoRA",
    "MemoryPlan": "Memory",
    "Ops": "Operations",
    "ParallelPlan": "Parallel",
    "TeacherSource": "Teacher",
}
BAR = "\\|"  # in a cell of a table
PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def nodes_of(annotation: Any) -> set[type[Strict]]:
    """The nodes that a value of this type has, at any depth."""
    if not (isinstance(annotation, type) and issubclass(annotation, Strict)):
        return {node for argument in get_args(annotation) for node in nodes_of(argument)}
    fields = annotation.model_fields.values()
    return {annotation}.union(*(nodes_of(field.annotation) for field in fields))


NODES = sorted(nodes_of(Recipe), key=lambda node: node.__name__)


def heading_of(node: type[Strict]) -> str:
    """The heading of a node's table."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", node.__name__).capitalize()
    return HEADINGS.get(node.__name__, words)


def words_of(annotation: Any) -> list[str]:
    """The alternatives of a type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return words_of(arguments[0])
    if origin is Literal:
        return [f"`{value}`" for value in arguments]
    if origin in (Union, types.UnionType):
        return [word for argument in arguments for word in words_of(argument)]
    if origin is tuple:
        return [f"{len(arguments)} {words_of(arguments[0])[0]}s"]
    if origin in (list, dict) and arguments[-1] is not Any:
        return [f"{'list of' if origin is list else 'mapping to'} {', '.join(words_of(arguments[-1]))}"]
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        heading = heading_of(annotation)
        return [f"[{heading.lower()}](#{heading.lower().replace(' ', '-')})"]
    return [PLAIN.get(annotation, "mapping")]


def default_of(field: FieldInfo) -> str:
    """The default of a key, as JSON."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Strict) and default == type(default)():
        return "its defaults"
    value = default.model_dump(exclude_defaults=True) if isinstance(default, Strict) else default
    return f"`{json.dumps(value)}`"


def table_of(node: type[Strict]) -> str:
    """A row for each key of a node: its type, its default, what it means."""
    rows = []
    for name, field in node.model_fields.items():
        short = [given for one in field.metadata if (given := getattr(one, "json_schema_input_type", None))]
        words = dict.fromkeys(words_of(next((one for one in short if one is not PydanticUndefined), field.annotation)))
        *most, last = words
        kinds = f"{', '.join(most)} or {last}" if most else last
        cells = (f"`{name}`", kinds, default_of(field), descriptions(node)[name])
        rows.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |\n")
    return HEAD + "".join(rows)


def with_tables(page: str) -> str:
    """The page with the tables of the code; each follows the heading of its node."""
    nodes = {heading_of(node): node for node in NODES}

    def written(found: re.Match[str]) -> str:
        node = nodes.get(found[1])
        return found[0] if node is None else f"{found[0][: found[0].index(HEAD)]}{table_of(node)}"

    return TABLE.sub(written, page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
