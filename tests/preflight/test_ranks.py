"""Are ranks that hold the roll call themselves named, given GPUs and spoken of as ranks?"""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.config.file import LoadedCluster
from allranks.model.card import Card, Facts, Gpu
from allranks.model.errors import SetupError
from allranks.model.finding import Confidence, Finding, Severity
from allranks.model.identity import world_from_env
from allranks.model.membership import Member
from allranks.preflight.ranks_as_nodes import (
    choose_backend,
    cores_of_node,
    describe_group,
    hosts_of_ranks,
    in_ranks,
    name_absent,
    own_gpu,
    settings_of,
)
from allranks.wire.protocol import Plan
from cards import make_card
from srun_tasks import task


def facts(*uuids: str, said: str | None = None, **more: object) -> Facts:
    gpus = tuple(Gpu(index=index, uuid=uuid, name="GPU") for index, uuid in enumerate(uuids))
    environment = {} if said is None else {"CUDA_VISIBLE_DEVICES": said}
    values = {"host_name": "h", "kernel": "6", "allranks_version": "0", "python_version": "3.11", "clock_s": 0.0}
    return Facts(**values | {"gpus": gpus, "environment": environment} | more)  # type: ignore[arg-type]


def card(rank: int, host: str, num_gpus: int, of: Facts | None = None) -> Card:
    return make_card(rank + 1, host=host, num_gpus=num_gpus, facts=of)


def test_ranks_in_block_order_have_their_hosts() -> None:
    env = task(3, (2, 1, 2))
    assert hosts_of_ranks(world_from_env(env), env) == ("n1", "n1", "n2", "n3", "n3")
    assert name_absent(("n1", "n1", "n2", "n3", "n3")) == ("n1-rank0", "n1-rank1", "n2", "n3-rank3", "n3-rank4")


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_GTIDS": "1,3", "SLURMD_NODENAME": "n2"},
        {"SLURM_GTIDS": "0,2"},
    ],
)
def test_ranks_dealt_round_the_nodes_have_no_known_host(change: dict[str, str]) -> None:
    env = task(0, (2, 2)) | change
    assert hosts_of_ranks(world_from_env(env), env) == ()


def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_one_it_sees() -> None:
    assert [own_gpu(local_rank, 4) for local_rank in (0, 3, 4)] == [0, 3, None]
    assert [own_gpu(local_rank, 1) for local_rank in (0, 3)] == [0, 0]
    assert own_gpu(0, 0) is None


ALL = facts("GPU-a", "GPU-b")


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        pytest.param([card(0, "n1", 2, ALL), card(1, "n1", 2, ALL)], "nccl", id="all-visible"),
        pytest.param(
            [card(0, "n1", 1, facts("GPU-a")), card(1, "n1", 1, facts("GPU-b"))], "nccl", id="bound-by-cgroup"
        ),
        pytest.param([card(0, "n1", 1, facts("GPU-a")), card(1, "n1", 1, facts("GPU-a"))], "gloo", id="one-for-two"),
        pytest.param([card(0, "n1", 1, facts(said="0")), card(1, "n1", 1, facts(said="1"))], "nccl", id="by-variable"),
        pytest.param([card(0, "n1", 1), card(1, "n1", 1)], "gloo", id="nothing-known"),
        pytest.param([card(0, "n1", 1), card(1, "n2", 1)], "nccl", id="one-a-node"),
        pytest.param([card(0, "n1", 1), card(1, "n2", 0)], "gloo", id="one-without"),
        pytest.param([card(0, "n1", 1, facts("GPU-a", packages={"torch": "2.13.0+cpu"}))], "gloo", id="cpu-torch"),
    ],
)
def test_nccl_is_chosen_where_every_rank_has_a_gpu_of_its_own(cards: list[Card], expected: str) -> None:
    assert choose_backend("auto", dict(enumerate(cards)))[0] == expected


def test_nccl_without_gpus_names_the_node() -> None:
    with pytest.raises(SetupError, match="n2 has 0 GPUs for 2 ranks; start fewer, or session") as caught:
        choose_backend("nccl", {0: card(0, "n1", 1), 1: card(1, "n2", 0), 2: card(2, "n2", 0)})
    assert caught.value.finding is not None
    assert (caught.value.finding.cause, caught.value.finding.node) == ("AR111 backend-device-mismatch", "n2")


def finding(node: str | None, waiting: str | None = None) -> Finding:
    return Finding(
        cause="AR001 node-silent",
        severity=Severity.FAIL,
        confidence=Confidence.CERTAIN,
        node=node,
        waiting=waiting,
        message="it did not come",
    )


PLACES = {"n1.0": ("n1", 0), "n1.1": ("n1", 1), "n2": ("n2", 2), "n3-rank3": ("n3", 3), "node rank 4": (None, 4)}


@pytest.mark.parametrize(
    ("node", "waiting", "expected"),
    [
        ("n1.[0-1],n2", None, ("n[1-2]", (0, 1, 2), (), None)),
        ("n3-rank3", "n1.[0-1],n2", ("n3", (3,), (0, 1, 2), None)),
        ("n1.1 or n2", None, ("n1 or n2", (1, 2), (), None)),
        ("node rank 4", "n2", (None, (4,), (2,), None)),
        ("elsewhere", "n2,elsewhere", ("elsewhere", (), (), "n2,elsewhere")),
        (None, None, (None, (), (), None)),
        ("a node with words", None, ("a node with words", (), (), None)),
    ],
)
def test_findings_about_applicants_become_findings_about_ranks(
    node: str | None, waiting: str | None, expected: tuple[object, ...]
) -> None:
    said = in_ranks(finding(node, waiting), PLACES)
    assert (said.node, said.ranks, said.victims, said.waiting) == expected


def test_a_rank_gets_what_an_agent_would_give_it_and_keeps_what_the_user_set() -> None:
    env = task(2, (2, 1))
    world = world_from_env(env)
    hosts = ("n1", "n1", "n2")
    group = Plan(
        members=tuple(Member(name=f"x{r}", first_rank=r, num_workers=1, host=host) for r, host in enumerate(hosts)),
        node_index=2,
        attempt=0,
        store_address="10.0.0.1",
        store_port=29501,
        backend="gloo",
        backend_reason="asked for",
    )
    loaded = LoadedCluster()
    settings = settings_of(
        world,
        group,
        loaded,
        interface="ens1",
        num_cpus=24,
        recorder=Path("/runs/7/recorder_rank_"),
        env={"GLOO_SOCKET_IFNAME": "mine"},
    )
    values = {setting.name: setting.value for setting in settings}
    assert values == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29501",
        "ALLRANKS_STORE_PORT": "29501",
        "ALLRANKS_BACKEND": "gloo",
        "ALLRANKS_NODE": "n2",
        "ALLRANKS_MEMBERS": "n1=0+2,n2=2+1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_BUFFER_SIZE": "512",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/7/recorder_rank_",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/runs/7/recorder_rank_",
        "OMP_NUM_THREADS": "24",
        "GLOO_SOCKET_IFNAME": "mine",
        "NCCL_SOCKET_IFNAME": "=ens1",
    }
    assert describe_group(group, ["n1", "n2"], "ens1") == "3 ranks on 2 nodes (n[1-2]), gloo over ens1"


@pytest.mark.parametrize(
    ("own", "on_node", "num_local", "shared"),
    [
        (64, 64, 8, 64),  # each sees all cores of the machine
        (8, 64, 8, 64),  # each is bound to its eighth
        (3, 64, 8, 24),  # each is bound to three
        (8, 8, 4, 8),  # SLURM's step has 8 cores of the machine, and each rank sees them all
        (1, 1, 4, 4),  # more ranks than cores
    ],
)
def test_ranks_of_a_node_share_its_cores_or_have_their_own(own: int, on_node: int, num_local: int, shared: int) -> None:
    assert cores_of_node(own, on_node, num_local) == shared
