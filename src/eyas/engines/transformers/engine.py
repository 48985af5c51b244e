"""The reference engine: transformers in this process, on CPU or one GPU."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.utils import logging as transformers_logging

from eyas.engines.base import ProbeOutput, Prompt, Sampling
from eyas.engines.gqa_attention import use_grouped_attention
from eyas.engines.hidden_state_hooks import HiddenStateHooks, text_decoder
from eyas.errors import ContractError, UserError
from eyas.targets.config import is_of_folder, read_config
from eyas.types import Completion, Failure, HiddenStates, TargetSpec, TokenizedSample

# Kinds of layers whose cache can be cut; others keep a running state (linear attention, state space).
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


class TransformersEngine:
    """Runs the target with transformers.

    ``batch_tokens`` bounds a capture batch (padding included); ``batch_size`` bounds the samples
    computed together, and the prompts answered together.
    """

    streams = False

    def __init__(
        self,
        folder: Path,
        spec: TargetSpec,
        *,
        batch_tokens: int = 4096,
        batch_size: int = 32,
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        self.spec = spec
        self.batch_tokens = batch_tokens
        self.batch_size = batch_size
        self.device = torch.device(device)
        # Its bar for loading would run into our own lines, and fill a log file.
        transformers_logging.disable_progress_bar()
        self.model = load_model(folder, getattr(torch, spec.dtype), trust_remote_code)
        self.model.eval().requires_grad_(False).to(self.device)
        use_grouped_attention(self.model)

    def capture(self, samples: Iterable[TokenizedSample]) -> Iterator[HiddenStates | Failure]:
        """Compute the states of all samples, batched by length; memory is bounded by one batch."""
        for batch in batches_by_length(list(samples), self.batch_tokens, self.batch_size):
            yield from self._capture_batch(batch)

    @torch.inference_mode()
    def probe_outputs(self, samples: Iterable[TokenizedSample]) -> list[ProbeOutput | Failure]:
        """Capture with the model's own next token, from a second pass through decoder and head."""
        out: list[ProbeOutput | Failure] = []
        for states in self.capture(samples):
            assert isinstance(states, HiddenStates)
            ids = torch.from_numpy(states.sample.input_ids).long()[None].to(self.device)
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
            best = torch.log_softmax(logits.float(), dim=-1).max(-1)
            out.append(ProbeOutput(states, int(best.indices), float(best.values)))
        return out

    def generate(self, prompts: Iterable[Prompt], sampling: Sampling) -> Iterator[Completion | Failure]:
        """Answer prompts, those of like length together; finished rows leave their batch at once."""
        waiting = sorted(prompts, key=lambda p: len(p.token_ids))
        for start in range(0, len(waiting), self.batch_size):
            yield from self._generate_batch(waiting[start : start + self.batch_size], sampling)

    def session(self) -> "TransformersSession | RecomputingSession":
        """Start decoding one sequence."""
        layers = set(getattr(self.model.config.get_text_config(), "layer_types", None) or ())
        return TransformersSession(self) if layers <= _ATTENTION else RecomputingSession(self)

    def close(self) -> None:
        del self.model

    @torch.inference_mode()
    def _capture_batch(self, batch: Sequence[TokenizedSample]) -> Iterator[HiddenStates]:
        # Padding on the right of a causal model is seen by no real token, so no mask is needed.
        longest = max(len(sample) for sample in batch)
        input_ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, sample in enumerate(batch):
            input_ids[row, : len(sample)] = torch.from_numpy(sample.input_ids)
        with HiddenStateHooks(self.model, (*self.spec.aux_layer_ids, self.spec.num_layers)) as taps:
            # The decoder alone: the head's logits are not needed.
            text_decoder(self.model)(input_ids=input_ids.to(self.device), use_cache=False)
        lengths = [len(sample) for sample in batch]
        is_token = torch.arange(longest) < torch.tensor(lengths)[:, None]
        # Without the padding, and in one copy: hundreds of small ones from a GPU would each wait for it.
        of_each = (x[is_token.to(self.device)].cpu().split(lengths) for x in taps.aux_and_last())
        for sample, aux, last in zip(batch, *of_each, strict=True):
            yield HiddenStates.select(sample, aux, last)

    @torch.inference_mode()
    def _generate_batch(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Completion]:
        longest = max(len(p.token_ids) for p in prompts)
        input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            input_ids[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, longest - len(prompt.token_ids) :] = 1
        generators = [_generator(sampling.seed, p.prompt_id) for p in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        active = list(range(len(prompts)))
        cache = DynamicCache(config=self.model.config)
        step_ids, mask = input_ids.to(self.device), mask.to(self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        while active:
            out = self.model(
                input_ids=step_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            chosen = _choose(out.logits[:, -1], sampling.temperature, [generators[i] for i in active])
            going: list[int] = []
            for place, (index, token) in enumerate(zip(active, chosen, strict=True)):
                answers[index].append(token)
                stopped = token in self.spec.eos_token_ids
                if stopped or len(answers[index]) >= sampling.max_new_tokens:
                    reason: Any = "stop" if stopped else "length"
                    yield Completion(prompts[index].prompt_id, tuple(answers[index]), reason)
                else:
                    going.append(place)
            if len(going) < len(active):
                keep = torch.tensor(going, device=self.device, dtype=torch.long)
                if going:
                    cache.reorder_cache(keep)  # every kind of layer has it, running states included
                mask, positions = mask[keep], positions[keep]
                active = [active[place] for place in going]
            step_ids = torch.tensor([[answers[i][-1]] for i in active], device=self.device)
            mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
            positions = positions[:, -1:] + 1


class TransformersSession:
    """Step-by-step decoding of one sequence with transformers' own cache."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        # Without the configuration every layer keeps all states: those that a sliding window has let go
        # could not come back when draft tokens are refused. The model's masks keep the window.
        self.cache = DynamicCache()

    @torch.inference_mode()
    def extend(
        self, token_ids: Sequence[int], num_logits: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        engine, keep = self.engine, num_logits or len(token_ids)
        input_ids = torch.tensor([list(token_ids)], device=engine.device)
        with HiddenStateHooks(engine.model, engine.spec.aux_layer_ids) as taps:
            out = engine.model(
                input_ids=input_ids, past_key_values=self.cache, use_cache=True, logits_to_keep=keep
            )
        return out.logits[0], taps.stacked()[0]

    def truncate(self, num_tokens: int) -> None:
        excess = self.cache.get_seq_length() - num_tokens
        if excess < 0:
            raise ContractError(f"cannot truncate to {num_tokens} tokens: fewer are cached")
        if excess:
            self.cache.crop(-excess)


class RecomputingSession:
    """Decoding without a cache, for models whose layers keep a running state that cannot be taken back."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.token_ids: list[int] = []

    @torch.inference_mode()
    def extend(
        self, token_ids: Sequence[int], num_logits: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        engine, first, keep = self.engine, len(self.token_ids), num_logits or len(token_ids)
        self.token_ids += token_ids
        input_ids = torch.tensor([self.token_ids], device=engine.device)
        with HiddenStateHooks(engine.model, engine.spec.aux_layer_ids) as taps:
            out = engine.model(input_ids=input_ids, use_cache=False, logits_to_keep=keep)
        return out.logits[0], taps.stacked()[0, first:]

    def truncate(self, num_tokens: int) -> None:
        if num_tokens > len(self.token_ids):
            raise ContractError(f"cannot truncate to {num_tokens} tokens: fewer are there")
        del self.token_ids[num_tokens:]


def load_model(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Load a text model, or the whole of a wrapper of several modalities.

    Raises: UserError when transformers cannot load it, with its reason.
    """
    config = read_config(folder, trust_remote_code)
    # A wrapper's configuration may also stand for its text model alone, whose tensors have other names.
    kinds: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    known = [kind for kind in kinds if type(config) in kind._model_mapping]
    wrapped = config.get_text_config() is not config and known[-1:] == [AutoModelForImageTextToText]
    kind = known[-1] if wrapped else AutoModelForCausalLM
    further = {}
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        # Gemma 2: torch's attention knows no cap of the scores and would leave it out in silence.
        further["attn_implementation"] = "eager"
    try:
        model, found = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code and is_of_folder(config),
            output_loading_info=True,
            **further,
        )
    except (ImportError, OSError, ValueError) as error:
        raise UserError(
            f"transformers cannot load {folder}: {str(error).strip().splitlines()[0]}",
            hint="install what it names, or use extract.engine=vllm",
        ) from None
    # transformers fills these with random values and goes on.
    if missing := sorted(found["missing_keys"]):
        raise ContractError(
            f"transformers found no values for {len(missing)} tensors of {folder}, {missing[0]} among them",
            hint="the checkpoint's names or its quantisation are not those of this version of transformers; "
            "use extract.engine=vllm",
        )
    return model


def batches_by_length(
    samples: Sequence[TokenizedSample], batch_tokens: int, batch_size: int
) -> Iterator[Sequence[TokenizedSample]]:
    """Cut length-sorted samples into batches of a padded size and a number within the limits."""
    batch: list[TokenizedSample] = []
    for sample in sorted(samples, key=len):
        # Sorted ascending, so the newest sample sets the padded length.
        if len(batch) == batch_size or (batch and (len(batch) + 1) * len(sample) > batch_tokens):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _generator(seed: int, prompt_id: str) -> torch.Generator:
    """One generator a prompt, so that an answer does not depend on its neighbours in the batch."""
    # torch's CPU generator reads no more than 32 bits of its seed, so both have to be in them.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}:{prompt_id}".encode()))


def _choose(logits: torch.Tensor, temperature: float, generators: Sequence[torch.Generator]) -> list[int]:
    if temperature == 0:
        return [int(i) for i in logits.argmax(-1).tolist()]
    probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    return [
        int(torch.multinomial(row, 1, generator=generator))
        for row, generator in zip(probabilities, generators, strict=True)
    ]
