"""What the ranks of a test do: importable in a fresh process, results through files."""

import pickle
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eyas import registry
from eyas.config.schema import TrainSettings
from eyas.drafters.eagle3.objective import FusedObjective
from eyas.drafters.eagle3.settings import Settings
from eyas.train.loop import Trainer
from eyas.train.ranks import Ranks
from eyas.types import HiddenStates, TargetSpec, VocabMap
from machine import clean_processes
from memory_store import MemoryStore
from tiny import split_settings
from train_cases import EPS, THETA, Case, make_case

LENGTHS = (20, 31, 17, 24, 29, 16, 22, 27, 30, 18, 25, 21, 19, 26, 23, 28)


def run_ranks(
    size: int, folder: Path, work: Callable[..., Any], *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """Return what ``work(ranks, *arguments)`` returned on each of ``size`` ranks."""
    context = clean_processes()
    folder.mkdir(exist_ok=True)
    processes = [
        context.Process(target=_rank_main, args=(rank, size, folder, backend, work, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)  # a busy machine takes minutes to start Ray's processes
    for process in processes:
        if process.is_alive():
            process.kill()
    results = [pickle.loads((folder / f"rank-{r}").read_bytes()) for r in range(size)]
    for result in results:
        if isinstance(result, str) and result.startswith("Traceback"):
            raise AssertionError(result)
    return results


def _rank_main(
    rank: int, size: int, folder: Path, backend: str, work: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    try:
        result = work(Ranks(rank, size), *arguments)
    except BaseException:
        result = traceback.format_exc()
    (folder / f"rank-{rank}").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def spec_of(case: Case) -> TargetSpec:
    config = case.draft.config
    return TargetSpec(
        model="random",
        revision=None,
        architecture="LlamaForCausalLM",
        hidden_size=config.target_hidden_size,
        vocab_size=config.target_vocab_size,
        num_layers=8,
        aux_layer_ids=(2, 4, 5),
        dtype="float32",
        norm_kind="rms",
        norm_eps=EPS,
        logit_softcap=None,
        logit_scale=1.0,
        tied_head=False,
        eos_token_ids=(1,),
        tokenizer_fingerprint="",
        template_fingerprint="",
        weights_fingerprint="",
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )


def trainer_of(
    case: Case,
    root: Path,
    states: list[HiddenStates],
    device: str = "cpu",
    ranks: Ranks | None = None,
    **settings: Any,
) -> Trainer:
    root.mkdir(exist_ok=True)
    spec = spec_of(case)
    defaults: dict[str, Any] = {
        "ttt_steps": 3,
        "batch_tokens": 32,
        "num_epochs": 1,
        "optimizer": "adamw",  # Muon rounds to bfloat16 on its way: it has tests of its own
        "learning_rate": 1e-3,
        "save_every": 100,
        "validate_every": 100,
    }
    of_train, of_draft = split_settings(defaults | settings)
    return Trainer(
        drafter=registry.drafter("eagle3"),
        draft=case.draft,
        draft_settings=Settings(**of_draft),
        teacher=case.teacher,
        vocab=VocabMap(case.target_ids.numpy(), spec.vocab_size),
        train_states=MemoryStore(spec, states),
        held_out_states=MemoryStore(spec, states[:3]),
        settings=TrainSettings(**of_train),
        seed=0,
        root=root,
        device=torch.device(device),
        ranks=ranks or Ranks(),
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().cpu().clone() for n, p in trainer.draft.trainable().items()}


def use_written_out_backward(trainer: Trainer) -> None:
    """Train with the fast path's own backward, on the operations that it has for a CPU."""
    slices, ranks = trainer.slices, trainer.ranks
    parts = (trainer.draft, trainer.teacher, trainer.target_ids, trainer.draft_settings, trainer.settings)
    trainer.objective = fused = FusedObjective(*parts, torch.float32, sharded=slices is not None)
    if slices:
        fused.hand_over_to(slices.add)
    elif ranks.size > 1:
        fused.hand_over_to(lambda name, gradient: ranks.start_adding_up(gradient))
    step = trainer.stepper.step

    def step_and_copy(*arguments: Any) -> Any:
        outcome = step(*arguments)
        fused.refresh()
        return outcome

    trainer.stepper.step = step_and_copy  # type: ignore[method-assign]


def kept_bytes(trainer: Trainer) -> int:
    """Return what masters, gradient sums and moments take on this rank."""
    kept = [t for p in trainer.masters.values() for t in (p, p.grad) if t is not None]
    kept += [t for o in trainer.optimizers for state in o.state.values() for t in state.values()]
    return sum(t.numel() * t.element_size() for t in kept)


def train_together(
    ranks: Ranks,
    root: Path,
    written_out: bool,
    stop_after: int | None,
    poisoned: tuple[int, ...] = (),
    device: str = "cpu",
    shape: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a small draft for two epochs of four steps and return what came of it."""
    case = make_case(3, LENGTHS, head_dim=16, **(shape or {}))
    states = case.states
    for i in poisoned:
        states[i] = HiddenStates(
            states[i].sample, torch.full_like(states[i].aux, float("nan")), states[i].last
        )
    defaults: dict[str, Any] = {"batches_per_step": 4, "num_epochs": 2, "validate_every": 3, "save_every": 2}
    trainer = trainer_of(case, root, states, device, ranks, **(defaults | settings))
    if written_out:
        use_written_out_backward(trainer)
    trainer.run(stop_after)
    return {
        "weights": weights(trainer),
        "history": trainer.history,
        "num_batches": len(trainer.batches),
        "shares": [len(share) for share in trainer.share],
        "bytes": kept_bytes(trainer),
    }
