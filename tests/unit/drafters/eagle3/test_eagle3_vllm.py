"""Which vLLM serves an EAGLE-3 draft, for which target."""

import pytest

from eyas.drafters.eagle3 import vllm
from eyas.engines.vllm import versions
from eyas.errors import UserError
from tiny import make_spec


def test_a_version_that_ignores_its_norms_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: (0, 21))
    with pytest.raises(UserError, match=r"vLLM 0\.21 does not serve these drafts; 0\.22 and later do"):
        versions.check_draft_support(make_spec(), vllm)


def test_the_configuration_names_folder_and_draft_tokens() -> None:
    found = vllm.speculative_config("/drafts/d", 5)
    assert found == {"method": "eagle3", "model": "/drafts/d", "num_speculative_tokens": 5}
