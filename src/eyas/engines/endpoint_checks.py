"""Does a server take the tokens that its model finds likeliest? Its first answers tell."""

from collections.abc import Iterable
from itertools import islice

from eyas.engines.base import Prompt
from eyas.engines.endpoint import NEUTRAL, EndpointEngine
from eyas.errors import ContractError
from eyas.progress import say
from eyas.types import Completion, Failure

NUM_ANSWERS = 16
_NUM_TOKENS = 64
# Of one forward pass, so only an exact tie is expected (units: log-probability).
_MOST_LAG = 0.01


def check_greedy(engine: EndpointEngine, prompts: Iterable[Prompt], max_new_tokens: int) -> list[Completion]:
    """Have the first prompts answered greedily and return those answers.

    Raises: ContractError where a token was taken that was not the server's own likeliest one.
    """
    few = list(islice(prompts, NUM_ANSWERS))
    items, lags = engine.greedy_answers(few, min(max_new_tokens, _NUM_TOKENS))
    answers = [item for item in items if not isinstance(item, Failure)]
    if lags and max(lags.values()) > _MOST_LAG:
        worst = max(lags, key=lambda prompt_id: lags[prompt_id])
        num = sum(lag > _MOST_LAG for lag in lags.values())
        raise ContractError(
            f"the server's greedy answers are not its own model's likeliest tokens: {num} of {len(lags)} "
            f"differ, that to {worst} by {lags[worst]:.2f} in log-probability",
            hint="a repetition, presence or frequency penalty, a logit bias or guided decoding is added "
            "behind that address; switch it off there",
        )
    if answers and not lags:
        say("  the server gives no log-probabilities; eyas cannot tell whether it adds a penalty")
    if unsent := sorted(engine.refused & NEUTRAL.keys()):
        say(f"  the server does not take {', '.join(unsent)}; its own values hold")
    return answers
