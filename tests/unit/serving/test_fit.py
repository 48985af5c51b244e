"""What does not fit together is named before anything is loaded."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.errors import UserError
from eyas.serving.fit import check_port, recorded_target


@pytest.mark.parametrize(
    ("config", "target"),
    [
        ({"eyas": {"target": {"model": "m", "dtype": "float32"}}}, {"model": "m", "dtype": "float32"}),
        ({"speculators_config": {"verifier": {"name_or_path": "m"}}}, {"model": "m"}),
        ({}, {}),
    ],
)
def test_the_target_is_known_from_eyas_or_speculators(config: Any, target: Any) -> None:
    assert recorded_target(SimpleNamespace(config=config)) == target  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port} cannot be served on"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
