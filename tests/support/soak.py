"""Extract thousands of small samples while disks and engines fail at random: nothing is lost, nothing grows.

    PYTHONPATH=tests/support python tests/support/soak.py --samples 4000 --faults 40

One process runs ``eyas extract`` again and again; each time a file operation drawn by dice fails (a full
disk, a broken one, an interrupt) or the engine dies, and shards are lost in between. At the end the states
are those of an undisturbed run, byte for byte. Prints JSON: memory and open files after each attempt.
"""

import argparse
import gc
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from eyas import registry
from faults import Plan, Strike, contents, during, fail
from pipeline import eyas, write_run
from tiny import make_target, write_jsonl


def interrupt() -> None:
    raise KeyboardInterrupt


FAULTS: dict[str, Strike | None] = {
    "full disk": fail(28),
    "broken disk": fail(5),
    "interrupt": interrupt,
    "engine dies": None,
}


def soak(folder: Path, num_samples: int, num_faults: int, seed: int = 0) -> dict[str, Any]:
    """Return what was struck, and memory [MiB] and open files after each attempt."""
    dice = random.Random(seed)
    target = make_target(folder / "target")
    rows = [
        {"id": f"c{i}", "input_ids": [dice.randrange(5, 290) for _ in range(dice.randrange(4, 40))]}
        for i in range(num_samples)
    ]
    data = write_jsonl(folder / "rows.jsonl", rows)
    # About a hundred shards, so that each fault costs one of many.
    settings = {"prepared_data": str(data), "shard_bytes": max(20_000, num_samples * 110)}
    run_files = {}
    for name in ("calm", "struck"):
        (folder / name).mkdir()
        run_files[name] = write_run(folder / name, target, extract=settings, regenerate={"enabled": False})
    calm = eyas("extract", "-c", run_files["calm"])
    assert calm.code == 0, calm.err
    struck: dict[str, int] = dict.fromkeys(FAULTS, 0)
    memory, files = [], []
    states = folder / "struck" / "run" / "states"
    for _ in range(num_faults):
        there = sorted(states.rglob("*.safetensors"))
        for path in dice.sample(there, len(there) // 3):  # so that there is always work that can be struck
            path.unlink()
        name = dice.choice(list(FAULTS))
        struck[name] += strike(run_files["struck"], name, dice.randrange(10, 60))
        gc.collect()
        memory.append(resident_mib())
        files.append(len(os.listdir("/proc/self/fd")))
    last = eyas("extract", "-c", run_files["struck"])
    assert last.code == 0, last.err
    found, wanted = (contents(folder / name / "run" / "states") for name in ("struck", "calm"))
    assert shards(found) == shards(wanted)
    return {
        "samples": num_samples,
        "attempts": num_faults,
        "struck": struck,
        "memory_mib": memory,
        "open_files": files,
    }


def strike(run_file: Path, name: str, nth: int) -> bool:
    """Run the command with one fault; return whether it was stopped by it."""
    strike = FAULTS[name]
    if strike is not None:
        plan = Plan("any", "*/struck/run/*", strike, nth)
        return bool(during(plan, lambda: eyas("extract", "-c", run_file).code))
    engine = registry.ENGINES["transformers"]
    registry.ENGINES["transformers"] = "bad_engines:CrashingInfo"
    try:
        return bool(eyas("extract", "-c", run_file).code)
    finally:
        registry.ENGINES["transformers"] = engine


def shards(states: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in states.items() if name.endswith(".safetensors")}


def resident_mib() -> float:
    return float(round(psutil.Process().memory_info().rss / 2**20, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), options.samples, options.faults, options.seed)
    print(json.dumps(found | {"seconds": round(time.monotonic() - started)}))


if __name__ == "__main__":
    main()
