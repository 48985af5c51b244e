"""How well one training step scales over GPUs: the same work for each rank, gradients added up over all.

    torchrun --nproc-per-node 2 benchmarks/train_scaling.py --work 8x1024:0.5 8x1024:0.9
    torchrun --nproc-per-node 2 benchmarks/train_scaling.py --small --shard   # gloo, on a CPU

Three figures a work, in milliseconds: rank 0 alone while the other devices idle; all ranks at once without
adding up (what a shared host and its power cost); all ranks adding up. Efficiency is the first by the
last. ``--micro-batches`` a rank make one step; only the last one's backward adds up. The sum is also timed
alone, to see how much of it hides behind the backward. Rank 0 prints JSON. With ``--shard`` ranks hold
slices of the masters: a step of all ranks and its peak of memory are measured, and the gathering of the
weights alone; the other figures are those of a run without it.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from eyas.config.schema import TrainSettings
from eyas.drafters.common.batch import PackedBatch
from eyas.drafters.eagle3.model import HEADS, TABLES
from eyas.drafters.eagle3.objective import FusedObjective
from eyas.drafters.eagle3.settings import Settings
from eyas.train.grad_accumulation import add_up_in_slices, add_up_whole
from eyas.train.optim import Stepper, make_optimizers
from eyas.train.ranks import Ranks, join_ranks, leave_ranks
from eyas.train.sharded_params import ShardedParams
from train_step import LLAMA_8B, SMALL, build, make_batch, time_steps


class Runner:
    """One rank's training step, as the training loop takes it."""

    def __init__(
        self, shape: dict[str, int], device: torch.device, ranks: Ranks, num_steps: int, shard: bool
    ) -> None:
        self.draft, self.teacher, self.target_ids = build(shape, device)
        self.settings = TrainSettings(optimizer="adamw", learning_rate=1e-5)
        self.ranks = ranks
        dtype = self.teacher.head.dtype
        self.slices = ShardedParams(self.draft, dtype, device) if shard else None
        parts = (self.draft, self.teacher, self.target_ids, Settings(ttt_steps=num_steps), self.settings)
        self.objective = FusedObjective(*parts, dtype, sharded=shard)
        if self.slices:
            self.objective.hand_over_to(self.slices.add)
        copies = self.objective.copies if device.type == "cuda" else None
        masters = self.slices.masters if self.slices else self.draft.trainable()
        adamw, _ = make_optimizers(masters, self.settings, HEADS, TABLES)
        owners = ranks if shard else None
        self.stepper = Stepper(adamw, self.settings, 10_000, copies, owners=owners)

    def step(self, batches: list[PackedBatch], together: bool) -> None:
        """Take a step, with slices always ``together``."""
        objective, ranks = self.objective, self.ranks
        if self.slices:
            sums = add_up_in_slices(objective, self.slices, batches, len(batches))
        else:
            is_sum = together and ranks.size > 1
            objective.weights.hand_over = (lambda name, sum: ranks.start_adding_up(sum)) if is_sum else None
            sums = add_up_whole(objective, batches, len(batches))
        total = torch.stack(sums).sum(0)
        if together:
            ranks.add_up(total)
            ranks.finish_adding_up()
        self.stepper.step(total[0], total[-1])
        if self.slices:
            self.slices.publish()
        elif not self.stepper.copies:
            objective.refresh()

    def add_up(self) -> None:
        for gradient in self.objective.weights.gradient.values():
            self.ranks.start_adding_up(gradient)
        self.ranks.finish_adding_up()


def median_ms(
    step: Callable[[int], None], options: argparse.Namespace, device: torch.device
) -> tuple[float, list[float]]:
    times = time_steps(step, options.warmup, options.repeat, device)
    return 1e3 * statistics.median(times), [round(1e3 * t, 2) for t in (min(times), max(times))]


def measure(runner: Runner, work: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    counts, share = work.split(":")
    documents, length = (int(n) for n in counts.split("x"))
    ranks, shape = runner.ranks, SMALL if options.small else LLAMA_8B
    batches = [
        make_batch(documents, length, float(share), 1, options.num_steps, shape, device, 100 * ranks.rank + i)
        for i in range(options.batches_per_step)
    ]
    if runner.slices:
        return measure_slices(runner, work, batches, options, device)
    alone, alone_range = 0.0, [0.0]
    ranks.gather(None)
    if ranks.is_first:
        alone, alone_range = median_ms(lambda i: runner.step(batches, together=False), options, device)
    ranks.gather(None)
    apart, _ = median_ms(lambda i: runner.step(batches, together=False), options, device)
    ranks.gather(None)
    # From here on the weights of all ranks are taken to be equal; what they hold does not change the time.
    together, together_range = median_ms(lambda i: runner.step(batches, together=True), options, device)
    ranks.gather(None)
    adding, _ = median_ms(lambda i: runner.add_up(), options, device)
    slowest = max(ranks.gather(together))
    num_tokens = documents * length * options.batches_per_step
    num_bytes = sum(g.numel() * g.element_size() for g in runner.fused.weights.gradient.values())
    out = {
        "work": work,
        "batches_per_step": options.batches_per_step,
        "ranks": ranks.size,
        "alone_ms": round(alone, 2),
        "alone_range_ms": alone_range,
        "apart_ms": [round(t, 2) for t in ranks.gather(apart)],
        "together_ms": round(slowest, 2),
        "together_range_ms": together_range,
        "alone_tokens_per_s": round(1e3 * num_tokens / max(alone, 1e-9)),
        "together_tokens_per_s": round(1e3 * num_tokens * ranks.size / slowest),
        "speedup": round(alone * ranks.size / slowest, 3),
        "efficiency": round(alone / slowest, 4),
        "gradient_mib": round(num_bytes / 2**20, 1),
    }
    if ranks.size > 1:
        out["adding_up_alone_ms"] = round(adding, 2)
        out["adding_up_gib_per_s"] = round(num_bytes / 2**30 / adding * 1e3, 1)
    if device.type == "cuda":
        out["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return out


def measure_slices(
    runner: Runner, work: str, batches: list[PackedBatch], options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    ranks = runner.ranks
    ranks.gather(None)
    together, together_range = median_ms(lambda i: runner.step(batches, together=True), options, device)
    ranks.gather(None)
    assert runner.slices is not None
    publish = runner.slices.publish
    publishing, _ = median_ms(lambda i: publish(), options, device)
    out = {
        "work": work,
        "batches_per_step": options.batches_per_step,
        "ranks": ranks.size,
        "together_ms": round(max(ranks.gather(together)), 2),
        "together_range_ms": together_range,
        "publishing_alone_ms": round(publishing, 2),
    }
    if device.type == "cuda":
        out["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", nargs="+", default=["8x1024:0.5"], metavar="DOCUMENTSxTOKENS:SHARE")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank, a step")
    parser.add_argument("--num-steps", type=int, default=7, help="K")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="a small shape")
    parser.add_argument("--shard", action="store_true", help="slices of masters; needs several ranks")
    options = parser.parse_args()

    is_cuda = torch.cuda.is_available()
    ranks = join_ranks("cuda" if is_cuda else "cpu")
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    runner = Runner(SMALL if options.small else LLAMA_8B, device, ranks, options.num_steps, options.shard)
    if ranks.is_first:
        facts = {
            "device": torch.cuda.get_device_name() if is_cuda else platform.processor(),
            "ranks": ranks.size,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,
            "nccl_settings": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")},
            "K": options.num_steps,
            "date": time.strftime("%Y-%m-%d"),
        }
        print(json.dumps(facts), flush=True)
    try:
        for work in options.work:
            found = measure(runner, work, options, device)
            if ranks.is_first:
                print(json.dumps(found), flush=True)
            if is_cuda:
                torch.cuda.empty_cache()
    finally:
        leave_ranks()


if __name__ == "__main__":
    main()
