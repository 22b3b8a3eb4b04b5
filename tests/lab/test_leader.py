"""Which nodes does a split of the network cut off, and does a job in the lab go on without its leader?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.lab.faults.fault import LabScene, Where
from allranks.lab.faults.running.leader import Split
from allranks.lab.faults.running.strike_catalogue import STRIKES
from allranks.lab.node_plan import plan_controller, plan_hosts
from allranks.model.cluster import Cluster, Node

from .conftest import RELEASE_FLAGS, SIX_NODE, TestLab, unique

SPLITS = [strike for strike in STRIKES.values() if issubclass(strike, Split)]


def scene(seed: int, leader: str) -> LabScene:
    hosts = plan_hosts(Cluster(node=tuple(Node(name=f"n{i}", address=f"192.168.20.{i + 1}") for i in range(6))))
    made = LabScene(
        lab_dir=Path("/lab"),
        key="split@n0",
        where=Where(node="n0", peer="n1", seed=seed),
        hosts={host.name: host for host in hosts},
        controller=plan_controller(hosts, has_login=True),
        inits={},
        lives={},
        run_dir=Path("/runs"),
    )
    made.aim(leader)
    return made


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
@pytest.mark.parametrize("leader", ["n0", "n4"])
def test_the_group_with_more_than_half_of_the_weights_goes_on(split: type[Split], leader: str) -> None:
    for seed in range(20):
        going_on, lost = split.groups(scene(seed, leader))
        assert sorted((*going_on, *lost)) == ["n0", "n1", "n2", "n3", "n4", "n5"]
        assert 2 * len(going_on) + (leader in going_on) > 13 / 2
        assert len(lost) == split.num_lost
        assert split.lost(scene(seed, leader)) == lost
        assert set(lost) <= set(split.culprit(scene(seed, leader)).nodes)
    assert len({split.groups(scene(seed, leader)) for seed in range(20)}) > (split.name != "split-1-5")


def test_the_names_of_splits_say_on_which_side_the_leader_is() -> None:
    groups = {split.name: sorted(split.groups(scene(3, "n2")), key=lambda group: "n2" not in group) for split in SPLITS}
    sides = {name: tuple(map(len, pair)) for name, pair in groups.items()}
    assert sides == {"split-3-3": (3, 3), "split-2-4": (2, 4), "split-1-5": (1, 5), "split-4-2": (4, 2)}


@pytest.fixture(scope="module")
def with_login() -> Iterator[TestLab]:
    lab = TestLab(unique("leader"))
    try:
        lab.run("up", "--cluster", SIX_NODE, "--login", *RELEASE_FLAGS)
        yield lab
    finally:
        lab.run("down")


@pytest.mark.lab
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names",
    [
        ["leader-agent-killed"],
        pytest.param(["leader-worker-killed", "leader-link-cut", "leader-node-killed"], marks=pytest.mark.by_hand),
        pytest.param(["second-leader-killed"], marks=pytest.mark.by_hand),
        pytest.param(["leader-silent", "leader-back"], marks=pytest.mark.by_hand),
        pytest.param([split.name for split in SPLITS], marks=pytest.mark.by_hand),
    ],
    ids=["agent", "one fault", "two after each other", "cut off", "splits"],
)
def test_a_job_goes_on_under_one_leader(names: list[str], with_login: TestLab, tmp_path: Path) -> None:
    wrong, said = with_login.drill_running(names, tmp_path)
    assert wrong == {name: [] for name in names}, said


@pytest.mark.lab
def test_a_strike_that_needs_a_login_node_is_refused_without_one(six_nodes: TestLab) -> None:
    done = six_nodes.run("drill", "--running", "leader-node-killed", must_work=False)
    assert done.returncode == 2
    assert done.stderr.endswith(
        f"error: leader-node-killed needs a lab with a login node: allranks lab up --name {six_nodes.name} --login\n"
    )
