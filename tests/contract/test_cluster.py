"""A cluster that ``ray start`` made is joined; where it asks for a token, the hint says how to show it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from machine import free_port, wait_until

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.xdist_group("ray")

JOIN = """
import sys
from eyas.scale.cluster import cluster

from eyas.errors import UserError

try:
    with cluster(sys.argv[1], 0):
        import ray

        print(ray.cluster_resources()["CPU"])
except UserError as error:
    sys.exit(error.hint)
"""


@pytest.mark.parametrize("has_token", [True, False], ids=["token", "no token"])
def test_a_started_cluster_is_joined_or_says_what_it_asks_for(tmp_path: Path, has_token: bool) -> None:
    if has_token:  # as a cluster of an earlier run leaves it
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef0123456789abcdef")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--num-cpus=3", "--include-dashboard=false"]
    with (tmp_path / "log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def is_up() -> bool:
        assert head.poll() is None, (tmp_path / "log").read_text()
        return "Ray runtime started" in (tmp_path / "log").read_text()

    def join(**further: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", JOIN, f"127.0.0.1:{port}"],
            env=environment | further,
            capture_output=True,
            text=True,
            timeout=300,
        )

    try:
        wait_until(is_up, every_s=0.5)
        joined = join()
        if "Token authentication is enabled" in (tmp_path / "log").read_text():  # Ray 2.59 and newer
            assert "set RAY_AUTH_MODE=token and have the head's ~/.ray/auth_token" in joined.stderr
            joined = join(RAY_AUTH_MODE="token")
        assert joined.returncode == 0, joined.stderr[-2000:]
        assert joined.stdout.split()[-1] == "3.0"
    finally:
        head.terminate()
        head.wait(120)
