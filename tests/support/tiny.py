"""Tiny random targets, written as the model folders that a user would name."""

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from eyas import registry
from eyas.config.schema import TargetSettings, TrainSettings
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.drafters.eagle3.settings import Settings
from eyas.engines.base import Prompt, Sampling
from eyas.targets.spec import read_target
from eyas.targets.teacher import read_teacher
from eyas.train.loop import Trainer
from eyas.types import HiddenStates, TargetSpec, TokenizedSample, VocabMap
from memory_store import MemoryStore

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 300
_CORPUS = ["the quick brown fox jumps over the lazy dog and the user asks the assistant a question"]


def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of ``VOCAB_SIZE`` ids: any text, small."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        # transformers adds the last one to any tokenizer of a Qwen2 model that lacks it.
        special_tokens=[IM_START, IM_END, "<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=IM_START, eos_token=IM_END, pad_token=IM_END
    )
    fast.chat_template = chat_template
    return fast


def make_target(
    folder: Path,
    *,
    model_type: str = "llama",
    tied: bool = False,
    num_layers: int = 6,
    seed: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
    **settings: Any,
) -> Path:
    """Write a random model of width 32 in fp32 with its tokenizer, and return its folder.

    Weights are ten times larger than a fresh model's, so that its answers vary.
    """
    tokenizer = make_tokenizer(chat_template)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the least that vLLM's attention takes on a CPU
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(model_type, **(shape | settings))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                # A norm of ones would hide whether anybody applies it.
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        if not tied:
            # Some answers end by themselves, others meet the length limit.
            model.lm_head.weight[tokenizer.eos_token_id] *= 1.8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def spec_of(folder: Path, aux_layer_ids: tuple[int, ...] | None = None) -> TargetSpec:
    return read_target(folder, TargetSettings(model=str(folder), aux_layer_ids=aux_layer_ids))


def make_spec(**changes: Any) -> TargetSpec:
    """Return a description of a target that is nowhere on disk: for the fake engine and the store."""
    facts: dict[str, Any] = {
        "model": "fake",
        "revision": None,
        "architecture": "LlamaForCausalLM",
        "hidden_size": 16,
        "vocab_size": 50,
        "num_layers": 8,
        "aux_layer_ids": (2, 4, 5),
        "dtype": "float32",
        "norm_kind": "rms",
        "norm_eps": 1e-5,
        "logit_softcap": None,
        "logit_scale": 1.0,
        "tied_head": False,
        "eos_token_ids": (1,),
        "tokenizer_fingerprint": "tokenizer",
        "template_fingerprint": "template",
        "weights_fingerprint": "weights",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 32,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return TargetSpec(**(facts | changes))


def random_samples(num: int, vocab_size: int, seed: int = 0, longest: int = 24) -> list[TokenizedSample]:
    """Return samples of several lengths: a prompt, an answer, some of them cut, some with two answers."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(num):
        length = int(rng.integers(5, longest))
        prompt = int(rng.integers(1, length - 2))
        mask = np.arange(length) >= prompt
        if length > 16 and number % 2:
            mask[length // 2 : length // 2 + 3] = False
        cut = number % 3 == 0
        ids = rng.integers(0, vocab_size, length).astype(np.int32)
        if not (mask & np.append(mask[1:], cut)).any():
            mask[-3:] = True
        samples.append(TokenizedSample(f"sample-{number}", ids, mask, cut))
    return samples


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answered_states(engine: Any, num: int, max_new_tokens: int, seed: int = 0) -> list[HiddenStates]:
    """Let the target answer random prompts greedily and return its states, as the pipeline would."""
    rng = np.random.default_rng(seed)
    prompts = [
        Prompt(f"p{i}", tuple(rng.integers(3, VOCAB_SIZE, rng.integers(2, 12)).tolist())) for i in range(num)
    ]
    prompt_ids = {p.prompt_id: p.token_ids for p in prompts}
    samples = []
    for answer in engine.generate(prompts, Sampling(max_new_tokens)):
        ids = np.array([*prompt_ids[answer.prompt_id], *answer.token_ids], dtype=np.int32)
        mask = np.arange(len(ids)) >= len(prompt_ids[answer.prompt_id])
        cut = answer.finish_reason == "length"
        if mask.sum() + cut >= 2:
            samples.append(TokenizedSample(answer.prompt_id, ids, mask, cut))
    states = {item.sample.sample_id: item for item in engine.capture(samples)}
    return [states[p.prompt_id] for p in prompts if p.prompt_id in states]


def make_trainer(
    root: Path,
    target: Path,
    train: Sequence[HiddenStates],
    held_out: Sequence[HiddenStates],
    vocab_size: int = 120,
    spec: TargetSpec | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
    hidden_size: int | None = None,
    num_layers: int = 1,
    attention: Literal["gqa", "mla"] = "gqa",
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    sliding_window: int | None = None,
    **settings: Any,
) -> Trainer:
    """Return a trainer of a draft that starts from ``target``, as the train stage makes it."""
    root.mkdir(parents=True, exist_ok=True)
    spec = spec or spec_of(target)
    teacher = read_teacher(target, spec)
    answers = np.concatenate([s.sample.input_ids[s.sample.loss_mask] for s in train])
    counts = np.bincount(answers, minlength=spec.vocab_size)
    vocab = VocabMap(np.sort(np.argsort(-counts, kind="stable")[:vocab_size]), spec.vocab_size)
    shape = draft_config_for(
        spec,
        len(vocab),
        fc_norm=fc_norm,
        norm_output=norm_output,
        hidden_size=hidden_size,
        num_layers=num_layers,
        attention=attention,
        sliding_window=sliding_window,
    )
    draft = Eagle3Draft(
        dataclasses.replace(shape, norm_before_residual=norm_before_residual, norm_before_fc=norm_before_fc)
    )
    draft.initialise(teacher.embedding, teacher.head[vocab.target_ids], teacher.norm_weight, {}, seed=0)
    defaults: dict[str, Any] = {"ttt_steps": 3, "batch_tokens": 128, "num_epochs": 2}
    defaults |= {"optimizer": "adamw", "learning_rate": 3e-3}
    of_train, of_draft = split_settings(defaults | settings)
    return Trainer(
        drafter=registry.drafter("eagle3"),
        draft=draft,
        draft_settings=Settings(**of_draft),
        teacher=teacher,
        vocab=vocab,
        train_states=MemoryStore(spec, train),
        held_out_states=MemoryStore(spec, held_out),
        settings=TrainSettings(**of_train),
        seed=0,
        root=root,
        device=torch.device("cpu"),
    )


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of ``train``, and those of the draft."""
    of_train = {key: value for key, value in settings.items() if key in TrainSettings.model_fields}
    return of_train, {key: value for key, value in settings.items() if key not in of_train}
