"""The packages that are published: what is in them, and what they are called; the site of the docs."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_a_wheel_and_an_sdist_hold_the_package_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("build")
    pytest.importorskip("setuptools_scm")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "eyas", tree / "src" / "eyas", ignore=ignored)
    # Not inside a checkout: what a tarball of the sources gives, without history.
    done = run("build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(tree))
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    assert wheel.name == "eyas-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read("eyas-0.1.0.dist-info/METADATA").decode()
        entries = archive.read("eyas-0.1.0.dist-info/entry_points.txt").decode()
    sources = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "eyas").rglob("*.py")}
    assert sources <= names
    pages = {
        str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "eyas" / "report" / "templates").iterdir()
    }
    assert pages <= names
    assert len(pages) > 5
    assert all(name.startswith(("eyas/", "eyas-0.1.0.dist-info/")) for name in names)
    for extra in ("vllm", "ray", "trackers", "demo", "hub"):
        assert f"Provides-Extra: {extra}\n" in metadata
    assert "eyas = eyas.cli:main" in entries
    with tarfile.open(sdist) as tarball:
        assert "eyas-0.1.0/pyproject.toml" in tarball.getnames()


def test_a_broken_link_in_the_docs_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("material")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    build = ("mkdocs", "build", "--strict", "-f", str(tmp_path / "mkdocs.yml"))
    whole = run(*build)
    assert whole.returncode == 0, whole.stderr
    page = tmp_path / "docs" / "quickstart.md"
    page.write_text(page.read_text() + "\n[nowhere](nowhere.md)\n")
    broken = run(*build)
    assert broken.returncode != 0
    assert "nowhere.md" in broken.stderr
