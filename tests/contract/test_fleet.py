"""A fleet whose workers and machines die: every unit is done once, and what kills workers is named."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed")

import ray
from ray.cluster_utils import Cluster

from eyas.config.schema import FleetSettings
from eyas.errors import ContractError, EyasError, UserError
from eyas.scale.cluster import check_room
from eyas.scale.fleet import Fleet
from eyas.scale.work_queue import WorkQueue
from machine import wait_until

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Three simulated machines of one slot each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.cloudpickle.register_pickle_by_value(__import__(__name__))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Counting:
    """Notes each unit in a file of its own name, a little slowly; ``dies`` may end the process before one."""

    def __init__(self, name: str, folder: Path, dies: Callable[[str, Any, Path], bool]) -> None:
        self.name, self.folder, self.dies = name, folder, dies

    def facts(self) -> dict[str, str]:
        return {"version": "1"}

    def do(self, units: Sequence[int]) -> Iterator[tuple[int, str]]:
        for unit in units:
            time.sleep(0.01)
            if self.dies(self.name, unit, self.folder):
                os._exit(1)
            with (self.folder / self.name).open("a") as f:
                f.write(f"{unit}\n")
            yield unit, self.name

    def close(self) -> None:
        (self.folder / f"{self.name}.closed").touch()


def never(name: str, unit: int, folder: Path) -> bool:
    return False


def fleet_of(
    folder: Path,
    dies: Callable[[str, Any, Path], bool] = never,
    replicas: int = 2,
    version: str = "1",
    ahead: int | None = None,
):  # type: ignore[no-untyped-def]
    settings = FleetSettings(replicas=replicas, gpus_per_replica=0)
    return Fleet(range(60), lambda name: Counting(name, folder, dies), settings, {"version": version}, ahead)


def test_every_unit_is_done_once_and_every_worker_closed(nodes: Cluster, tmp_path: Path) -> None:
    done = [unit for unit, _ in fleet_of(tmp_path).results()]
    assert sorted(done) == list(range(60))
    assert len(list(tmp_path.glob("*.closed"))) == 2


def test_a_worker_that_dies_costs_its_unfinished_units_a_retry(nodes: Cluster, tmp_path: Path) -> None:
    def once(name: str, unit: int, folder: Path) -> bool:
        if unit != 5 or (folder / "died").exists():
            return False
        (folder / "died").touch()
        return True

    fleet = fleet_of(tmp_path, once)
    done = [unit for unit, _ in fleet.results()]
    assert sorted(done) == list(range(60))
    assert fleet.num_deaths == 1
    written = [int(n) for p in tmp_path.glob("replica-?-?") for n in p.read_text().split()]
    assert len(written) < 60 + 5  # a unit whose answer was still under way may be written twice, no other


def test_a_unit_that_kills_every_worker_is_named(nodes: Cluster, tmp_path: Path) -> None:
    def always(name: str, unit: int, folder: Path) -> bool:
        return unit == 31

    with pytest.raises(EyasError, match="workers died with 31"):
        list(fleet_of(tmp_path, always).results())


def test_an_error_of_a_worker_stops_the_fleet_as_itself(nodes: Cluster, tmp_path: Path) -> None:
    def fails(name: str, unit: int, folder: Path) -> bool:
        raise UserError(f"unit {unit} is wrong", hint="mend it")

    with pytest.raises(UserError, match="is wrong") as caught:
        list(fleet_of(tmp_path, fails).results())
    assert caught.value.hint == "mend it"


def test_a_machine_of_another_version_is_refused_before_it_works(nodes: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="version is 1, here 2"):
        list(fleet_of(tmp_path, version="2").results())
    assert not list(tmp_path.iterdir())


def test_more_replicas_or_gpus_than_the_cluster_has_are_refused(nodes: Cluster) -> None:
    check_room(FleetSettings(replicas=3, gpus_per_replica=0))
    with pytest.raises(UserError) as caught:
        check_room(FleetSettings(replicas=4, gpus_per_replica=0))
    assert "extract.fleet.replicas=3" in str(caught.value.hint)
    with pytest.raises(UserError, match="1 replicas of 8 GPUs were asked for, 0 fit"):
        check_room(FleetSettings(replicas=1, gpus_per_replica=8))


def test_a_machine_that_dies_costs_a_retry_and_the_others_do_the_rest(nodes: Cluster, tmp_path: Path) -> None:
    def waits(name: str, unit: int, folder: Path) -> bool:
        """Each does one unit, and the next when the machine is known to be gone."""
        while (folder / name).exists() and not (folder / "gone").exists():
            time.sleep(0.01)
        return False

    fleet = fleet_of(tmp_path, waits, replicas=3)
    done = []
    for unit, _ in fleet.results():
        done.append(unit)
        if len(done) == 3:
            nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False)
            wait_until(lambda: fleet.num_deaths)
            (tmp_path / "gone").touch()
    assert sorted(done) == list(range(60))
    assert fleet.num_deaths == 1


def test_a_slow_consumer_holds_the_workers_back(nodes: Cluster, tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, ahead=3)
    taken = 0

    def ahead() -> int:
        return sum(len(p.read_text().split()) for p in tmp_path.glob("replica-?-?")) - taken

    def all_are_at_work() -> bool:
        return ahead() >= min(3, 60 - taken)

    for _ in fleet.results():
        wait_until(all_are_at_work)  # none idles while there is room
        time.sleep(0.02)
        assert ahead() <= 3, "none goes beyond it"
        taken += 1
        fleet.taken()
    assert taken == 60


def test_units_that_come_back_leave_room_and_are_first_again() -> None:
    units = WorkQueue(range(5), 2, ahead=2)
    assert (units.take(), units.take()) == ([0], [1])
    units.give_back([0])
    assert units.take() == [0]
    units.make_room()
    assert units.take() == [2]
