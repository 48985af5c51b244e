"""Runs the tiny pipeline on the lowest versions that pyproject.toml allows, or on the newest that exist.

    python tests/support/version_bounds.py lowest  # or: make test-lowest
    python tests/support/version_bounds.py newest  # or: make test-newest

The environment lies in .venv-lowest or .venv-newest (several GB, torch's GPU libraries among them) and is
removed after the run unless ``--keep``. The lowest versions are installed together, so that two of them that
exclude each other are an error.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = {"lowest": "python3.11", "newest": "python3.13"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bound", choices=sorted(PYTHONS))
    parser.add_argument(
        "--python", help="interpreter  [default: python3.11 for lowest, python3.13 for newest]"
    )
    parser.add_argument("--keep", action="store_true", help="keep the environment, and use one that was kept")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        run_pipeline()
        return
    folder = ROOT / f".venv-{options.bound}"
    try:
        python = install(folder, options.bound, options.python or PYTHONS[options.bound])
        subprocess.run([python, __file__, options.bound, "--inside"], check=True, env=environment())
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def install(folder: Path, bound: str, interpreter: str) -> Path:
    """Install what eyas needs at that bound; return the environment's Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
        wanted = [f"{name}=={floor}" if bound == "lowest" else name for name, floor in floors().items()]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def floors() -> dict[str, str]:
    """Return the lowest version of each dependency, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pairs = [re.fullmatch(r"([A-Za-z0-9-]+)>=([0-9.]+)", text) for text in project["dependencies"]]
    return {pair[1]: pair[2] for pair in pairs if pair}


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "support")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run_pipeline() -> None:
    """Run all stages on a tiny target with this interpreter, both export formats, and a printed serve."""
    from importlib.metadata import version

    from pipeline import write_run
    from tiny import make_target

    print(sys.version.split()[0], *(f"{name} {version(name)}" for name in floors()), sep="\n  ", flush=True)
    with tempfile.TemporaryDirectory() as base:
        root = Path(base)
        run_file = write_run(root, make_target(root / "target"), train={"optimizer": "muon"})
        eyas("run", "-c", run_file)
        eyas("run", "-c", run_file)  # all is done already
        eyas("serve", root / "run" / "draft", "--print")
        eyas("export", "-c", run_file, "export.format=speculators", "--fresh")
        eyas("inspect", "states", "-c", run_file, "--verify")
        eyas("plan", "-c", run_file)
    print("the tiny run passes")


def eyas(*words: object) -> None:
    """Run a command; a warning that eyas itself causes is an error."""
    strict = ["-W", "error::DeprecationWarning:eyas", "-W", "error::FutureWarning:eyas"]
    done = subprocess.run(
        [sys.executable, *strict, "-m", "eyas", *map(str, words)], capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout, done.stderr)
        raise SystemExit(f"eyas {words[0]} failed with {done.returncode}")


if __name__ == "__main__":
    main()
