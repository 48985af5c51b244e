"""How fast one training step of a block draft is: teacher, blocks, loss, gradients, clip, optimizer.

    python benchmarks/train_step_block.py dflash dspark                  # an 8B target's shape, on a GPU
    python benchmarks/train_step_block.py dflash --peer                  # the same work in speculators 0.9
    python benchmarks/train_step_block.py dflash dspark --small          # a shape for a CPU

A step has ``--rows`` slots (512 blocks of 16, 1168 of 7) over 16 documents of 1024 tokens whose last
half, but 16 tokens, is an answer. ``--peer`` gives speculators' own model the same anchors, tokens and
loss; its masters are fp32 under autocast, its frozen weights bf16. Empty modules do for libraries that it
imports and a step does not use (datasets, openai, wandb). Data is random. Prints a JSON line for each
kind; run each path in a process of its own, for its peak memory.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from eyas import registry
from eyas.config.schema import TrainSettings, draft_settings_of
from eyas.drafters.common.batch import PackedBatch, pack_batch
from eyas.targets.teacher import TeacherHead
from eyas.train.optim import Stepper, make_optimizers
from eyas.types import HiddenStates, TargetSpec, TokenizedSample
from train_step import time_steps

LLAMA_8B = {"D": 4096, "I": 14336, "heads": 32, "kv": 8, "head_dim": 128, "V": 128256, "layers": 5, "aux": 5}
SMALL = {"D": 64, "I": 128, "heads": 4, "kv": 2, "head_dim": 32, "V": 500, "layers": 2, "aux": 3}
DOCUMENTS, LENGTH = 16, 1024


def spec_of(shape: dict[str, int]) -> TargetSpec:
    return TargetSpec(
        model="random",
        revision=None,
        architecture="LlamaForCausalLM",
        hidden_size=shape["D"],
        vocab_size=shape["V"],
        num_layers=32,
        aux_layer_ids=(2, 9, 16, 23, 30)[: shape["aux"]],
        dtype="bfloat16",
        norm_kind="rms",
        norm_eps=1e-5,
        logit_softcap=None,
        logit_scale=1.0,
        tied_head=False,
        eos_token_ids=(1,),
        tokenizer_fingerprint="none",
        template_fingerprint="none",
        weights_fingerprint="none",
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["I"],
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )


def make_states(shape: dict[str, int], length: int, seed: int) -> list[HiddenStates]:
    """Return documents whose last half is the assistant's; states are rows of a pool."""
    generator = np.random.default_rng(seed)
    pool = torch.randn(4096, shape["D"]).bfloat16()
    states = []
    for document in range(DOCUMENTS):
        # speculators takes no anchor whose block would reach beyond the packed row.
        mask = (np.arange(length) >= length // 2) & (np.arange(length) < length - 16)
        ids = generator.integers(2, shape["V"], length).astype(np.int32)
        aux = pool[torch.from_numpy(generator.integers(0, len(pool), (length, shape["aux"])))]
        last = pool[torch.from_numpy(generator.integers(0, len(pool), length))]
        states.append(HiddenStates.select(TokenizedSample(f"d{document}", ids, mask), aux, last))
    return states


def eyas_step(
    kind: str, shape: dict[str, int], batches: list[PackedBatch[Any]], settings: Any, args: Any, device: Any
) -> Callable[[int], None]:
    drafter, spec = registry.drafter(kind), spec_of(shape)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        draft = drafter.build(drafter.config_for(spec, settings, spec.vocab_size))
        head = torch.randn(shape["V"], shape["D"], dtype=dtype) * 3 * shape["D"] ** -0.5
        embedding = torch.randn(shape["V"], shape["D"], dtype=dtype) * 0.02
        target_ids = torch.arange(shape["V"])
    teacher = TeacherHead(
        torch.ones(shape["D"], dtype=dtype, device=device), head, embedding, "rms", 1e-5, None, 1.0
    )
    draft.embed_tokens.weight = torch.nn.Parameter(embedding, requires_grad=False)
    draft.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    for parameter in draft.trainable().values():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    train = TrainSettings(optimizer=args.optimizer, learning_rate=1e-4)
    objective = drafter.objective(draft, teacher, target_ids, settings, train, dtype, device, sharded=False)
    adamw, muon = make_optimizers(draft.trainable(), train, drafter.heads, drafter.tables)
    stepper = Stepper(adamw, train, 1000, objective.copies, muon)

    def step(i: int) -> None:
        objective.start()
        objective.expect_last()
        sums = objective.backward(batches[i % len(batches)])
        objective.finish()
        stepper.step(sums[0], sums[-1])

    return step


def peer_step(
    kind: str, shape: dict[str, int], batches: list[PackedBatch[Any]], settings: Any, args: Any, device: Any
) -> Callable[[int], None]:
    """Return a step of speculators' own model, as its trainer takes it, with our anchors."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import core
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    if kind == "dflash":
        from speculators.models.dflash import DFlashSpeculatorConfig as Config
        from speculators.models.dflash.core import DFlashDraftModel as Model

        further, loss = {}, "ce"
        named = {"per_position_loss_weight": "dpace", "dpace_alpha": settings.dpace_alpha}
    else:
        from speculators.models.dspark.config import DSparkSpeculatorConfig as Config
        from speculators.models.dspark.core import DSparkDraftModel as Model

        further, loss = {"markov_rank": settings.markov_rank}, '{"ce": 0.1, "tv": 0.9}'
        tv_loss = resolve_loss_config("tv", args.peer_loss)["tv"][0]
        named = {"gamma": settings.gamma, "tv_loss_fn": tv_loss}
    layer = Qwen3Config(
        hidden_size=shape["D"],
        intermediate_size=shape["I"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["head_dim"],
        vocab_size=shape["V"],
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        use_sliding_window=True,
        sliding_window=settings.sliding_window,
        layer_types=["sliding_attention"] * shape["layers"],
    )
    layer._attn_implementation = "simple_flex_attention" if device.type == "cuda" else "eager"
    held = settings.block_size - (kind == "dflash")
    config = Config(
        transformer_layer_config=layer,
        draft_vocab_size=shape["V"],
        block_size=settings.block_size,
        aux_hidden_state_layer_ids=list(spec_of(shape).aux_layer_ids),
        mask_token_id=0,
        sliding_window_non_causal=False,
        sample_from_anchor=kind == "dspark",
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=held)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **further,
    )
    torch.manual_seed(0)
    with device:
        model = Model(config)
    for name, parameter in model.named_parameters():
        frozen = "verifier" in name or "embed_tokens" in name or name.startswith("lm_head")
        parameter.data.normal_(0, 0.02) if parameter.ndim > 1 else parameter.data.fill_(1.0)
        if frozen:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.bfloat16()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    loss_config = resolve_loss_config(loss, args.peer_loss)
    chosen: list[torch.Tensor] = []
    # Its anchors are drawn inside; ours take their place, so that both do the same work.
    core.select_anchors = lambda mask, num, size: (chosen[0], torch.ones_like(chosen[0], dtype=torch.bool))

    def inputs_of(batch: PackedBatch[Any]) -> dict[str, Any]:
        mask = torch.zeros_like(batch.tokens)
        mask[batch.plan.supervised] = 1
        mask[batch.plan.supervised + 1] = 1
        last = torch.zeros(len(batch.tokens), shape["D"], dtype=batch.last.dtype, device=device)
        last[batch.plan.supervised] = batch.last
        return {
            "hidden_states": batch.aux.flatten(1)[None],
            "input_ids": batch.tokens[None],
            "loss_mask": mask[None],
            "verifier_last_hidden_states": last[None],
            "document_ids": batch.documents[None],
            "position_ids": batch.positions[None],
        }

    inputs = [inputs_of(batch) for batch in batches]

    def step(i: int) -> None:
        chosen[:] = [batches[i % len(batches)].plan.anchors]
        with torch.autocast(device.type, torch.bfloat16):
            _, result, _ = model(
                **inputs[i % len(inputs)], max_anchors=len(chosen[0]), loss_config=loss_config, **named
            )
        result.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=["dflash", "dspark"])
    parser.add_argument("--rows", type=int, default=8192, help="slots of all blocks")
    parser.add_argument("--peer", action="store_true", help="speculators instead of eyas")
    parser.add_argument("--peer-loss", default="eager", choices=["eager", "fused"])
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"])
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a small shape")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, length = (SMALL, 64) if args.small else (LLAMA_8B, LENGTH)
    for kind in args.kinds:
        own = draft_settings_of(kind)()
        num_anchors = (args.rows if not args.small else 512) // own.block_size // DOCUMENTS
        chosen = {"num_layers": shape["layers"], "num_anchors": num_anchors, "mask_token_id": 0}
        settings = draft_settings_of(kind)(**chosen)
        drafter = registry.drafter(kind)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        batches = [
            pack_batch(
                make_states(shape, length, seed),
                partial(drafter.plan, settings=settings, draw=seed),
                device,
                dtype,
            )
            for seed in range(2)
        ]
        make = peer_step if args.peer else eyas_step
        step = make(kind, shape, batches, settings, args, device)
        started = time.perf_counter()
        step(0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        first = time.perf_counter() - started
        times = time_steps(step, args.warmup, args.repeat, device)
        median = statistics.median(times)
        out: dict[str, Any] = {
            "path": f"speculators, {args.peer_loss} loss" if args.peer else "eyas",
            "kind": kind,
            "shape": shape,
            "block_size": settings.block_size,
            "blocks": len(batches[0].plan.anchors),
            "slots": len(batches[0].plan.anchors) * settings.block_size,
            "supervised": batches[0].plan.num_supervised,
            "optimizer": "adamw" if args.peer else args.optimizer,
            "tokens_per_s": round(DOCUMENTS * length / median),
            "ms": round(1e3 * median, 2),
            "ms_range": [round(1e3 * min(times), 2), round(1e3 * max(times), 2)],
            "first_step_s": round(first, 1),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
            "torch": torch.__version__,
        }
        if device.type == "cuda":
            out["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            out["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        print(json.dumps(out), flush=True)
        if args.profile and device.type == "cuda":
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                step(0)
                torch.cuda.synchronize()
            averages = profile.key_averages()
            print(averages.table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70))
        del batches, step
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
