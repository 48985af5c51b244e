"""Dialogues are answered turn by turn, from the journal or by an engine."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eyas.data.answer_journal import AnswerJournal
from eyas.data.chat import ChatRenderer
from eyas.engines.base import Prompt, Sampling
from eyas.errors import EyasError
from eyas.progress import Progress, say
from eyas.regeneration.dialogues import Dialogue
from eyas.types import Completion, Failure

# Starts the engine; it is given the dialogues that wait for their first answer from it.
StartEngine = Callable[[Sequence[Dialogue]], Any]


class Answerer:
    """Answers dialogues round by round; the engine starts when the first answer is not in the journal."""

    def __init__(
        self,
        journal_path: Path,
        renderer: ChatRenderer,
        sampling: Sampling,
        start_engine: StartEngine,
        max_length: int,
        max_failures: int,
    ) -> None:
        self.renderer, self.sampling = renderer, sampling
        self.max_length, self.max_failures = max_length, max_failures
        self.journal = AnswerJournal(journal_path)
        self.finish_reasons: Counter[str] = Counter()
        self.num_failed = 0
        self._start_engine = start_engine
        self._engine: Any = None
        if len(self.journal):
            say(f"regenerate: resuming after {len(self.journal):,} answers")

    @property
    def num_retokenized(self) -> int:
        return getattr(self._engine, "num_retokenized", 0)

    def answer(self, dialogues: Sequence[Dialogue]) -> None:
        """Answer every turn of the dialogues, each on the target's own history."""
        for round_number in range(max(len(d.slots) for d in dialogues)):
            waiting = [d for d in dialogues if d.is_open]
            asked = [(d, p) for d in waiting if (p := d.prompt(self.renderer, self.max_length)) is not None]
            missing = [p for _, p in asked if not self.journal.holds(p.prompt_id, p.token_ids)]
            failures = self._generate(missing, waiting, f"regenerate, turn {round_number + 1}")
            for dialogue, prompt in asked:
                if prompt.prompt_id in failures:
                    dialogue.trouble = f"generation_failed: {failures[prompt.prompt_id]}"
                    continue
                answer = self.journal.read(prompt.prompt_id)
                self.finish_reasons[answer.finish_reason] += 1
                dialogue.take(prompt, answer, self.renderer)

    def close(self) -> None:
        self.journal.close()
        if self._engine is not None:
            self._engine.close()

    def _generate(self, prompts: Sequence[Prompt], waiting: Sequence[Dialogue], label: str) -> dict[str, str]:
        """Journal an answer to each prompt; return those that failed, with the reason."""
        failures: dict[str, str] = {}
        if not prompts:
            return failures
        if self._engine is None:
            self._engine = self._start_engine(waiting)
        ids_of = {p.prompt_id: p.token_ids for p in prompts}
        num_tokens = 0
        with Progress(label, len(prompts), "answers") as progress:
            for item in _one_for_one(self._engine.generate(prompts, self.sampling), prompts):
                if isinstance(item, Failure):
                    failures[item.sample_id] = item.reason
                    self._check_failures(item)
                else:
                    self.journal.add(item, ids_of[item.prompt_id])
                    num_tokens += len(item.token_ids)
                progress.advance(1, f"{num_tokens / max(progress.elapsed_s, 1e-9):,.0f} tokens/s")
        return failures

    def _check_failures(self, failure: Failure) -> None:
        self.num_failed += 1
        if self.num_failed > self.max_failures:
            raise EyasError(
                f"{self.num_failed} answers failed, more than regenerate.max_failures="
                f"{self.max_failures}; last: {failure.sample_id}: {failure.reason}",
                hint="finished answers are kept; fix the cause and run the same command again",
            )


def _one_for_one(
    items: Iterable[Completion | Failure], prompts: Sequence[Prompt]
) -> Iterator[Completion | Failure]:
    """Pass on what an engine yields; it must be exactly one item for each prompt."""
    open_ids = {p.prompt_id for p in prompts}
    for item in items:
        item_id = item.sample_id if isinstance(item, Failure) else item.prompt_id
        if item_id not in open_ids:
            raise EyasError(f"the engine answered {item_id} twice or unasked")
        open_ids.remove(item_id)
        yield item
    if open_ids:
        raise EyasError(f"the engine gave no answer to {len(open_ids)} prompts, such as {min(open_ids)}")
