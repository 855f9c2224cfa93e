"""What README.md and docs/*.md tell people to type is true: verbs, recipes, files, overrides, make targets, links."""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import typer.main

from omnitrain.cli.main import app, names_a_model
from omnitrain.recipe import Recipe, find_recipe

ROOT = Path(__file__).parents[1]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))) if page.is_file()]
BASH = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RECIPE_VERBS = ("show", "cp", "check", "plan", "run", "verify", "profile")


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of each command in a page's bash blocks; comments and prompts are left out."""
    for block in BASH.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # VARIABLE=value before a command
                words = words[1:]
            if words:
                yield words


def commands(program: str) -> list[Any]:
    found = [(page, words) for page in PAGES for words in command_lines(page) if Path(words[0]).name == program]
    return [pytest.param(words[1:], id=f"{page.name}: {shlex.join(words)}") for page, words in found]


@pytest.mark.parametrize("words", commands("omnitrain"))
def test_omnitrain_command_parses_and_its_recipe_and_overrides_resolve(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    group = typer.main.get_command(app)
    if words[0].startswith("--"):
        assert words[0] in ("--help", "--version")
        return
    verb = group.commands[words[0]]
    arguments = verb.make_context(words[0], words[1:]).params if words[1:] != ["--help"] else {}
    name = next((arguments[key] for key in ("recipe", "model_or_recipe", "name") if arguments.get(key)), None)
    is_folder = words[0] == "run" and "runs/" in str(name)  # the folder of a run that an earlier command would write
    if words[0] in RECIPE_VERBS and name is not None and not is_folder and not names_a_model(name):
        Recipe.load(find_recipe(copied_recipes().get(name, name)), arguments.get("overrides"))


def copied_recipes() -> dict[str, str]:
    lines = [words for page in PAGES for words in command_lines(page) if words[:2] == ["omnitrain", "cp"]]
    return {words[3]: words[2] for words in lines if len(words) > 3}


@pytest.mark.parametrize("words", commands("make"))
def test_make_command_is_a_target(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in words if "=" not in word} <= targets


@pytest.mark.parametrize("words", commands("python"))
def test_python_command_names_a_file_that_exists(words: list[str]) -> None:
    scripts = [word for word in words[:1] if word.endswith(".py")]
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


WORDS = ("gradient checkpointing", "gradient accumulation", "mixed precision", "fine-tuning", "out of memory")
WORDS += ("tool calls", "MFU", "vLLM", "early stopping", "callbacks")


def index_of_words() -> list[tuple[str, str]]:
    """Each word of docs/index.md, and the link beside it."""
    rows = re.findall(r"^\| (.+) \| \[[^\]]+\]\((\S+)\) \|$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    return [(word, link) for words, link in rows for word in words.split(", ")]


def section_of(page: Path, anchor: str) -> str:
    """The heading of an anchor and the text below it, to the next heading of its level; a whole page without one."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    if not anchor:
        return text
    for found in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE):
        if re.sub(r"[^\w -]", "", found[2].lower()).replace(" ", "-") == anchor:
            end = re.compile(rf"^#{{1,{len(found[1])}}} ", re.MULTILINE).search(text, found.end())
            return text[found.start() : end.start() if end else None]
    raise AssertionError(f"{page}: no heading {anchor!r}")


@pytest.mark.parametrize(("word", "link"), index_of_words())
def test_a_word_that_users_search_for_leads_to_a_section_that_says_it(word: str, link: str) -> None:
    page, _, anchor = link.partition("#")
    assert word.lower() in " ".join(section_of(ROOT / "docs" / page, anchor).lower().split())


def test_the_index_leads_to_every_page() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"({page}" not in text} == set()


def test_the_site_has_every_page_in_its_menu() -> None:
    menu = set(re.findall(r"[\w-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - menu == set()


def test_the_words_of_other_libraries_are_in_the_index() -> None:
    assert set(WORDS) <= {word for word, _ in index_of_words()} and "docs/index.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_sections_of_pages_resolve(page: Path) -> None:
    links = [link.partition("#") for link in LINK.findall(page.read_text()) if "://" not in link and "#" in link]
    assert all(section_of(page.parent / name if name else page, anchor) for name, _, anchor in links if anchor)


def test_the_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = {name for name in re.findall(r"`([\w./-]+(?:\.py|/))`", page) if "/" in name}
    assert len(named) > 50
    assert [
        name for name in sorted(named) if not any((base / name).exists() for base in (ROOT, ROOT / "omnitrain"))
    ] == []


def test_what_decides_is_in_a_file_that_the_architecture_names_beside_it() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    tables = re.findall(r"\| what \| where \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    rows = [re.findall(r"`([^`]+)`", row) for table in tables for row in table.splitlines()]
    assert len(rows) > 40
    for named in rows:
        files = [ROOT / "omnitrain" / name for name in named if name.endswith(".py")]
        text = "\n".join(file.read_text() for file in files)
        names = [part for name in named if re.fullmatch(r"\w+(\.\w+)?", name) for part in name.split(".")]
        missing = [name for name in names if name != "py" and not re.search(rf"\b{name}\b", text)]
        assert files and not missing, (named, missing)


def test_the_architecture_shows_every_room() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    rooms = [path.parent for path in (ROOT / "omnitrain").glob("*/*/__init__.py")]
    assert [room.name for room in rooms if f"\n  {room.name}/" not in tree and f" {room.name}/" not in tree] == []


def test_the_glossary_has_at_most_forty_nouns() -> None:
    glossary = (ROOT / "docs" / "architecture.md").read_text().split("## Glossary")[1].split("## ")[0]
    assert 30 <= glossary.count("\n| ") - 1 <= 40


def test_the_tests_that_the_verify_page_names_exist() -> None:
    page = (ROOT / "docs" / "verify.md").read_text()
    table = page.split("## Failure modes and their tests")[1]
    for file, names in re.findall(r"`([\w/]+/test_\w+\.py)`([^;|]*)", table):
        text = (ROOT / "tests" / file).read_text()
        for name in re.findall(r"`(test_\w+)", names):
            assert f"def {name.removesuffix('_')}" in text, (file, name)


def figure(name: str, key: str) -> float:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["figures"][key]


def test_the_readme_is_short_and_says_the_last_error_of_verify() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 200 and f"gradient is {figure('verified', 'grad_error'):.1e} of the largest" in text


def test_the_figures_of_the_page_of_benchmarks_are_those_of_the_last_runs() -> None:
    speeds = {
        side: figure("padding", f"{side}_tokens_per_second") for side in ("omnitrain", "hf_padded", "hf_flattened")
    }
    table = (ROOT / "docs" / "benchmarks.md").read_text().split("| benchmark | figure | target |")[1].split("\n\n")[0]
    shown = [line.split(" | ")[1] for line in table.splitlines()[2:]]
    assert shown == [
        f"{100 * figure('step_overhead', 'overhead'):.1f} %",
        f"{figure('padding', 'ratio'):.2f}x",
        f"{speeds['omnitrain'] / speeds['hf_padded']:.2f}x",
        f"{speeds['omnitrain'] / speeds['hf_flattened']:.2f}x",
        f"{figure('attention', 'unpacked_ratio'):.3f}x",
        f"{figure('attention', 'packed_speedup'):.1f}x",
        f"{figure('loss', 'memory_ratio'):.2f}x",
        f"{figure('loss', 'time_ratio'):.2f}x",
        f"{figure('layouts', 'text_time_ratio'):.2f}x",
        f"{figure('layouts', 'text_memory_ratio'):.2f}x",
        f"{100 * figure('moe_overlap', 'hidden_1x'):.0f} %",
        f"{100 * figure('moe_overlap', 'hidden_0.5x'):.0f} %, {100 * figure('moe_overlap', 'hidden_2x'):.0f} %",
        f"{figure('moe_overlap', 'over_transformers_1x'):.1f}x",
    ]


WRITTEN = {
    "image_codes": "images in codes",
    "image_flow_head": "images, flow head",
    "image_in_context": "images in context",
    "film_flow_head": "films, flow head",
    "film_in_context": "films in context",
}


def test_the_figures_of_what_small_models_write_are_those_of_the_last_runs() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "any_to_any.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    table = page.split("| what is written | seeds | right, guided | unguided | minutes |")[1].split("\n\n")[0]
    assert table.splitlines()[2:] == [
        f"| {words} | {len(result['rounds'][f'{name} guided'])} | {100 * figure('any_to_any', f'{name} guided'):.1f} % "
        f"| {100 * figure('any_to_any', f'{name} unguided'):.1f} % "
        f"| {figure('any_to_any', f'{name} seconds') / 60:.0f} |"
        for name, words in WRITTEN.items()
        if f"{name} guided" in result["figures"]
    ]


def test_the_figures_of_the_page_of_sections_are_those_of_the_last_run() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "sections.json").read_text())["figures"]
    page = (ROOT / "docs" / "sections.md").read_text()
    for kind in ("sleep", "compute"):
        names = ("of_text", "bound", "of_bound", "blocking_of_text", "simulated")
        assert " | ".join(f"{figures[f'{kind}_{name}']:.3f}" for name in names) in page
    for share, work in product(("0.10", "0.33", "1.00"), ("0.2", "0.5")):
        found = {name: figures[f"balance_media_{share}_encoder_{work}_{name}_of_text"] for name in ("local", "world")}
        assert f"| {work} | {found['local']:.2f} | {found['world']:.2f} |" in page
        for ranks in (1, 2):
            values = (
                figures[f"balance_media_{share}_encoder_{work}_section_{ranks}_{n}"] for n in ("of_text", "per_rank")
            )
            assert f"| {', '.join(f'{value:.2f}' for value in values)} |" in page
            assert figures[f"balance_media_{share}_encoder_{work}_section_{ranks}_per_rank"] < found["world"]
