"""Which vLLM serves an EAGLE-3 draft, for which target."""

import pytest

from eyas.drafters.eagle3.vllm import check, speculative_config
from eyas.errors import UserError


def test_a_version_that_ignores_its_norms_is_refused() -> None:
    with pytest.raises(UserError, match=r"vLLM 0\.21 does not serve these drafts; 0\.22 and later do"):
        check((0, 21), {"supports_eagle3"}, "LlamaForCausalLM")
    check((0, 22), {"supports_eagle3"}, "LlamaForCausalLM")


def test_a_target_without_the_interface_is_refused_by_its_name() -> None:
    with pytest.raises(UserError, match="cannot serve an EAGLE-3 draft for MixtralForCausalLM"):
        check((0, 32), {"supports_pp"}, "MixtralForCausalLM")


def test_the_configuration_names_folder_and_draft_tokens() -> None:
    found = speculative_config("/drafts/d", 5, {})
    assert found == {"method": "eagle3", "model": "/drafts/d", "num_speculative_tokens": 5}
