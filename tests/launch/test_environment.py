"""What a worker finds in its environment, and that each value says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from allranks.host.node import NodeFacts
from allranks.launch.plan import JobPlan, Request, plan_job
from allranks.launch.worker_environment import HOOK_PATH, node_settings, provisional_group, rank_settings
from allranks.model.card import Interface
from allranks.model.cluster import Backend, Cluster, NetworkTable, TrainTable
from allranks.model.data_network import DataNetwork
from allranks.model.identity import world_from_env
from allranks.model.membership import Member
from allranks.model.setting import Setting
from allranks.wire.leader_port import Hint
from allranks.wire.protocol import Plan

FACTS = NodeFacts(host="node02", interfaces=(Interface("lo", ("127.0.0.1",), is_up=True),), num_gpus=4, num_cpus=48)
MEMBERS = (
    Member(name="node01", first_rank=0, num_workers=2, host="node01"),
    Member(name="node02", first_rank=2, num_workers=4, host="node02"),
)
DEFAULTS = Cluster()
GROUP = Plan(
    members=MEMBERS,
    node_index=1,
    attempt=0,
    store_address="192.168.20.1",
    store_port=29501,
    backend="nccl",
    backend_reason="every rank has a GPU of its own",
)
TORCHRUN = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}  # fmt: skip
OURS = {
    "NODE_RANK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "ALLRANKS_BACKEND",
    "ALLRANKS_TIMEOUT_S", "ALLRANKS_BEAT_S", "ALLRANKS_NODE", "ALLRANKS_NODE_GPUS", "ALLRANKS_MEMBERS",
    "ALLRANKS_STORE_PORT", "TORCH_FR_BUFFER_SIZE", "PYTHONPATH",
}  # fmt: skip


def job_plan(request: Request | None = None, cluster: Cluster = DEFAULTS) -> JobPlan:
    request = request or Request(
        num_workers="4", min_nodes=2, max_nodes=2, node_rank=1, endpoint=Hint("node01", 29500, "--rdzv-endpoint")
    )
    return plan_job(request, world_from_env({}), cluster, FACTS, job="exp7", origin={})


def all_settings(
    *,
    env: dict[str, str] | None = None,
    interface: str | None = "ens1f1",
    store_fd: int | None = None,
    cluster: Cluster = DEFAULTS,
    group: Plan = GROUP,
    request: Request | None = None,
    checkpoints: Path | None = None,
) -> list[Setting]:
    settings = node_settings(
        job_plan(request, cluster),
        group,
        interface=interface,
        store_fd=store_fd,
        env=env or {},
        checkpoints=checkpoints,
    )
    return [*settings, *rank_settings(group, 3, error_file=Path("/runs/exp 7/rank_5.error.json"))]


def values(**how: object) -> dict[str, str]:
    return {setting.name: setting.value for setting in all_settings(**how)}


def test_a_worker_gets_these_variables_and_no_others():
    assert set(values()) == TORCHRUN | OURS


def test_the_wire_format_and_the_bucket_size_say_which_flag_gave_them():
    (first, second) = (
        each
        for each in all_settings(request=Request(compress="int8", bucket_mb="auto"))
        if each.name in ("ALLRANKS_COMPRESS", "ALLRANKS_BUCKET_MB")
    )
    assert (first.value, first.source, second.value, second.source) == ("int8", "--compress", "auto", "--bucket-mb")


def test_the_values_of_the_sixth_rank_on_two_nodes():
    assert values() == {
        "RANK": "5",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "6",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "192.168.20.1",
        "MASTER_PORT": "29501",
        "OMP_NUM_THREADS": "12",
        "TORCHELASTIC_RUN_ID": "node01-29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/runs/exp 7/rank_5.error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "GLOO_SOCKET_IFNAME": "ens1f1",
        "NCCL_SOCKET_IFNAME": "=ens1f1",
        "ALLRANKS_BACKEND": "nccl",
        "ALLRANKS_TIMEOUT_S": "660.0",
        "ALLRANKS_BEAT_S": "0.5",
        "TORCH_FR_BUFFER_SIZE": "512",
        "ALLRANKS_NODE": "node02",
        "ALLRANKS_NODE_GPUS": "4",
        "ALLRANKS_MEMBERS": "node01=0+2,node02=2+4",
        "ALLRANKS_STORE_PORT": "29501",
        "PYTHONPATH": str(HOOK_PATH),
    }


@pytest.mark.parametrize(
    ("env", "request_", "expected"),
    [
        ({}, None, []),  # the hook has Python write each line
        ({"ALLRANKS_HOOK": "0"}, None, ["1"]),
        ({}, Request(container="image.sif"), ["1"]),
    ],
)
def test_without_the_hook_python_does_not_buffer(env, request_, expected):
    settings = all_settings(env=env, request=request_)
    assert [setting.value for setting in settings if setting.name == "PYTHONUNBUFFERED"] == expected


def test_no_variable_is_set_twice():
    names = [setting.name for setting in all_settings(store_fd=7)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("env", [{}, {"NCCL_SOCKET_IFNAME": "ib0", "PYTHONPATH": "/x"}, {"ALLRANKS_HOOK": "0"}])
def test_every_setting_says_why_and_where_from(env):
    cluster = Cluster(network=NetworkTable(infiniband=False), train=TrainTable(backend=Backend.GLOO))
    silent = [s for s in all_settings(env=env, store_fd=7, cluster=cluster) if not s.reason or not s.source]
    assert silent == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "ib0,ib1"),
        ("GLOO_SOCKET_IFNAME", "eno1"),
        ("OMP_NUM_THREADS", "3"),
        ("NCCL_IB_DISABLE", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM"),
        ("ALLRANKS_TIMEOUT_S", "30"),
    ],
)
def test_what_the_user_set_is_kept_and_said_so(name, value):
    cluster = Cluster(network=NetworkTable(infiniband=False))
    found = [s for s in all_settings(env={name: value}, cluster=cluster) if s.name == name]
    assert found == [Setting(name, value, "already set in the environment; kept", "environment")]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "GROUP_RANK"])
def test_who_a_worker_is_is_never_inherited(name):
    assert values(env={name: "99"})[name] != "99"


def test_nccl_takes_exactly_the_name_and_gloo_the_plain_one():
    found = values(interface="eno1")
    assert found["NCCL_SOCKET_IFNAME"] == "=eno1"
    assert found["GLOO_SOCKET_IFNAME"] == "eno1"


def test_an_unknown_interface_is_left_to_the_libraries():
    assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}.isdisjoint(values(interface=None))


@pytest.mark.parametrize(("infiniband", "value"), [(None, None), (True, None), (False, "1")])
def test_infiniband_is_switched_off_only_where_the_file_says_there_is_none(infiniband, value):
    cluster = Cluster(network=NetworkTable(infiniband=infiniband))
    assert values(cluster=cluster).get("NCCL_IB_DISABLE") == value


@pytest.mark.parametrize(
    ("inherited", "joined"),
    [
        (None, str(HOOK_PATH)),
        ("", str(HOOK_PATH)),
        (":", f"{HOOK_PATH}::"),
        ("/a", f"{HOOK_PATH}:/a"),
        ("/a:/b c", f"{HOOK_PATH}:/a:/b c"),
        (":/a::/b:", f"{HOOK_PATH}::/a::/b:"),
    ],
)
def test_the_hook_comes_first_and_the_users_pythonpath_stays_to_the_letter(inherited, joined):
    env = {} if inherited is None else {"PYTHONPATH": inherited}
    assert values(env=env)["PYTHONPATH"] == joined


def test_the_socket_of_the_store_is_handed_to_this_node():
    assert values(store_fd=7)["ALLRANKS_STORE_FD"] == "7"
    assert "ALLRANKS_STORE_FD" not in values(store_fd=None)


def test_without_the_hook_its_variables_are_left_out():
    found = values(env={"ALLRANKS_HOOK": "0", "PYTHONPATH": "/a"}, store_fd=7)
    assert set(found) == (TORCHRUN | OURS | {"PYTHONUNBUFFERED"}) - {"ALLRANKS_STORE_PORT", "PYTHONPATH"}


@pytest.mark.parametrize(("num_workers", "threads"), [(1, "48"), (4, "12"), (5, "9"), (48, "1"), (100, "1")])
def test_cores_are_divided_among_the_ranks_of_the_node(num_workers, threads):
    member = Member(name="node02", first_rank=0, num_workers=num_workers, host="node02")
    group = Plan(
        members=(member,),
        node_index=0,
        attempt=0,
        store_address="127.0.0.1",
        store_port=29500,
        backend="gloo",
        backend_reason="asked for",
    )
    assert values(group=group)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("flag", "file", "chosen"),
    [
        (None, Backend.AUTO, None),
        ("auto", Backend.NCCL, None),
        ("nccl", Backend.AUTO, "nccl"),
        (None, Backend.NCCL, "nccl"),
    ],
)
def test_a_script_without_a_backend_gets_the_one_that_was_asked_for(flag, file, chosen):
    request = Request(num_workers="4", backend=flag)
    found = values(request=request, cluster=Cluster(train=TrainTable(backend=file)))
    assert found.get("ALLRANKS_BACKEND_CHOSEN") == chosen


def test_the_guessed_group_of_one_machine_is_on_loopback():
    assert replace(provisional_group(job_plan(Request(num_workers="4"))), successors=()) == Plan(
        members=(Member(name="node02", first_rank=0, num_workers=4, host="node02"),),
        node_index=0,
        attempt=0,
        store_address="127.0.0.1",
        store_port=29500,
        backend="nccl",
        backend_reason="every rank has a GPU of its own",
        nodes=(0,),
    )


def test_the_guessed_group_of_two_nodes_has_equal_nodes():
    assert replace(provisional_group(job_plan()), successors=()) == Plan(
        members=(
            Member(name="node02.0", first_rank=0, num_workers=4, host="node02"),
            Member(name="node02.1", first_rank=4, num_workers=4, host="node02"),
        ),
        node_index=1,
        attempt=0,
        store_address="(the leader announces it)",
        store_port=29500,
        backend="nccl",
        backend_reason="every rank has a GPU of its own",
        nodes=(0, 1),
    )


def test_workers_learn_whether_somebody_named_the_directory_of_checkpoints() -> None:
    def values(request: Request | None = None, **env: str) -> dict[str, str]:
        settings = all_settings(request=request, env=env, checkpoints=Path("/runs/7/checkpoints"))
        return {setting.name: setting.value for setting in settings if "CHECKPOINT" in setting.name}

    assert values() == {"ALLRANKS_CHECKPOINT_DIR": "/runs/7/checkpoints"}
    assert values(ALLRANKS_CHECKPOINT_DIR="/mine") == {
        "ALLRANKS_CHECKPOINT_DIR": "/mine",
        "ALLRANKS_CHECKPOINT_DIR_CHOSEN": "1",
    }
    endpoint = Hint("node01", 29500, "--rdzv-endpoint")
    asked = Request(
        num_workers="4", min_nodes=2, max_nodes=2, node_rank=1, endpoint=endpoint, checkpoint_dir="/runs/7/checkpoints"
    )
    assert values(asked)["ALLRANKS_CHECKPOINT_DIR_CHOSEN"] == "1"


def test_what_is_known_of_the_data_network_is_handed_on_with_its_reason():
    network = DataNetwork(
        link_mbit_s=941.5,
        link_reason="node01 to node02",
        link_source="bench.json",
        interfaces={0: ("ens1f1", "ens2f1"), 1: ("ens1f0", "ens2f0")},
        ring_reason="by scontrol show topology",
    )
    group = replace(GROUP, network=network)
    found = {setting.name: setting for setting in all_settings(group=group)}
    link = found["ALLRANKS_LINK_MBIT"]
    assert (link.value, link.source) == ("941.5", "bench.json")
    assert link.reason == "what one data interface carries, in Mbit/s: node01 to node02"
    assert found["GLOO_SOCKET_IFNAME"].value == "ens1f0,ens2f0"
    assert found["NCCL_SOCKET_IFNAME"].value == "=ens1f1"
    assert found["GROUP_RANK"].reason == "by scontrol show topology"
    own = values(group=group, env={"ALLRANKS_LINK_MBIT": "100", "GLOO_SOCKET_IFNAME": "ib0"})
    assert (own["ALLRANKS_LINK_MBIT"], own["GLOO_SOCKET_IFNAME"]) == ("100", "ib0")
