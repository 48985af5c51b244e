"""The two lists of aux layer ids in an export name the same layers, each by its engine's rule."""

import pytest

from eyas.drafters.common.sglang_layers import eagle3_ids
from eyas.drafters.eagle3.export import check_config
from eyas.errors import ContractError
from eyas.layer_ids import ReadLayers


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "KimiK25ForConditionalGeneration"])
def test_lists_that_name_the_same_layers_agree(architecture: str) -> None:
    ids = (3, 31, 59)
    nested = list(eagle3_ids(ReadLayers(ids, architecture, 61)))
    config = {
        "eyas": {"target": {"architecture": architecture, "num_layers": 61}},
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": nested},
    }
    check_config(config)
    with pytest.raises(ContractError, match="two lists of aux layer ids"):
        check_config(config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 31, 60]}})
