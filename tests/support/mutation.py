"""Faults planted one at a time in modules whose faults would be silent, and whether a test notices each.

    python tests/support/mutation.py [--limit-s 3000] [--jobs 2] [MODULE ...]

The tests that run a changed line are known from a first run without a change; only they run, in a fork of a
process that has loaded all of them. tests/mutation.toml names the modules with the test files that are to
notice their faults, and the survivors that are accepted with the reasons.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import random
import re
import signal
import sys
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "mutation.toml"
_OURS = (ROOT / "src", ROOT / "tests")  # not .venv, which lies in the same folder
# Loaded once, before any fork: they take seconds, and nothing in them is changed.
_PRELOADED = (
    *("numpy", "torch", "torch.distributed", "pyarrow.parquet", "safetensors.torch", "pytest", "hypothesis"),
    *("yaml", "click", "rich", "httpx", "fsspec", "tokenizers", "transformers.models.llama.modeling_llama"),
)


# ----------------------------------------------------------------- which tests run a line
@dataclass
class Coverage:
    """Which tests run which lines of a module, and how long each took (seconds)."""

    tests_of_line: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[str, float] = field(default_factory=dict)
    imported: set[int] = field(default_factory=set)  # lines that run when the module is loaded

    def tests_for(self, mutant: Mutant) -> list[str]:
        """Return the tests to run, the fastest first; all for what runs at import."""
        names = self.seconds if mutant.line in self.imported else self.tests_of_line.get(mutant.line, ())
        return sorted(names, key=lambda test: self.seconds[test])


class _Recorder:
    """A pytest plugin that notes the lines of one file that each test runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.coverage, self.current = str(path), Coverage(), ""

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.trace_line if frame.f_code.co_filename == self.path else None

    def trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            if self.current:
                self.coverage.tests_of_line[frame.f_lineno].add(self.current)
            else:
                self.coverage.imported.add(frame.f_lineno)
        return self.trace_line

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.current = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when in ("setup", "call"):
            seconds = self.coverage.seconds
            seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration


def _pytest(arguments: list[str], plugins: list[Any]) -> int:
    import pytest

    quiet = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not kills"]
    shown = io.StringIO()
    with redirect_stdout(shown), redirect_stderr(shown):
        code = int(pytest.main([*quiet, *arguments], plugins=plugins))
    if code and plugins:  # the first run, without a change
        print(shown.getvalue()[-3000:], file=sys.stderr)
    return code


def _measure(path: Path, tests: list[str]) -> Coverage:
    """Run the tests without a change. Raises: SystemExit when one of them fails."""
    recorder = _Recorder(path)
    threading.settrace(recorder.trace)
    sys.settrace(recorder.trace)
    try:
        code = _pytest(tests, [recorder])
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    if code:
        raise SystemExit(f"{path.name}: its tests fail without a change ({code}): {tests}")
    return recorder.coverage


# ----------------------------------------------------------------- a change takes effect
def _functions_of(namespace: dict[str, Any], module: str) -> dict[str, Any]:
    """Return the module's functions and methods by qualified name, without what wraps them."""
    found: dict[str, Any] = {}

    def add(value: Any) -> None:
        for name in ("fget", "func", "__func__", "__wrapped__"):
            while getattr(value, name, None) is not None and not isinstance(value, type):
                value = getattr(value, name)
        if isinstance(value, FunctionType) and value.__module__ == module:
            found[value.__qualname__] = value
        elif isinstance(value, type) and value.__module__ == module and value.__qualname__ not in found:
            found[value.__qualname__] = None
            for member in vars(value).values():
                add(member)

    for value in namespace.values():
        add(value)
    return {name: function for name, function in found.items() if function is not None}


def _swap(module: str, path: Path, source: bytes) -> bool:
    """Give the loaded module's functions the code of ``source``; other modules hold the same functions.

    Returns False where a function closes over something else than before: then all has to be loaded again.
    """
    package = module.rpartition(".")[0]
    namespace: dict[str, Any] = {"__name__": module, "__file__": str(path), "__package__": package}
    exec(compile(source, str(path), "exec"), namespace)
    old, new = _functions_of(vars(sys.modules[module]), module), _functions_of(namespace, module)
    common = old.keys() & new.keys()
    if any(old[n].__code__.co_freevars != new[n].__code__.co_freevars for n in common):
        return False
    for name in common:
        old[name].__code__ = new[name].__code__
    return True


def _reload(module: str, path: Path, source: bytes) -> None:
    """Forget all that is ours and let ``module`` be loaded from ``source``."""

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> Any:
            return compile(source, str(path), "exec")

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, where: Any, target: Any = None) -> Any:
            if name != module:
                return None
            return importlib.util.spec_from_file_location(name, path, loader=Loader(name, str(path)))

    for name, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if name != "__main__" and file and any(Path(file).is_relative_to(folder) for folder in _OURS):
            del sys.modules[name]
    sys.meta_path.insert(0, Finder())


# ----------------------------------------------------------------- one process a mutant
@dataclass
class _Running:
    mutant: Mutant
    pid: int
    until: float


def _start(
    mutant: Mutant, path: Path, source: bytes, at_import: bool, tests: list[str], limit_s: float
) -> _Running:
    """Fork a process that ends with 0 when no test notices the change."""
    pid = os.fork()
    if pid:
        return _Running(mutant, pid, time.monotonic() + limit_s)
    os.setsid()
    with suppress(OSError):  # a change may ask for all memory: this process is to be ended for it, no other
        Path("/proc/self/oom_score_adj").write_text("1000")
    code = 1
    try:
        changed = mutant.applied(source)
        if at_import or not _swap(mutant.module, path, changed):
            _reload(mutant.module, path, changed)
        code = _pytest(["-x", *tests], [])
    finally:
        os._exit(code)


def _outcome(running: _Running) -> str | None:
    """Return how a process ended, or None while it runs; one that hangs is killed."""
    pid, status = os.waitpid(running.pid, os.WNOHANG)
    if pid:
        return "noticed" if status else "survived"
    if time.monotonic() < running.until:
        return None
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    os.waitpid(running.pid, 0)
    return "timed out"


def run_module(
    path: Path, tests: list[str], skipped: list[str], jobs: int, until: float, most: int | None
) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant with ``noticed``, ``survived``, ``timed out`` or ``not run`` (by no test)."""
    name = str(path.relative_to(ROOT / "src").with_suffix("")).replace("/", ".")
    source = path.read_bytes()
    mutants = mutants_of(name, source, skipped)
    if most is not None and len(mutants) > most:
        mutants = sorted(random.Random(0).sample(mutants, most), key=lambda m: m.start)
    coverage = _measure(path, tests)
    nothing = Mutant(name, 0, 0, 0, "", "")
    for at_import in (False, True):
        idle = _start(nothing, path, source, at_import, sorted(coverage.seconds), 600)
        while (outcome := _outcome(idle)) is None:
            time.sleep(0.05)
        if outcome != "survived":
            raise SystemExit(f"{name}: its tests fail in a fork without a change")
    waiting, running = mutants[::-1], list[_Running]()
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < until:
            mutant = waiting.pop()
            chosen = coverage.tests_for(mutant)
            if not chosen:
                yield mutant, "not run"
                continue
            limit_s = 30 + 10 * sum(coverage.seconds[t] for t in chosen)
            at_import = mutant.line in coverage.imported
            running.append(_start(mutant, path, source, at_import, chosen, limit_s))
        if not running:
            return  # no time is left
        time.sleep(0.01)
        for one in list(running):
            if (outcome := _outcome(one)) is not None:
                running.remove(one)
                yield one.mutant, outcome


def _in_fork(
    path: Path, tests: list[str], skipped: list[str], options: argparse.Namespace, until: float
) -> Iterator[tuple[str, str]]:
    """Run a module's mutants in a process of their own, where its tests and what they import stay loaded."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            with os.fdopen(write, "w") as f:
                for mutant, outcome in run_module(path, tests, skipped, options.jobs, until, options.most):
                    f.write(json.dumps([mutant.name, outcome]) + "\n")
                    f.flush()
            code = 0
        except SystemExit as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as f:
        for line in f:
            name, outcome = json.loads(line)
            yield name, outcome
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("modules", nargs="*", help="parts of module paths; default: all")
    parser.add_argument("--limit-s", type=float, default=3000, help="start no further mutant after so long")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--most", type=int, help="so many mutants of each module, drawn at random")
    parser.add_argument("--bar", type=float, default=0.85, help="the least share of mutants to be noticed")
    parser.add_argument("--out", type=Path, help="write all outcomes there, as lines of JSON")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in _PRELOADED:
        with suppress(ImportError):
            __import__(name)
    assert not any(name.split(".")[0] == "eyas" for name in sys.modules)
    until = time.monotonic() + options.limit_s
    cases = tomllib.loads(CASES.read_text())
    reasons = {accepted["change"]: accepted["reason"] for accepted in cases.get("accepted", ())}
    noticed_of_all = num_of_all = 0
    with options.out.open("w") if options.out else nullcontext() as out:
        for module, tests in cases["modules"].items():
            if options.modules and not any(part in module for part in options.modules):
                continue
            path, skipped = ROOT / "src" / module, cases["not_on_a_cpu"].get(module, [])
            noticed, num, started = 0, 0, time.monotonic()
            for name, outcome in _in_fork(path, tests, skipped, options, until):
                num += 1
                noticed += outcome in ("noticed", "timed out")
                if out:
                    print(json.dumps({"mutant": name, "outcome": outcome}), file=out, flush=True)
                if outcome in ("survived", "not run"):
                    reason = reasons.get(re.sub(r":\d+ ", " ", name, count=1))
                    print(f"  {outcome}: {name}" + (f" (accepted: {reason})" if reason else ""), flush=True)
            print(f"{module}: {noticed} of {num} noticed, {time.monotonic() - started:.0f} s", flush=True)
            noticed_of_all, num_of_all = noticed_of_all + noticed, num_of_all + num
    print(f"all: {noticed_of_all} of {num_of_all} noticed, {noticed_of_all / max(1, num_of_all):.1%}")
    sys.exit(0 if noticed_of_all >= options.bar * num_of_all else 1)


if __name__ == "__main__":
    main()
