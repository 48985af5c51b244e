"""The answers that benchmarks/acceptance.py trains and evaluates on: the target's own.

Greedy ones are one file. Those sampled at temperature 1, of the evaluation prompts' first turns, are another.
"""

import argparse
import gzip
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.config.schema import TargetSettings, VllmSettings
from eyas.data.samples import generated_turn
from eyas.engines.base import Prompt, Sampling
from eyas.engines.transformers.engine import TransformersEngine
from eyas.engines.vllm.engine import VllmEngine
from eyas.targets.resolve_model import locate
from eyas.targets.spec import read_target
from eyas.targets.tokenizer import read_tokenizer
from eyas.types import Completion, TokenizedSample

HELD_OUT = "held_out"


class Renderer:
    """Token ids of a conversation whose next turn is the target's."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = read_tokenizer(folder)

    def __call__(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def make_answers(args: argparse.Namespace, device: str, started: float) -> None:
    """Answer the evaluation prompts, then training prompts as far as the time goes."""
    folder = locate(args.target)
    spec, render = read_target(folder, TargetSettings(model=args.target)), Renderer(folder)
    engine: TransformersEngine | VllmEngine
    if args.engine == "vllm":
        settings = VllmSettings(engine_args=tuple(args.engine_arg))
        engine = VllmEngine(
            folder, spec, settings=settings, batch_tokens=8192, batch_size=min(1024, args.generate_batch)
        )
    else:
        engine = TransformersEngine(folder, spec, batch_size=args.generate_batch, device=device)

    def answer(prompts: dict[str, list[int]]) -> Iterator[tuple[str, Completion]]:
        asked = [Prompt(name, tuple(ids)) for name, ids in prompts.items()]
        for item in engine.generate(asked, Sampling(args.max_new_tokens)):
            assert isinstance(item, Completion)
            yield item.prompt_id, item

    num_tokens, begun = 0, time.monotonic()
    with gzip.open(args.answers, "wt", compresslevel=6) as file:

        def write(prompts: dict[str, list[int]]) -> dict[str, Completion]:
            nonlocal num_tokens
            answers = dict(answer(prompts))
            for name, one in answers.items():
                num_tokens += len(one.token_ids)
                file.write(row_of(name, prompts[name], one))
            rate = num_tokens / (time.monotonic() - begun)
            note(f"{num_tokens:,} answered tokens, {rate:,.0f} tokens/s")
            return answers

        dialogues = {row["id"]: row["turns"] for row in eval_rows(args)}
        first = {n: [{"role": "user", "content": turns[0]}] for n, turns in dialogues.items()}
        answers = write({name: render(messages) for name, messages in first.items()})
        second = {}
        for name, turns in dialogues.items():
            if len(turns) > 1:
                ids = [i for i in answers[name].token_ids if i not in spec.eos_token_ids]
                said = {"role": "assistant", "content": render.tokenizer.decode(ids)}
                second[f"{name}:2"] = render([*first[name], said, {"role": "user", "content": turns[1]}])
        if second:
            write(second)
        prompts = training_prompts(args)
        for start in range(0, len(prompts), args.generate_batch):
            chunk = prompts[start : start + args.generate_batch]
            rendered = {name: render([{"role": "user", "content": text}]) for name, text in chunk}
            begun_chunk = time.monotonic()
            write({n: ids for n, ids in rendered.items() if len(ids) <= args.max_prompt_tokens})
            took = time.monotonic() - begun_chunk
            if time.monotonic() - started + 1.2 * took > args.time_limit:
                note("the time limit ends generation")
                break
    engine.close()


def make_sampled(args: argparse.Namespace, engine: TransformersEngine) -> None:
    """Answer the evaluation prompts' first turns at temperature 1."""
    render = Renderer(locate(args.target))
    asked = {row["id"]: render([{"role": "user", "content": row["turns"][0]}]) for row in eval_rows(args)}
    prompts = [Prompt(name, tuple(ids)) for name, ids in asked.items()]
    with gzip.open(args.sampled_answers, "wt", compresslevel=6) as file:
        for item in engine.generate(prompts, Sampling(args.max_new_tokens, temperature=1.0)):
            assert isinstance(item, Completion)
            file.write(row_of(item.prompt_id, asked[item.prompt_id], item))


def row_of(name: str, prompt: list[int], answer: Completion) -> str:
    row = {"id": name, "prompt": prompt, "answer": answer.token_ids, "end": answer.finish_reason}
    return json.dumps(row, separators=(",", ":")) + "\n"


def eval_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    taken: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in args.eval_prompts.read_text().splitlines():
        row = json.loads(line)
        if len(taken[row["suite"]]) < args.num_eval:
            taken[row["suite"]].append({**row, "id": f"{row['suite']}/{row['id']}"})
    return [row for rows in taken.values() for row in rows]


def training_prompts(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return (id, text) of English first turns, in a fixed random order; the first are held out."""
    prompts = []
    with gzip.open(args.prompts, "rt") as file:
        for line in file:
            row = json.loads(line)
            text = row["messages"][0]["content"] or ""
            is_english = sum(c.isascii() for c in text) > 0.98 * len(text)
            if row["messages"][0]["role"] == "user" and is_english and 10 < len(text) < 1200:
                prompts.append((row["id"], text))
    random.Random(0).shuffle(prompts)
    named = [(f"{HELD_OUT if i < args.num_held_out else 'train'}/{n}", t) for i, (n, t) in enumerate(prompts)]
    return named[: args.num_prompts + args.num_held_out]


def stored_answers(args: argparse.Namespace, train: list[TokenizedSample]) -> list[TokenizedSample]:
    """Return what the data set says to the prompts of ``train``, as long in all as the target's answers."""
    wanted = {s.sample_id.partition("/")[2]: s for s in train}
    tokenizer = read_tokenizer(locate(args.target))
    texts = {}
    with gzip.open(args.prompts, "rt") as file:
        for line in file:
            row = json.loads(line)
            answers = [m["content"] for m in row["messages"][1:2] if m["role"] == "assistant"]
            if row["id"] in wanted and answers:
                texts[row["id"]] = answers[0] or ""
    samples, room = [], sum(len(s) for s in train)
    for name in texts:
        sample = wanted[name]
        prompt = sample.input_ids[: int(sample.loss_mask.argmax())].tolist()
        end = tokenizer.eos_token or ""
        answer = tokenizer(texts[name] + end, add_special_tokens=False)["input_ids"]
        kept = answer[: args.max_new_tokens]
        made = generated_turn(sample.sample_id, prompt, kept, len(kept) < len(answer))
        if made is not None and len(made) <= room:
            samples.append(made)
            room -= len(made)
    return samples


def read_answers(path: Path) -> dict[str, list[TokenizedSample]]:
    """Return the samples by split: train, held_out and the suites."""
    splits: dict[str, list[TokenizedSample]] = defaultdict(list)
    with gzip.open(path, "rt") as file:
        for line in file:
            row = json.loads(line)
            sample = generated_turn(row["id"], row["prompt"], row["answer"], row["end"] == "length")
            split = row["id"].partition("/")[0]
            if sample is not None:
                splits[split].append(sample)
    return splits


def note(text: str) -> None:
    print(text, flush=True)
