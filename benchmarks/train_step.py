"""How fast one training step is: teacher, unroll, gradients, clip, AdamW.

    python benchmarks/train_step.py --work 8x1024:0.5 8x1024:0.9 1x8192:0.5 1x32768:0.25
    python benchmarks/train_step.py --small            # a shape for a CPU

``DOCUMENTSxTOKENS:SHARE`` is a batch of that many documents, each ending in (or, with ``--answers`` n,
holding n) contiguous answers that cover the share. Data is random; head rows outside the draft
vocabulary are damped so that, as with real targets, nearly every argmax is inside it. Prints JSON.
"""

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from eyas.config.schema import TrainSettings
from eyas.drafters.common.batch import PackedBatch, pack_batch
from eyas.drafters.common.teacher_targets import teacher_targets
from eyas.drafters.eagle3.config import DraftConfig
from eyas.drafters.eagle3.fused.unroll import FusedUnroll
from eyas.drafters.eagle3.model import HEADS, TABLES, Eagle3Draft
from eyas.drafters.eagle3.ttt_rows import rows_of
from eyas.drafters.eagle3.unroll import run_unroll
from eyas.targets.teacher import TeacherHead
from eyas.train.optim import Stepper, make_optimizers
from eyas.types import HiddenStates, TokenizedSample

LLAMA_8B = {"D": 4096, "I": 14336, "heads": 32, "kv": 8, "head_dim": 128, "V": 128256, "W": 32000}
SMALL = {"D": 128, "I": 256, "heads": 4, "kv": 2, "head_dim": 32, "V": 1000, "W": 300}


def build(shape: dict[str, int], device: torch.device) -> tuple[Eagle3Draft, TeacherHead, torch.Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = DraftConfig(
        hidden_size=shape["D"],
        target_hidden_size=shape["D"],
        num_aux_layers=3,
        vocab_size=shape["W"],
        target_vocab_size=shape["V"],
        intermediate_size=shape["I"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["head_dim"],
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    torch.manual_seed(0)
    with device:
        draft = Eagle3Draft(config)
        target_ids = torch.randperm(shape["V"])[: shape["W"]].sort().values
        head = torch.randn(shape["V"], shape["D"], dtype=dtype) * 3 * shape["D"] ** -0.5
        outside = torch.ones(shape["V"], dtype=torch.bool)
        outside[target_ids] = False
        head[outside] *= 0.7
        embedding = torch.randn(shape["V"], shape["D"], dtype=dtype) * 0.02
        norm = torch.ones(shape["D"], dtype=dtype)
    draft.embed_tokens.weight = torch.nn.Parameter(embedding, requires_grad=False)
    with torch.no_grad():
        draft.lm_head.weight.copy_(head[target_ids])
    return draft, TeacherHead(norm, head, embedding, "rms", 1e-5, None, 1.0), target_ids


def make_batch(
    documents: int,
    length: int,
    share: float,
    answers: int,
    num_steps: int,
    shape: dict[str, int],
    device: torch.device,
    seed: int,
) -> PackedBatch:
    generator = np.random.default_rng(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # Rows of a pool, in random order: as random to the card, and much sooner ready.
    pool = torch.randn(4096, shape["D"]).to(dtype)
    states = []
    for document in range(documents):
        mask = np.zeros(length, dtype=bool)
        turn, answer = length // answers, round(length * share / answers)
        for a in range(answers):
            mask[(a + 1) * turn - answer : (a + 1) * turn] = True
        ids = generator.integers(0, shape["V"], length).astype(np.int32)
        sample = TokenizedSample(f"d{document}", ids, mask)
        aux = pool[torch.from_numpy(generator.integers(0, len(pool), (length, 3)))]
        last = pool[torch.from_numpy(generator.integers(0, len(pool), length))]
        states.append(HiddenStates.select(sample, aux, last))
    return pack_batch(states, rows_of(num_steps), device, dtype)


def step_flops(batch: PackedBatch, shape: dict[str, int]) -> float:
    """Floating-point operations that the row plan cannot avoid, in matrix products."""
    D, I, W, V = shape["D"], shape["I"], shape["W"], shape["V"]  # noqa: E741
    q, kv = shape["heads"] * shape["head_dim"], 2 * shape["kv"] * shape["head_dim"]
    rows, keys = [len(r) for r in batch.plan.rows], len(batch.plan.keys)
    per_row = 2 * (2 * D * q + q * D + 3 * D * I + D * W)
    total = 3.0 * per_row * sum(rows) + 3 * 2 * 2 * D * kv * (sum(rows[1:]) + keys)
    total += 2 * 2 * 3 * D * D * len(batch.tokens)  # fc has no gradient of its input
    total += 2 * D * V * len(batch.last)
    seen = sum(int((batch.positions[r] + 1).sum()) for r in batch.plan.rows)
    return total + 3.5 * 4 * q * seen


def share_in_draft(teacher: TeacherHead, last: torch.Tensor, target_ids: torch.Tensor) -> float:
    """Return the share of rows whose argmax the draft vocabulary holds."""
    return float(teacher_targets(teacher, last, target_ids, False, False).in_draft.float().mean())


def time_steps(step: Callable[[int], None], warmup: int, repeat: int, device: torch.device) -> list[float]:
    for i in range(warmup):
        step(i)
    times = []
    if device.type != "cuda":
        for i in range(repeat):
            started = time.perf_counter()
            step(i)
            times.append(time.perf_counter() - started)
        return times
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    marks[0].record()
    for i in range(repeat):
        step(i)
        marks[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def matmul_rate(repeat: int) -> float:
    """TFLOP/s of ``repeat`` large bf16 products on random data, the median of the last half.

    A few run at the clock of a cool card; a second of them at the clock that its power limit allows.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = time_steps(lambda i: _into(a, b, out), 5, repeat, a.device)
    return round(2 * 8192**3 / statistics.median(times[repeat // 2 :]) / 1e12, 1)


def _into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", nargs="+", default=["8x1024:0.5"], metavar="DOCUMENTSxTOKENS:SHARE")
    parser.add_argument("--answers", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--loss", default="kl", choices=["kl", "lk", "hybrid"])
    parser.add_argument("--path", default="fused", choices=["fused", "plain"])
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"])
    parser.add_argument("--recompute", action="store_true", help="keep nothing of the MLP")
    parser.add_argument("--small", action="store_true", help="a small shape")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SMALL if args.small else LLAMA_8B
    draft, teacher, target_ids = build(shape, device)
    settings = TrainSettings(learning_rate=1e-4, optimizer=args.optimizer)
    dtype = teacher.head.dtype
    runner = FusedUnroll(draft, dtype, recompute=args.recompute) if args.path == "fused" else None
    is_cuda = device.type == "cuda"
    copies = runner.weights.copies if runner and is_cuda else None
    adamw, muon = make_optimizers(draft.trainable(), settings, HEADS, TABLES)
    stepper = Stepper(adamw, settings, 1000, copies, muon)
    facts = {
        "device": torch.cuda.get_device_name() if is_cuda else platform.processor(),
        "torch": torch.__version__,
        "path": args.path,
        "loss": args.loss,
        "optimizer": args.optimizer,
        "recompute": args.recompute,
        "ttt_steps": args.num_steps,
        "shape": shape,
        "matmul_tflops": matmul_rate(20) if is_cuda else None,
        "matmul_tflops_sustained": matmul_rate(1500) if is_cuda else None,
    }
    print(json.dumps(facts), flush=True)

    for work in args.work:
        counts, share = work.split(":")
        documents, length = (int(n) for n in counts.split("x"))
        batches = [
            make_batch(documents, length, float(share), args.answers, args.num_steps, shape, device, seed)
            for seed in range(2)
        ]

        def step(i: int, batches: list[PackedBatch] = batches) -> None:
            batch = batches[i % len(batches)]
            if runner is None:
                draft.zero_grad(set_to_none=True)
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    result = run_unroll(draft, teacher, target_ids, batch, 0.8, args.loss, args.recompute)
                result.loss.backward()
            else:
                targets = teacher_targets(teacher, batch.last, target_ids, False, args.loss != "kl")
                runner.weights.start()
                result = runner.run(batch, targets, target_ids, 0.8, args.loss)
                runner.weights.finish()
            stepper.step(result.loss, torch.full_like(result.loss, batch.num_supervised))
            if runner is not None and not is_cuda:
                runner.weights.refresh()

        started = time.perf_counter()
        step(0)
        if is_cuda:
            torch.cuda.synchronize()
        first = time.perf_counter() - started
        times = time_steps(step, args.warmup, args.repeat, device)
        median = statistics.median(times)
        flops = step_flops(batches[0], shape)
        rows = [len(r) for r in batches[0].plan.rows]
        out = {
            "work": work,
            "answers": args.answers,
            "tokens_per_s": round(documents * length / median),
            "ms": round(1e3 * median, 2),
            "ms_range": [round(1e3 * min(times), 2), round(1e3 * max(times), 2)],
            "first_step_s": round(first, 1),
            "rows": rows,
            "tflop": round(flops / 1e12, 2),
            "tflops": round(flops / median / 1e12, 1),
            "in_draft": float(
                teacher_targets(teacher, batches[0].last[:256], target_ids, False, False)
                .in_draft.float()
                .mean()
            ),
        }
        if is_cuda:
            out["share_of_matmul_rate"] = round(out["tflops"] / facts["matmul_tflops"], 3)
            out["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            out["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        print(json.dumps(out), flush=True)
        if args.profile and is_cuda:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                step(0)
                torch.cuda.synchronize()
            print(
                profile.key_averages().table(
                    sort_by="cuda_time_total", row_limit=40, max_name_column_width=70
                )
            )
        del batches, step
        if is_cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
