import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import omnitrain

MOST = 15
ONE = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.Assert,
    ast.IfExp,
    ast.match_case,
    ast.comprehension,
)


def branches(node: ast.AST) -> int:
    """Number of places where the code of a node, with all functions in it, can take two ways."""
    own = 1 if isinstance(node, ONE) else len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
    conditions = len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return own + conditions + sum(map(branches, ast.iter_child_nodes(node)))


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    """The outermost functions of a node, methods and lambdas included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
        else:
            yield from functions(child)


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("if a: b\nelif c: d\nelse: e", 2),
        ("for a in b: c\nelse: d", 1),
        ("while a and b and c: d", 3),
        ("try: a\nexcept B: c\nexcept D: e\nfinally: f", 2),
        ("assert a or b", 2),
        ("a if b else c", 1),
        ("[a for b in c if d if e for f in b]", 4),
        ("match a:\n case 1: b\n case _: c", 2),
        ("def inner():\n if a: b\nlambda: a and b", 2),
        ("with a: b = not c", 0),
    ],
)
def test_branches_are_counted(code: str, number: int) -> None:
    assert branches(ast.parse(code)) == number


def test_no_function_has_more_than_15_branches() -> None:
    root = Path(omnitrain.__file__).parent
    found = {
        f"{path.relative_to(root)}:{function.lineno}": branches(function)
        for path in root.rglob("*.py")
        for function in functions(ast.parse(path.read_text()))
    }
    assert len(found) > 1000
    assert {place: number for place, number in found.items() if number > MOST} == {}


GONE = {
    *("is_separate", "is_apart", "call_axes", "acts_as", "own_states", "calling_state_of", "planned_ranks"),
    *("encoder_relay", "StageRelay", "EncoderRelay", "SeparateEncoders", "SectionEncoders"),
}


def names(node: ast.AST) -> Iterator[str]:
    """All names that code defines, reads or calls."""
    for child in ast.walk(node):
        for field in ("id", "attr", "name", "arg"):
            if isinstance(found := getattr(child, field, None), str):
                yield found


def classes(code: str) -> set[str]:
    """The names of all classes that code defines, those in functions and classes included."""
    return {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef)}


def test_no_class_name_stands_in_two_files() -> None:
    assert classes("class A:\n class B: pass\ndef f():\n class _C: pass") == {"A", "B", "_C"}
    files: dict[str, list[str]] = {}
    root = Path(omnitrain.__file__).parent
    for path in root.rglob("*.py"):
        for name in classes(path.read_text()):
            files.setdefault(name, []).append(str(path.relative_to(root)))
    assert len(files) > 500
    assert {name: sorted(paths) for name, paths in files.items() if len(paths) > 1} == {}


def test_names_are_counted() -> None:
    assert {"is_apart", "a", "f", "acts_as"} <= {*names(ast.parse("def f(acts_as): return a.is_apart"))}


def test_what_a_placement_answers_has_no_other_name() -> None:
    found = {
        name for path in Path(omnitrain.__file__).parent.rglob("*.py") for name in names(ast.parse(path.read_text()))
    }
    assert len(found) > 5000 and found & GONE == set()
