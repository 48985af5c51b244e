"""Rendered turns become token ids and spans, exactly as a server tokenizes each prompt, many texts at once.

A server tokenizes the prompt alone. One encoding of a whole conversation therefore serves all its
turns only where cutting it at each prompt's end gives the very ids of that prompt. That is checked
for every turn: tokenizers cut a text at their special tokens before anything else, so it is enough
to encode again what lies between the last special token and the end of the prompt. Where the check
fails, the turns are encoded one by one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from eyas.data.samples import masked_sample
from eyas.types import TokenizedSample

_CACHED_TAIL = 64


@dataclass(frozen=True)
class Turn:
    """``full`` is ``prompt``, the answer and whatever the template puts behind it."""

    prompt: str
    full: str
    cut: bool


class Encoder:
    """Encodes turns; ``eos_token_ids`` end an answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        # Tokens at which every text is cut first: special ones, matched before normalisation.
        self._cutting = {
            i for i, t in tokenizer.added_tokens_decoder.items() if t.special and not t.normalized
        }
        self._shares = bool(tokenizer.is_fast) and eos_token_ids <= self._cutting
        self._tails: dict[str, list[int]] = {}

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts; the template has put in any BOS itself."""
        if not texts:
            return []
        # One warning a long text says nothing here: length is data.max_length's business.
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def turns(self, conversations: Sequence[Sequence[Turn]]) -> list[list[TokenizedSample]]:
        """Return each conversation's samples; turns whose texts continue each other share one."""
        chains = [_chains(turns) for turns in conversations]
        if not self._shares:
            return [self._one_by_one(turns) for turns in conversations]
        texts = [chain[-1].full for group in chains for chain in group]
        if not texts:
            return [[] for _ in conversations]
        whole = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        encoded = iter(whole.encodings)
        results: list[list[TokenizedSample]] = []
        for group in chains:
            samples: list[TokenizedSample] = []
            for chain in group:
                encoding = next(encoded)
                starts = [start for start, _ in encoding.offsets]
                shared = self._shared(chain, encoding.ids, starts)
                samples += self._one_by_one(chain) if shared is None else shared
            results.append(samples)
        return results

    def _shared(
        self, chain: Sequence[Turn], ids: list[int], starts: list[int]
    ) -> list[TokenizedSample] | None:
        """Take all spans from one encoding; None where a prompt alone has other tokens."""
        spans = []
        end = 0
        for turn in chain:
            start = bisect_left(starts, len(turn.prompt))
            if not self._prompt_ends_at(start, turn.prompt, ids, starts):
                return None
            at_eos = next((i for i in range(start, len(ids)) if ids[i] in self.eos_token_ids), None)
            if at_eos is None or starts[at_eos] >= len(turn.full):
                return None
            end = at_eos if turn.cut else at_eos + 1
            spans.append((start, end))
        sample = masked_sample("", ids[:end], spans, chain[-1].cut)
        return [] if sample is None else [sample]

    def _prompt_ends_at(self, at: int, prompt: str, ids: list[int], starts: list[int]) -> bool:
        """Check that the first ``at`` ids are what the prompt alone encodes to."""
        cut = at - 1
        while cut > 0 and ids[cut] not in self._cutting:
            cut -= 1
        tail = prompt[starts[cut] if cut >= 0 else 0 :]
        known = self._tails.get(tail)
        if known is None:
            known = self.ids([tail])[0]
            if len(tail) <= _CACHED_TAIL and len(self._tails) < 10_000:
                self._tails[tail] = known
        return ids[max(cut, 0) : at] == known

    def _one_by_one(self, turns: Sequence[Turn]) -> list[TokenizedSample]:
        """Encode every prompt alone, as a server does; the slow way that is always right."""
        samples = []
        for turn in turns:
            prompt, full = self.ids([turn.prompt, turn.full])
            if full[: len(prompt)] != prompt:  # a token of the full text straddles the boundary
                full = prompt + self.ids([turn.full[len(turn.prompt) :]])[0]
            end = next((i for i in range(len(prompt), len(full)) if full[i] in self.eos_token_ids), None)
            if end is None:
                end = len(full)
            elif not turn.cut:
                end += 1
            sample = masked_sample("", full[:end], [(len(prompt), end)], turn.cut)
            if sample is not None:
                samples.append(sample)
        return samples


def _chains(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Group turns so that each prompt of a group goes on from the turn before it, character for character."""
    chains: list[list[Turn]] = []
    for turn in turns:
        if chains and turn.prompt.startswith(chains[-1][-1].full):
            chains[-1].append(turn)
        else:
            chains.append([turn])
    return chains
