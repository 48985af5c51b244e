"""How fast and how large is `eyas prepare`? One child process a run, wall time and peak memory of it.

    python benchmarks/prepare.py ../shared/data/train-pool.jsonl.gz --target demo:smollm2-135m-instruct
    python benchmarks/prepare.py POOL --copies 4        # memory must not grow with the data
    python benchmarks/prepare.py POOL --speculators-python VENV/bin/python --render http://127.0.0.1:8000

The last form also times speculators' own preparation of the same file (the first --rows rows that have
an answer and no tools, written out for both), which renders through a running vLLM server.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

_SPECULATORS = """
import sys
from speculators.data_generation.preprocessing import load_and_preprocess_dataset
rows, _ = load_and_preprocess_dataset(sys.argv[1], [sys.argv[2]], seq_length=int(sys.argv[3]),
                                      build_dataset_num_proc=int(sys.argv[4]), render_endpoint=sys.argv[5])
rows.to_parquet(sys.argv[6])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pool", type=Path)
    parser.add_argument("--target", default="demo:smollm2-135m-instruct")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--copies", type=int, default=1, help="read the pool so many times, under other ids")
    parser.add_argument("--rows", type=int, help="use only so many plain rows")
    parser.add_argument("--speculators-python", help="an interpreter that has speculators")
    parser.add_argument("--render", help="address of a vLLM server, for speculators")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = _write_source(options, folder)
        _time_eyas(options, source, folder / "run")
        if options.speculators_python:
            _time_speculators(options, source, folder)


def _write_source(options: argparse.Namespace, folder: Path) -> Path:
    if options.speculators_python and not (options.rows and options.render):
        sys.exit("--speculators-python needs --rows and --render")
    if options.copies == 1 and not options.rows:
        return Path(options.pool)
    path = folder / "rows.jsonl"
    with path.open("w", encoding="utf-8") as out:
        for copy in range(options.copies):
            opener = gzip.open if options.pool.suffix == ".gz" else open
            with opener(options.pool, "rt", encoding="utf-8") as lines:
                rows = map(json.loads, lines)
                chosen = islice(filter(_is_plain, rows), options.rows) if options.rows else rows
                for number, row in enumerate(chosen):
                    row_id = f"{copy}/{row.get('id', number)}"
                    # The one key that both projects read.
                    kept = {"id": row_id, "conversations": row["messages"]}
                    kept |= {"tools": row["tools"]} if "tools" in row else {}
                    out.write(json.dumps(kept, ensure_ascii=False) + "\n")
    return path


def _is_plain(row: dict[str, Any]) -> bool:
    messages = row["messages"]
    return messages[-1]["role"] == "assistant" and all(set(m) == {"role", "content"} for m in messages)


def _time_eyas(options: argparse.Namespace, source: Path, run_dir: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "eyas",
        "prepare",
        f"run_dir={run_dir}",
        f"target.model={options.target}",
    ]
    command += [f"data.sources={source}", f"data.max_length={options.max_length}"]
    command += ["regenerate.enabled=false", "data.max_drop_share=1"]
    seconds, peak = _timed(command)
    manifest = json.loads((run_dir / "prepared" / "manifest.json").read_text())
    counts = manifest["counts"]
    tokens = sum(counts.get(f"{split}_tokens", 0) for split in ("train", "held_out"))
    _report("eyas prepare", seconds, peak, manifest["num_read"], tokens)


def _time_speculators(options: argparse.Namespace, source: Path, folder: Path) -> None:
    from eyas.targets.resolve_model import locate

    out = folder / "speculators.parquet"
    workers = str(os.cpu_count() or 1)
    command = [options.speculators_python, "-c", _SPECULATORS, str(locate(options.target)), str(source)]
    seconds, peak = _timed([*command, str(options.max_length), workers, options.render, str(out)])
    import pyarrow.parquet as pq

    ids = pq.read_table(out, columns=["input_ids"]).column("input_ids")
    _report("speculators", seconds, peak, options.rows, sum(map(len, ids)))


def _timed(command: list[str]) -> tuple[float, float]:
    """Run a command; return its seconds and its peak memory in MiB, those of its children apart."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(log.read().decode()[-3000:])
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def _report(name: str, seconds: float, peak: float, rows: int, tokens: int) -> None:
    print(
        f"{name}: {rows:,} rows in {seconds:.1f} s ({rows / seconds:,.0f} rows/s), {tokens:,} tokens kept, "
        f"peak {peak:,.0f} MiB, {os.cpu_count()} cores",
        flush=True,
    )


if __name__ == "__main__":
    main()
