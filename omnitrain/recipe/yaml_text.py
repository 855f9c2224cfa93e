"""YAML of recipes: duplicate keys are errors, ``1e-3`` is a number, and errors have a line and a column."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from omnitrain.errors import RecipeError

# PyYAML follows YAML 1.1, which reads `1e-3` (no dot) as a string; YAML 1.2 reads a float.
_FLOAT_TAG = "tag:yaml.org,2002:float"
_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    """Quotes strings that look like ``1e-3``, so that they are read as strings again."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.add_implicit_resolver(_FLOAT_TAG, _FLOAT, list("-+0123456789"))
_Dumper.add_implicit_resolver(_FLOAT_TAG, _FLOAT, list("-+0123456789"))


def parse_yaml(text: str, origin: str) -> Any:
    """Parse one YAML document to plain values; RecipeError: what is wrong, at ``origin``, line and column."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        problems = list(_node_problems(root))
        if not problems:
            return _unshared(loader.construct_document(root))
    except yaml.YAMLError as error:
        raise RecipeError(f"{origin}{_describe(error, text)}") from None
    raise RecipeError(*(f"{origin}:{problem}" for problem in problems))


def dump_yaml(value: Any) -> str:
    """Return YAML that :func:`parse_yaml` reads back to an equal value; keys keep their order, tuples become lists."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def with_node(text: str, key: str, value: Any) -> str:
    """Return the YAML of a mapping with another ``value`` of a top-level key; all other lines stay as they are.

    Raises RecipeError: a line has more than the key's node, or another node refers to it.
    """
    lines, end_of_line = text.splitlines(keepends=True), "\r\n" if "\r\n" in text else "\n"
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += end_of_line
    root = _Loader(text).get_single_node()
    start, stop = len(lines), len(lines)
    for name, node in root.value:
        if name.value == key:
            start, end = name.start_mark.line, node.end_mark
            stop = max(end.line + (end.column > 0), start + 1)
            is_block = not getattr(node, "flow_style", False)  # its end is where the next node begins
            while is_block and stop > start + 1 and not lines[stop - 1].startswith((" ", "\t", "-")):
                stop -= 1
    found = "".join([*lines[:start], dump_yaml({key: value}).replace("\n", end_of_line), *lines[stop:]])
    try:
        is_exact = parse_yaml(found, "") == parse_yaml(text, "") | {key: value}
    except RecipeError:
        is_exact = False
    if not is_exact:
        raise RecipeError(f"cannot replace `{key}` in this file; expected `{key}:` on lines of its own, as block YAML")
    return found


def _node_problems(node: yaml.Node, parents: tuple[yaml.Node, ...] = ()) -> Iterator[str]:
    if any(node is parent for parent in parents):
        yield f"{_position(node.start_mark)}: this anchor contains itself; write the value out"
    elif isinstance(node, yaml.MappingNode):
        yield from _duplicate_keys(node)
        for _, child in node.value:
            yield from _node_problems(child, (*parents, node))
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _node_problems(child, (*parents, node))


def _duplicate_keys(node: yaml.MappingNode) -> Iterator[str]:
    first: dict[str, yaml.Node] = {}
    for key, _ in node.value:
        earlier = first.setdefault(str(key.value), key)
        if earlier is not key:
            line = earlier.start_mark.line + 1
            yield f"{_position(key.start_mark)}: key `{key.value}` was already given in line {line}; remove one of them"


def _position(mark: yaml.Mark) -> str:
    return f"{mark.line + 1}:{mark.column + 1}"


def _describe(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        return f":{_position(error.problem_mark)}: not valid YAML: {reason}"
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        column = error.position - (before.rfind("\n") + 1) + 1
        return f":{before.count(chr(10)) + 1}:{column}: not valid YAML: {error.reason}"
    return f": not valid YAML: {error}"


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_unshared(child) for child in value]
    return value
