import pytest

from eyas.drafters.common.block.config import default_block_layer_ids
from eyas.drafters.common.block.mask_token import choose_mask_token
from eyas.errors import UserError
from tiny import make_tokenizer


class Words:
    """A tokenizer of ``size`` tokens."""

    def __init__(self, size: int, mask: int | None = None, pad: int | None = None) -> None:
        self.size, self.mask_token_id, self.pad_token_id = size, mask, pad

    def __len__(self) -> int:
        return self.size


def test_the_tokenizers_mask_token_comes_before_a_spare_row() -> None:
    assert choose_mask_token(Words(90, mask=3), 100, (1,)) == 3


def test_a_spare_row_is_the_first_behind_all_tokens() -> None:
    # Qwen3's tokenizer holds 151669 tokens, its embedding 151936 rows.
    assert choose_mask_token(Words(151669, pad=151643), 151936, (151645,)) == 151669


def test_without_a_spare_row_padding_is_taken_then_the_end_of_turn() -> None:
    # SmolLM2's tokenizer fills its embedding of 49152 rows; its padding is its end of turn.
    assert choose_mask_token(Words(49152, pad=2), 49152, (2,)) == 2
    assert choose_mask_token(Words(49152), 49152, (5, 6)) == 5
    assert choose_mask_token(None, 49152, (5, 6)) == 5


def test_a_target_that_has_none_of_them_is_refused_with_the_key_to_set() -> None:
    with pytest.raises(UserError, match="no mask token") as caught:
        choose_mask_token(Words(9), 9, ())
    assert "draft.mask_token_id" in str(caught.value.hint)


def test_a_real_tokenizer_says_what_it_has() -> None:
    tokenizer = make_tokenizer()
    assert choose_mask_token(tokenizer, len(tokenizer) + 4, (1,)) == len(tokenizer)
    assert choose_mask_token(tokenizer, len(tokenizer), (0,)) == tokenizer.pad_token_id


def test_default_layers_are_z_labs_in_ids_after_layers() -> None:
    # z-lab for 36 layers: outputs of layers 1, 9, 17, 25, 33.
    assert default_block_layer_ids(36) == (2, 10, 18, 26, 34)
    assert default_block_layer_ids(30) == (2, 9, 15, 21, 28)
    assert default_block_layer_ids(6) == (2, 3, 4)
    assert [default_block_layer_ids(n) for n in (1, 2, 4)] == [(1,), (2,), (2,)]
