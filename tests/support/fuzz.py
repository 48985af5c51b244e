"""Search for bytes that a reader neither reads nor refuses in words, guided by the code they reach.

    pip install atheris && PYTHONPATH=tests/support python tests/support/fuzz.py --seconds 60 [READER ...]

Each reader of tests/support/readers.py runs in a separate process, starting from a genuine file, with
at most 2 GiB of memory and 10 s for one input. Bytes that break one are left in ``--crashes``; what is
found is fixed, and kept as a case of tests/unit/test_any_bytes.py. Not part of the tests: atheris is no
dependency of theirs.
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_MARK = "--in-this-process"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("readers", nargs="*")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("--crashes", type=Path, default=Path("crashes"))
    options = parser.parse_args()
    from readers import GENUINE, READERS

    broken = 0
    for name in options.readers or READERS:
        crashes = options.crashes.absolute() / name.replace(" ", "-")
        crashes.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as corpus:
            (Path(corpus) / "genuine").write_bytes(GENUINE[name]())
            limits = [
                f"-max_total_time={options.seconds}",
                "-timeout=10",
                "-rss_limit_mb=2048",
                "-max_len=8192",
            ]
            words = [sys.executable, __file__, _MARK, name, *limits, f"-artifact_prefix={crashes}/", corpus]
            done = subprocess.run(words, capture_output=True, text=True, timeout=options.seconds + 300)
        runs, covered, reached = (
            re.findall(pattern, done.stderr) for pattern in (r"Done (\d+) runs", r"cov: (\d+)", r"ft: (\d+)")
        )
        row = {"reader": name, "runs": int(runs[-1]) if runs else None, "ok": done.returncode == 0}
        row |= (
            {"edges_first": int(covered[0]), "edges": int(covered[-1]), "features": int(reached[-1])}
            if covered
            else {}
        )
        print(json.dumps(row), flush=True)
        if done.returncode:
            broken += 1
            print(done.stderr[-3000:], file=sys.stderr)
    return 1 if broken else 0


def fuzz(name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["eyas", "json", "yaml", "readers"]):
        from eyas.errors import EyasError
        from readers import READERS
    reader, folder = READERS[name], Path(tempfile.mkdtemp(prefix="eyas-fuzz-"))

    def one(data: bytes) -> None:
        for path in folder.iterdir():
            path.unlink()
        with contextlib.suppress(EyasError):
            reader(data, folder)

    try:
        atheris.Setup([sys.argv[0], *arguments], one)
        atheris.Fuzz()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [_MARK]:
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
