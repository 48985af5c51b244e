"""A difference that is no near-tie ends an evaluation."""

from typing import Any

import pytest

from eyas.errors import ContractError
from eyas.evaluate.lossless import check_lossless


def difference(top: float | None, gap: float | None) -> dict[str, Any]:
    return {"prompt_id": "p", "position": 3, "expected": 5, "found": -1, "top": top, "gap": gap}


def test_near_ties_pass() -> None:
    check_lossless([], "float32")
    check_lossless([difference(20.0, 0.4)], "bfloat16")


@pytest.mark.parametrize(
    ("top", "gap", "says"),
    [(20.0, 3.0, "3 logits from being"), (None, None, "is not the target's likeliest")],
)
def test_others_are_named_with_their_tokens(top: float | None, gap: float | None, says: str) -> None:
    with pytest.raises(ContractError, match=says) as caught:
        check_lossless([difference(top, gap)], "bfloat16")
    assert "token 3 is its end instead of 5" in caught.value.what
