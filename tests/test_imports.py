"""Who may import whom: the table of the design, read from the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import eyas

ROOT = Path(eyas.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Words that every part may use.
BASE = {
    "eyas",
    "eyas.types",
    "eyas.layer_ids",
    "eyas.errors",
    "eyas.registry",
    "eyas.files",
    "eyas.locks",
    "eyas.progress",
    "eyas.row_stats",
    "eyas.safetensors_io",
    "eyas.tensor_pool",
    "eyas.config.schema",
    "eyas.progress_displays",
}
# Beyond BASE and itself, each part may import these (a package, or single modules of one).
MAY_IMPORT: dict[str, set[str]] = {
    "cli": {"config", "commands"},
    "commands": {"config", "stages", "plan", "capture", "report", "serving"},
    "stages": {
        "config", "targets", "data", "engines", "store", "drafters", "train", "export", "evaluate", "scale",
        "trackers", "plan", "capture", "report", "serving",
    },
    "plan": {"stages", "config", "targets", "data", "engines", "store", "drafters", "train", "capture"},
    "capture": {
        "stages", "config", "targets", "data", "engines", "store", "drafters", "train", "scale", "trackers", "plan",
    },
    "report": {"stages", "config", "targets", "data", "serving", "export", "store", "drafters", "evaluate"},
    "serving": {"stages", "config", "targets", "data", "engines", "drafters", "evaluate", "export"},
    "config": set(),
    "targets": set(),
    "data": set(),
    "engines": {"targets.config", "targets.weights"},
    "store": set(),
    "kernels": {"drafters.common.loss", "drafters.common.teacher_targets"},
    "drafters": {"kernels", "targets", "config"},
    "train": {"drafters", "kernels", "store.base", "targets", "data.pack"},
    "export": {"drafters"},
    "evaluate": {"drafters", "engines.base", "store.base", "targets", "train"},
    "trackers": set(),
    "scale": {"engines", "store", "train"},
}  # fmt: skip
# Words that stand on few others, so that everybody can stand on them.
BASE_MAY_IMPORT: dict[str, set[str]] = {
    "eyas": set(),
    "eyas.errors": set(),
    "eyas.files": {"eyas.errors"},
    "eyas.locks": {"eyas.errors"},
    "eyas.progress": set(),
    "eyas.row_stats": set(),
    "eyas.safetensors_io": set(),
    "eyas.tensor_pool": set(),
    "eyas.config.schema": {"eyas.registry"},
    "eyas.progress_displays": {"eyas.progress"},
    "eyas.layer_ids": {"eyas.errors"},
    "eyas.registry": {"eyas.errors"},
    "eyas.types": {"eyas.errors", "eyas.files", "eyas.layer_ids"},
}
# Loaded only when used: too slow for a command line's start, or not installed everywhere.
LIGHT = (
    "cli",
    "commands",
    "__main__",
    "__init__",
    "errors",
    "files",
    "layer_ids",
    "progress",
    "progress_displays",
    "registry",
    "types",
    "config",
)
SLOW = {"torch", "transformers", "pyarrow", "safetensors", "vllm", "ray"}
OPTIONAL = {"vllm", "ray", "gguf", "accelerate", "tensorboard", "wandb", "mlflow", "trackio"}


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
    name = module.split(".")[1] if "." in module else "cli"
    return "cli" if name == "__main__" else name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_module_imports_only_what_its_part_may(path: Path) -> None:
    module = module_name(path)
    ours = {name for name in imports(path) if name.split(".")[0] == "eyas"} - {module}
    if module in BASE_MAY_IMPORT:
        assert ours <= BASE_MAY_IMPORT[module]
        return
    part = part_of(module)
    allowed = MAY_IMPORT[part] | {part}
    wrong = [
        name
        for name in ours - BASE
        if not any(name == f"eyas.{a}" or name.startswith(f"eyas.{a}.") for a in allowed)
    ]
    assert wrong == []


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
