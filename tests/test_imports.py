"""Who may import whom: the table in docs/design.md, held against the code."""

import ast
import graphlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import eyas

ROOT = Path(eyas.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"

NOT_VERBS = {"run_context"}  # what verbs stand on

# Loaded only when used: too slow for a command line's start, or not installed everywhere.
LIGHT = (
    "cli",
    "commands",
    "__main__",
    "__init__",
    "errors",
    "files",
    "findings",
    "guard",
    "layer_ids",
    "progress",
    "progress_displays",
    "registry",
    "console",
    "run_folder",
    "typed_json",
    "types",
    "config",
)
SLOW = {"torch", "transformers", "pyarrow", "safetensors", "vllm", "ray"}
OPTIONAL = {"vllm", "ray", "gguf", "accelerate", "tensorboard", "wandb", "mlflow", "trackio"}


@cache
def table() -> dict[str, Any]:
    """Return the design's table: the ``base`` parts, and from top to bottom what each part may import."""
    (block,) = re.findall(r"^```toml\n(.*?)^```", DESIGN.read_text(encoding="utf-8"), re.M | re.S)
    return tomllib.loads(block)


def module_name(path: Path) -> str:
    parts = ("eyas", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, everywhere: bool = True) -> Iterator[str]:
    """Yield the modules a file imports: everywhere in it, or only where importing it imports them."""
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            for alias in node.names:
                # ``from eyas import registry`` imports a module, ``from eyas.types import X`` a name.
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else str(node.module)
        elif not everywhere and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)
        ):
            continue
        todo.extend(ast.iter_child_nodes(node))


def is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return name.startswith("eyas.") and (path.with_suffix(".py").is_file() or path.is_dir())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def part_of(module: str) -> str:
    """Return the file or folder directly below the package that a module is in; its own file counts too."""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def ours() -> dict[str, set[str]]:
    """Return for each module the modules of eyas that it imports, also inside functions."""
    return {
        module_name(path): {name for name in imports(path) if name.split(".")[0] == "eyas"} for path in FILES
    }


def imported_across_parts() -> set[tuple[str, str]]:
    """Return (part, module imported from another part without the leading ``eyas.``)."""
    return {
        (part_of(module), name.removeprefix("eyas.") if "." in name else "__init__")
        for module, names in ours().items()
        for name in names
        if part_of(name) != part_of(module)
    }


def covers(entry: str, name: str) -> bool:
    return name == entry or name.startswith(f"{entry}.")


def test_every_file_and_folder_of_the_package_has_its_row_in_the_table() -> None:
    assert {part_of(module) for module in ours()} == set(table()["may_import"])


def test_a_part_imports_only_what_the_table_allows() -> None:
    may_import, base = table()["may_import"], table()["base"]
    wrong = {
        (part, name)
        for part, name in imported_across_parts()
        if not any(covers(entry, name) for entry in [*may_import[part], *(() if part in base else base)])
    }
    assert wrong == set()


def test_the_table_allows_nothing_that_is_not_imported() -> None:
    found = imported_across_parts()
    stale = {
        (part, entry)
        for part, entries in table()["may_import"].items()
        for entry in entries
        if not any(importer == part and covers(entry, name) for importer, name in found)
    }
    assert stale == set()
    assert {part for part in table()["base"] if not any(covers(part, name) for _, name in found)} == set()


def test_the_sketch_of_the_house_names_every_part() -> None:
    text = DESIGN.read_text(encoding="utf-8")
    (sketch,) = re.findall(r"^## The house\n(.*?)^Only verbs", text, re.M | re.S)
    parts = set(table()["may_import"]) - {"__main__", "__init__"}
    assert {part for part in parts if f" {part}/ " not in sketch and f" {part}.py" not in sketch} == set()


def test_in_the_table_no_arrow_runs_back_up() -> None:
    order = list(table()["may_import"])
    for part, entries in table()["may_import"].items():
        below = order[order.index(part) + 1 :]
        assert [e for e in entries if e.split(".")[0] not in below] == []
    base = table()["base"]
    assert set(order[-len(base) :]) == set(base), "the base is at the bottom"


def test_no_modules_import_each_other_in_a_circle_not_even_inside_functions() -> None:
    graphlib.TopologicalSorter(ours()).prepare()


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_slow_and_optional_libraries_are_imported_where_they_are_used(path: Path) -> None:
    top = {name.split(".")[0] for name in imports(path, everywhere=False)}
    light = path.relative_to(ROOT).parts[0].removesuffix(".py") in LIGHT
    parts = path.relative_to(ROOT).parts
    adapter = {"vllm"} if "vllm" in parts else {"ray"} if parts[0] == "scale" else set()
    assert not top & (SLOW if light else OPTIONAL) - adapter


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 450, "about 400 lines"
    if text and path.name != "__main__.py":
        assert ast.get_docstring(ast.parse(text))


def test_a_verb_fits_on_a_page() -> None:
    lengths = {path.stem: path.read_text().count("\n") for path in (ROOT / "stages").glob("*.py")}
    assert {verb for verb, lines in lengths.items() if lines > 150} <= NOT_VERBS


def test_no_two_files_of_tests_have_one_name() -> None:
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, num in names.items() if num > 1] == [], (
        "a run of all tests collects one of them only"
    )
