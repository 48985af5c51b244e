"""How fast one EAGLE-3 training step of another project is, for the same work as ``train_step.py``.

    pip install --target /tmp/peers --no-deps speculators==0.9.0 specforge==0.2.0
    PYTHONPATH=/tmp/peers python benchmarks/peers_train_step.py speculators --work 8x1024:0.5
    PYTHONPATH=/tmp/peers python benchmarks/peers_train_step.py specforge --work 8x1024:0.5

Forward, backward, gradient clipping and a fused AdamW step of each project's own modules, in bfloat16
autocast over float32 parameters, on random data. Packages that the modules import and do not need for a step
(datasets, wandb) are replaced by empty ones where they are missing. speculators trains no head, SpecForge
trains it. Prints one JSON line for each work: median seconds, tokens/s, peak memory.
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import statistics
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig

# Llama-3.1-8B's shape, as in train_step.py.
SHAPE = {"D": 4096, "I": 14336, "heads": 32, "kv": 8, "V": 128256, "W": 32000}
STEP_DECAY = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--work", nargs="+", default=["8x1024:0.5"], metavar="DOCUMENTSxTOKENS:SHARE")
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=10)
    args = parser.parse_args()
    for name in ("datasets", "wandb", "hs_connectors", "openai", "yunchang", "sglang", "flash_attn"):
        replace_missing(name)
    for work in args.work:
        counts, share = work.split(":")
        documents, length = (int(n) for n in counts.split("x"))
        torch.manual_seed(0)
        step = PEERS[args.peer](documents, length, float(share), args.ttt_steps)
        times = time_steps(step, args.warmup, args.repeat)
        median = statistics.median(times)
        print(
            json.dumps(
                {
                    "peer": args.peer,
                    "version": importlib.metadata.version(args.peer),
                    "device": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "work": work,
                    "ttt_steps": args.ttt_steps,
                    "shape": SHAPE,
                    "median_s": round(median, 4),
                    "spread_s": [round(min(times), 4), round(max(times), 4)],
                    "tokens_per_s": round(documents * length / median),
                    "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                }
            ),
            flush=True,
        )
        del step
        torch.cuda.empty_cache()


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=SHAPE["D"],
        intermediate_size=SHAPE["I"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["kv"],
        head_dim=SHAPE["D"] // SHAPE["heads"],
        vocab_size=SHAPE["V"],
        num_hidden_layers=1,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        pad_token_id=0,
    )


def vocabulary() -> tuple[torch.Tensor, torch.Tensor]:
    """Return t2d [V] bool and d2t [W] offsets of a random draft vocabulary."""
    ids = torch.randperm(SHAPE["V"])[: SHAPE["W"]].sort().values
    t2d = torch.zeros(SHAPE["V"], dtype=torch.bool)
    t2d[ids] = True
    return t2d, ids - torch.arange(SHAPE["W"])


def loss_mask(length: int, share: float) -> torch.Tensor:
    """Return one document's mask [T]: its last ``share`` is supervised."""
    return torch.arange(length, device="cuda") >= int(length * (1 - share))


def randomise(module: torch.nn.Module, frozen: tuple[str, ...]) -> list[torch.nn.Parameter]:
    """Fill all parameters with noise, freeze those whose name holds one of ``frozen``; return the others."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            torch.nn.init.ones_(parameter)
        if any(part in name for part in frozen):
            parameter.requires_grad_(False)
    return [p for p in module.parameters() if p.requires_grad]


def stepper(parameters: list[torch.nn.Parameter], loss_of: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def speculators_step(documents: int, length: int, share: float, ttt_steps: int) -> Callable[[], None]:
    """The step of speculators' ``Eagle3DraftModel``: head frozen, its own default loss (eager: its Triton
    loss does not compile with every Triton)."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = llama_config()
    layer._attn_implementation = "simple_flex_attention"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=SHAPE["W"],
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        embed_requires_grad=False,
        eagle_aux_hidden_state_layer_ids=[2, 16, 29],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    with torch.device("cuda"):
        model = Eagle3DraftModel(config)
    model.load_vocab_mappings(*vocabulary())
    parameters = randomise(model.cuda().float(), ("verifier", "embed", "lm_head"))
    losses = resolve_loss_config("kl_div", "eager")
    tokens, D = documents * length, SHAPE["D"]
    fixed = {
        "document_ids": torch.arange(documents, device="cuda").repeat_interleave(length)[None],
        "position_ids": torch.arange(length, device="cuda").repeat(documents)[None],
        "loss_mask": loss_mask(length, share).repeat(documents)[None],
    }

    def loss_of() -> torch.Tensor:
        _, loss, _ = model(
            hidden_states=torch.randn(1, tokens, 3 * D, device="cuda", dtype=torch.bfloat16),
            verifier_last_hidden_states=torch.randn(1, tokens, D, device="cuda", dtype=torch.bfloat16),
            input_ids=torch.randint(0, SHAPE["V"], (1, tokens), device="cuda"),
            ttt_steps=ttt_steps,
            ttt_step_loss_decay=STEP_DECAY,
            loss_config=losses,
            **fixed,
        )
        return loss

    return stepper(parameters, loss_of)


def specforge_step(documents: int, length: int, share: float, ttt_steps: int) -> Callable[[], None]:
    """The step of SpecForge's ``OnlineEagle3Model``, the target's logits computed from its last states."""
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    config = llama_config()
    config.draft_vocab_size = SHAPE["W"]
    config.rope_scaling = None
    with torch.device("cuda"):
        draft = LlamaForCausalLMEagle3(config, attention_backend="flex_attention")
    model = OnlineEagle3Model(draft, length=ttt_steps, attention_backend="flex_attention").cuda()
    t2d, d2t = vocabulary()
    draft.t2d.copy_(t2d)
    draft.d2t.copy_(d2t)
    parameters = randomise(model, ("embed",))
    head = torch.randn(SHAPE["V"], SHAPE["D"], device="cuda", dtype=torch.bfloat16) * 0.02
    mask = loss_mask(length, share).long()[None].repeat(documents, 1)
    D = SHAPE["D"]

    def loss_of() -> torch.Tensor:
        last = torch.randn(documents, length, D, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            target = last @ head.T
        losses: list[Any] = model(
            input_ids=torch.randint(0, SHAPE["V"], (documents, length), device="cuda"),
            attention_mask=torch.ones_like(mask),
            target=target,
            loss_mask=mask[..., None],
            hidden_states=torch.randn(documents, length, 3 * D, device="cuda", dtype=torch.bfloat16),
        )[0]
        return torch.stack([STEP_DECAY**k * loss for k, loss in enumerate(losses)]).sum()

    return stepper(parameters, loss_of)


PEERS = {"speculators": speculators_step, "specforge": specforge_step}


def time_steps(step: Callable[[], None], warmup: int, repeat: int) -> list[float]:
    """Return the seconds of each of ``repeat`` steps, by events on the device."""
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def replace_missing(name: str) -> None:
    """Put an empty module in the place of a package that is not installed."""
    if importlib.util.find_spec(name) is None:
        stub: Any = types.ModuleType(name)
        stub.__path__ = []
        stub.__getattr__ = lambda attribute: type(attribute, (), {})
        sys.modules[name] = stub


if __name__ == "__main__":
    main()
