"""What version 0.1 wrote: stores and exports are read, checkpoints are refused with what redoes them.

The folder was written by that version, for random weights and states of the target of ``tiny.make_spec``.
"""

import json
from pathlib import Path

import pytest
import torch

from eyas.drafters.eagle3.export import logits
from eyas.errors import ContractError
from eyas.export.native import load_export
from eyas.export.read import read_draft
from eyas.store.shards import ShardStore
from eyas.train.checkpoint import read_checkpoint
from tiny import make_spec

FOLDER = Path(__file__).parents[1] / "support" / "written_by_0_1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def test_hidden_states_are_read() -> None:
    store = ShardStore(FOLDER / "states")
    assert store.spec == make_spec()
    states = [store.read(index) for index in range(len(store.lengths))]
    assert [s.sample.sample_id for s in states] == EXPECTED["ids"]
    assert [float(s.aux.sum()) for s in states] == pytest.approx(EXPECTED["aux_sums"])


@pytest.mark.parametrize("format", ["native", "speculators"])
def test_an_export_gives_the_logits_that_it_gave_then(format: str) -> None:
    stored = read_draft(FOLDER / format)
    assert (stored.architecture, stored.aux_layer_ids) == ("eagle3", (2, 4, 5))
    draft, target_ids, _ = load_export(FOLDER / format, stored.embedding)
    assert target_ids.tolist() == [0, 1, 2, 7, 11, 12, 30, 41, 48, 49]
    aux = torch.arange(4 * 3 * 16).view(4, 3, 16).remainder(7) / 7
    torch.testing.assert_close(logits(draft, aux, torch.arange(4)), torch.tensor(EXPECTED["logits"]))


def test_a_checkpoint_is_refused_with_the_command_that_redoes_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text('{"format_version": 2, "seal": ""}')
    with pytest.raises(ContractError, match="format version 2, this eyas reads 3") as refused:
        read_checkpoint(tmp_path)
    assert "--fresh" in str(refused.value.hint)
