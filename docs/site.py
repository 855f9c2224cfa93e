"""What mkdocs adds to the pages of docs/: a home page, commands, Python, the schema and figures, all from the code.

Links to files of the repository that are no pages lead to copies of them in the site.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer.main
from click import Context
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import omnitrain
from omnitrain.cli.main import app
from omnitrain.recipe.tree import json_schema

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\]\(\.\./([\w./-]+)(#[\w-]+)?\)")
_REMOTE = re.compile(
    r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//[^"]*|<link rel="stylesheet" href="(?:https?:)?//[^"]*'
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the schema, and the files outside of docs/ that pages link to."""
    schema = json.dumps(json_schema(), indent=1)
    for name, text in {
        "reference/commands.md": commands(),
        "reference/python.md": python_names(),
        "reference/schema.md": f"# Schema\n\nThe JSON schema of a recipe, for editors: [schema.json](schema.json).\n\n"
        f"```json\n{schema}\n```\n",
        "reference/figures.md": figures(),
    }.items():
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "reference/schema.json", content=schema))
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        for outside, _ in _OUTSIDE.findall(as_page(page)):
            if (name := target(outside)) not in files.src_uris:
                files.append(File.generated(config, name, content=(ROOT / outside).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links out of docs/ to the copies; begin the home page with the README."""
    if page.file.src_uri == "index.md":
        markdown = as_page(ROOT / "README.md") + "\n#" + markdown
    if page.file.src_uri.startswith("files/"):
        return markdown.replace("](docs/", "](../").replace("](LICENSE)", "](LICENSE.txt)")
    if page.file.src_uri.startswith("reference/"):
        return markdown
    return _OUTSIDE.sub(lambda found: f"]({target(found[1])}{found[2] or ''})", markdown)


def on_post_page(output: str, page: Page, **_: Any) -> None:
    """Refuse a page that loads something from another machine."""
    if found := _REMOTE.search(output):
        raise PluginError(f"{page.file.src_uri}: loads {found[0]}; the site must work without a network")


def as_page(path: Path) -> str:
    """Return a page whose links start in docs/."""
    text = path.read_text()
    if path.parent != ROOT:
        return text
    text = re.sub(r"\]\((?!https?:|#|docs/)", "](../", text)
    return text.replace("](docs/", "](")


def target(outside: str) -> str:
    """Return where the site has a file outside of docs/; a page keeps its suffix, others are text."""
    return f"files/{outside}" if outside.endswith((".md", ".cff")) else f"files/{outside}.txt"


def commands() -> str:
    """Return the page of commands: the help of each, as ``omnitrain COMMAND --help`` has it."""
    group = typer.main.get_command(app)
    parts = ["# Commands\n"]
    for name, command in sorted(group.commands.items()):
        context = Context(command, info_name=f"omnitrain {name}")
        options = [record for one in command.get_params(context) if (record := one.get_help_record(context))]
        lines = [f"| `{names}` | {text.replace('|', '/')} |" for names, text in options]
        table = ["| option | meaning |", "|---|---|", *lines, ""]
        parts += [f"## {name}\n", f"```text\n{command.get_usage(context)}\n```\n", f"{command.help or ''}\n", *table]
    return "\n".join(parts)


def python_names() -> str:
    """Return the page of exported names, which mkdocstrings fills from docstrings."""
    parts = ["# Python\n", "`import omnitrain as ot` has these names ([use](../python.md)).\n"]
    for name in omnitrain.__all__:
        value = getattr(omnitrain, name)
        if hasattr(value, "__qualname__"):
            parts.append(f"::: {value.__module__}.{value.__qualname__}\n")
    return "\n".join(parts)


def figures() -> str:
    """Return the page of all figures of benchmarks/results."""
    said = "The last run of each benchmark, from `benchmarks/results/` ([what they say](../benchmarks.md)).\n"
    parts = ["# All figures\n", said]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if "figures" not in result:
            continue
        where = ", ".join([result.get("cpu", ""), *(f"{name} {one}" for name, one in result["versions"].items())])
        rows = [f"| {name} | {value:,.4g} |" for name, value in result["figures"].items()]
        parts += [f"## {result['name']}\n", f"{result['formula']}\n", f"{where}\n"]
        parts += ["| figure | value |", "|---|---|", *rows, ""]
    return "\n".join(parts)
