"""Every choice that one node can make alone, as tables."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from allranks.host.net import find_interface_in
from allranks.host.node import NodeFacts
from allranks.launch.plan import JobPlan, Request, choose_backend, plan_job
from allranks.model.card import Interface
from allranks.model.cluster import Cluster, NetworkTable, Node
from allranks.model.errors import AllranksError, ConfigError, IdentityError, SetupError, UsageError
from allranks.model.identity import world_from_env
from allranks.model.setting import Setting
from allranks.preflight.datapath import DataPath
from allranks.wire.leader_port import Hint

LO = Interface("lo", ("127.0.0.1", "::1"), is_up=True)
MANAGEMENT = Interface("eno1", ("10.1.0.3",), is_up=True)
DATA = Interface("ens1f1", ("192.168.20.3", "fd00:20::3"), is_up=True)
FACTS = NodeFacts(host="node03", interfaces=(LO, MANAGEMENT, DATA), num_gpus=0, num_cpus=16)
GPU_FACTS = NodeFacts(host="node03", interfaces=(LO, MANAGEMENT, DATA), num_gpus=4, num_cpus=16)
NO_FLAGS, DEFAULTS = Request(), Cluster()
ENDPOINT = Hint("node01", 29500, "--rdzv-endpoint")
SUBNET = Cluster(network=NetworkTable(data="192.168.20.0/24"))


def slurm_env(*, num_nodes: int = 6, rank: int = 2, step: str = "0", **more: str) -> dict[str, str]:
    """`srun --ntasks-per-node=1` on node01, node02 ..."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": step,
        "SLURM_STEP_NODELIST": f"node[01-{num_nodes:02d}]" if num_nodes > 1 else "node01",
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_NUM_TASKS": str(num_nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{num_nodes})" if num_nodes > 1 else "1",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": f"node{rank + 1:02d}",
        **more,
    }


MPI_ENV = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


def plan(
    request: Request = NO_FLAGS,
    *,
    env: dict[str, str] | None = None,
    cluster: Cluster = DEFAULTS,
    facts: NodeFacts = FACTS,
    origin: dict[str, str] | None = None,
) -> JobPlan:
    return plan_job(request, world_from_env(env or {}), cluster, facts, job="20261121-7", origin=origin or {})


def refusal(*args: object, kind: type[AllranksError], **kwargs: object) -> str:
    try:
        refused = plan(*args, **kwargs).problem  # of several nodes, the leader refuses
    except AllranksError as exc:
        refused = exc
    assert type(refused) is kind
    return str(refused)


def setting(made: JobPlan, name: str) -> Setting | None:
    return next((setting for setting in reversed(made.settings) if setting.name == name), None)


# ---- the backend


@pytest.mark.parametrize(
    ("wanted", "nodes", "chosen"),
    [
        ("auto", [("node01", 4, 4)], ("nccl", "every rank has a GPU of its own")),
        ("auto", [("node01", 4, 8)], ("nccl", "every rank has a GPU of its own")),
        ("auto", [("node01", 1, 0)], ("gloo", "node01 has 0 GPUs for 1 rank")),
        ("auto", [("node01", 8, 8), ("node02", 8, 7)], ("gloo", "node02 has 7 GPUs for 8 ranks")),
        ("auto", [("node01", 2, 1), ("node02", 2, 0)], ("gloo", "node01 has 1 GPU for 2 ranks")),
        ("gloo", [("node01", 4, 4)], ("gloo", "given by --backend or cluster.toml")),
        ("gloo", [("node01", 4, 0)], ("gloo", "given by --backend or cluster.toml")),
        ("nccl", [("node01", 4, 4), ("node02", 2, 4)], ("nccl", "every rank has a GPU of its own")),
        ("nccl", [(f"n{i}", 8, 8) for i in range(1024)], ("nccl", "every rank has a GPU of its own")),
    ],
)
def test_the_backend_is_nccl_where_every_rank_has_a_gpu(wanted, nodes, chosen):
    assert choose_backend(wanted, nodes) == chosen


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (
            [("node01", 4, 4), ("node02", 4, 2)],
            "backend nccl needs a GPU for each rank, but node02 has 2 GPUs for 4 ranks; "
            "use --nproc-per-node 2 or --backend gloo",
        ),
        (
            [("node01", 1, 0)],
            "backend nccl needs a GPU for each rank, but node01 has 0 GPUs for 1 rank; use --backend gloo",
        ),
    ],
)
def test_nccl_without_gpus_is_refused_with_node_and_numbers(nodes, text):
    with pytest.raises(SetupError) as refused:
        choose_backend("nccl", nodes)
    assert str(refused.value) == text


# ---- ranks a node


@pytest.mark.parametrize(
    ("asked", "facts", "env", "num_workers", "reason", "source"),
    [
        (None, FACTS, {}, 1, "one rank by default", "default"),
        (None, GPU_FACTS, {}, 1, "one rank by default", "default"),
        (None, FACTS, slurm_env(), 1, "one rank by default", "default"),
        (None, GPU_FACTS, slurm_env(), 4, "one rank per GPU", "driver"),
        ("6", GPU_FACTS, slurm_env(), 6, "given on the command line", "--nproc-per-node"),
        ("gpu", GPU_FACTS, {}, 4, "one rank per GPU", "--nproc-per-node"),
        ("auto", GPU_FACTS, {}, 4, "one rank per GPU", "--nproc-per-node"),
        ("auto", FACTS, {}, 16, "one rank per core", "--nproc-per-node"),
        ("cpu", GPU_FACTS, {}, 16, "one rank per core", "--nproc-per-node"),
    ],
)
def test_the_number_of_ranks_has_a_reason(asked, facts, env, num_workers, reason, source):
    made = plan(Request(num_workers=asked), facts=facts, env=env)
    assert made.num_workers == num_workers
    assert setting(made, "num_workers") == Setting("num_workers", str(num_workers), reason, source)


@pytest.mark.parametrize("asked", ["0", "-1", "1.5", "", "gpus", "4 ", "65537"])
def test_a_number_of_ranks_that_makes_no_sense_is_refused(asked):
    text = refusal(Request(num_workers=asked), kind=UsageError)
    assert text == f"--nproc-per-node {asked!r}: expected a number from 1 to 65536, auto, gpu or cpu"


def test_gpu_on_a_node_without_one_is_refused_by_name():
    text = refusal(Request(num_workers="gpu"), kind=SetupError)
    assert text == "--nproc-per-node gpu: the driver shows no GPU on node03; give a number"


# ---- nodes


@pytest.mark.parametrize(
    ("request_", "env", "nodes", "source"),
    [
        (Request(), {}, (1, 1), "default"),
        (Request(min_nodes=1, max_nodes=1), {}, (1, 1), "--nnodes"),
        (Request(min_nodes=4, max_nodes=4, endpoint=ENDPOINT), {}, (4, 4), "--nnodes"),
        (Request(min_nodes=2, max_nodes=4, endpoint=ENDPOINT), {}, (2, 4), "--nnodes"),
        (Request(), slurm_env(num_nodes=6), (6, 6), "slurm"),
        (Request(min_nodes=6, max_nodes=6), slurm_env(num_nodes=6), (6, 6), "slurm"),
        (Request(min_nodes=4, max_nodes=8), slurm_env(num_nodes=6), (4, 6), "slurm"),
        (Request(), slurm_env(num_nodes=1, rank=0), (1, 1), "slurm"),
        (Request(endpoint=ENDPOINT), MPI_ENV, (3, 3), "mpi"),
        (Request(standalone=True), {}, (1, 1), "--standalone"),
        (Request(standalone=True, min_nodes=4, max_nodes=4), {}, (1, 1), "--standalone"),
    ],
)
def test_the_number_of_nodes_is_the_schedulers_or_the_flags(request_, env, nodes, source):
    made = plan(request_, env=env)
    assert (made.min_nodes, made.num_nodes) == nodes
    assert setting(made, "num_nodes") == Setting("num_nodes", str(nodes[1]), "one agent on each", source)


@pytest.mark.parametrize(("low", "high"), [(4, 4), (7, 7), (2, 5), (7, 9)])
def test_another_number_of_nodes_than_the_schedulers_is_refused(low, high):
    text = refusal(Request(min_nodes=low, max_nodes=high), env=slurm_env(num_nodes=6), kind=IdentityError)
    assert text == (
        f"--nnodes {high}, but slurm started this on 6 nodes; remove the flag, "
        "or request that number from the scheduler"
    )


@pytest.mark.parametrize(
    ("request_", "env", "index"),
    [
        (Request(), {}, 0),
        (Request(min_nodes=4, max_nodes=4, endpoint=ENDPOINT), {}, None),
        (Request(min_nodes=4, max_nodes=4, endpoint=ENDPOINT, node_rank=0), {}, 0),
        (Request(min_nodes=4, max_nodes=4, endpoint=ENDPOINT, node_rank=3), {}, 3),
        (Request(), slurm_env(rank=2), 2),
        (Request(node_rank=2), slurm_env(rank=2), 2),
        (Request(endpoint=ENDPOINT), MPI_ENV, 1),
    ],
)
def test_the_index_of_the_node_is_the_schedulers_or_the_flags(request_, env, index):
    assert plan(request_, env=env).node_index == index


def test_a_node_rank_against_the_schedulers_is_refused_with_the_usual_reason():
    text = refusal(Request(node_rank=0), env=slurm_env(rank=2), kind=IdentityError)
    assert text == (
        "--node-rank 0, but this is task 2 of the step; remove the flag "
        "($SLURM_PROCID in a batch script is 0 on every node: the shell expands it before srun starts)"
    )


def test_a_node_rank_beyond_the_last_node_is_refused():
    text = refusal(Request(min_nodes=4, max_nodes=4, node_rank=4, endpoint=ENDPOINT), kind=UsageError)
    assert text == "--node-rank 4: expected 0 to 3 for --nnodes 4"


def test_several_nodes_without_a_meeting_place_are_refused():
    text = refusal(Request(min_nodes=2, max_nodes=2, node_rank=1), kind=UsageError)
    assert text == (
        "--nnodes 2: the address of the first node is missing; add the same --rdzv-endpoint HOST:PORT on all nodes"
    )


def test_the_names_of_the_nodes_are_the_schedulers():
    assert plan(env=slurm_env(num_nodes=3)).node_names == ("node01", "node02", "node03")
    assert plan(Request(min_nodes=2, max_nodes=2, endpoint=ENDPOINT)).node_names == ()
    assert plan(Request(standalone=True)).node_names == ()


# ---- the interface


LOOPBACK = DataPath("lo", "127.0.0.1", "all ranks are on this machine", "num_nodes")


def cluster_with(data: str | None = None, **node: str) -> Cluster:
    nodes = (Node(**node),) if node else ()
    return Cluster(network=NetworkTable(data=data), node=nodes)


def test_the_interface_of_the_subnet_carries_gradients():
    made = plan(env=slurm_env(), cluster=SUBNET, origin={"network.data": "cluster.toml:4"})
    assert made.data_path == DataPath("ens1f1", "192.168.20.3", "192.168.20.3 is in 192.168.20.0/24", "cluster.toml:4")
    assert setting(made, "data_interface") == Setting(
        "data_interface", "ens1f1", "192.168.20.3 is in 192.168.20.0/24", "cluster.toml:4"
    )


def test_an_ipv6_subnet_gives_the_ipv6_address():
    path = plan(env=slurm_env(), cluster=cluster_with("fd00:20::/64")).data_path
    assert path == DataPath("ens1f1", "fd00:20::3", "fd00:20::3 is in fd00:20::/64", "cluster.toml")


def test_without_a_subnet_the_nodes_address_names_the_interface():
    cluster = cluster_with(name="node03", address="10.1.0.3")
    made = plan(env=slurm_env(), cluster=cluster, origin={"node.node03.address": "cluster.toml:9"})
    assert made.data_path == DataPath("eno1", "10.1.0.3", "10.1.0.3 is this node's address", "cluster.toml:9")


@pytest.mark.parametrize("cluster", [Cluster(), cluster_with(name="node01", address="10.1.0.1")])
def test_where_nobody_says_it_the_interface_is_left_to_the_path_to_the_leader(cluster):
    made = plan(env=slurm_env(), cluster=cluster)
    assert made.data_path is None
    assert setting(made, "data_interface") is None


@pytest.mark.parametrize("cluster", [Cluster(), SUBNET])
def test_one_machine_stays_on_loopback(cluster):
    made = plan(cluster=cluster)
    assert made.data_path == LOOPBACK
    assert setting(made, "data_interface") == Setting(
        "data_interface", "lo", "all ranks are on this machine", "num_nodes"
    )


@pytest.mark.parametrize("env", [{}, slurm_env()], ids=["one machine", "six nodes"])
def test_a_subnet_without_interface_lists_those_that_are_there(env):
    assert refusal(env=env, cluster=cluster_with("192.168.99.0/24"), kind=ConfigError) == (
        "[network] data = 192.168.99.0/24: no interface of node03 is in that subnet; it has lo 127.0.0.1 ::1, "
        "eno1 10.1.0.3, ens1f1 192.168.20.3 fd00:20::3; correct the subnet, or run on this machine alone with "
        "--standalone"
    )


def test_a_machine_without_addresses_says_so():
    facts = NodeFacts(host="node03", interfaces=(Interface("eno1", (), is_up=False),), num_gpus=0, num_cpus=1)
    text = refusal(env=slurm_env(), cluster=SUBNET, facts=facts, kind=ConfigError)
    assert "no interface of node03 is in that subnet; it has none with an address; correct the subnet" in text


def test_a_node_whose_address_is_elsewhere_is_refused():
    cluster = cluster_with(name="node03", address="10.1.0.99")
    assert refusal(env=slurm_env(), cluster=cluster, kind=ConfigError) == (
        "[[node]] node03: address = 10.1.0.99, but node03 has lo 127.0.0.1 ::1, eno1 10.1.0.3, "
        "ens1f1 192.168.20.3 fd00:20::3; correct it, or run on this machine alone with --standalone"
    )


@pytest.mark.parametrize("cluster", [cluster_with("192.168.99.0/24"), cluster_with(name="node03", address="10.1.0.99")])
def test_standalone_ignores_what_the_file_says_of_the_network(cluster):
    assert plan(Request(standalone=True), cluster=cluster).data_path == LOOPBACK


@pytest.mark.parametrize("name", ["node03", "someone-else"])
def test_another_interface_than_the_file_says_is_refused(name):
    cluster = cluster_with("192.168.20.0/24", name=name, address="192.168.20.3", interface="ens1f0")
    assert refusal(env=slurm_env(), cluster=cluster, kind=ConfigError) == (
        f"[[node]] {name}: interface = ens1f0, but 192.168.20.3 is on ens1f1 there; correct it, or omit it: "
        "allranks finds the interface from [network] data"
    )


def test_the_interface_that_the_file_says_is_fine():
    cluster = cluster_with("192.168.20.0/24", name="node03", address="192.168.20.3", interface="ens1f1")
    path = plan(env=slurm_env(), cluster=cluster).data_path
    assert path is not None
    assert (path.interface, path.address) == ("ens1f1", "192.168.20.3")


def test_an_interface_that_is_down_is_refused_with_the_cure():
    down = Interface("ens1f1", ("192.168.20.3",), is_up=False)
    facts = NodeFacts(host="node03", interfaces=(LO, down), num_gpus=0, num_cpus=1)
    assert refusal(env=slurm_env(), cluster=SUBNET, facts=facts, kind=SetupError) == (
        "the data interface of node03 is down: ens1f1 192.168.20.3 (down); run ip link set ens1f1 up, "
        "or check its cable and switch port"
    )


def test_the_local_address_beats_the_file():
    made = plan(Request(local_address="10.1.0.3"), env=slurm_env(), cluster=SUBNET)
    assert made.data_path == DataPath("eno1", "10.1.0.3", "it has the address that --local-addr gives", "--local-addr")


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (
            "10.1.0.9",
            "--local-addr 10.1.0.9: node03 has lo 127.0.0.1 ::1, eno1 10.1.0.3, ens1f1 192.168.20.3 fd00:20::3",
        ),
        ("node03", "--local-addr node03: expected an IP address of this machine"),
    ],
)
def test_a_local_address_of_another_machine_is_refused(address, text):
    assert refusal(Request(local_address=address), env=slurm_env(), kind=UsageError) == text


# ---- the port


@pytest.mark.parametrize(
    ("flag", "file", "port", "source"),
    [
        (None, None, 29500, "default"),
        (None, 29611, 29611, "cluster.toml:5"),
        (29777, None, 29777, "flag"),
        (29777, 29611, 29777, "flag"),
        (0, 29611, 0, "flag"),
    ],
)
def test_the_flag_beats_the_file_beats_the_default_port(flag, file, port, source):
    cluster = Cluster() if file is None else Cluster(network=NetworkTable(port=file))
    made = plan(Request(port=flag), cluster=cluster, origin={} if file is None else {"network.port": "cluster.toml:5"})
    assert made.port == port
    assert setting(made, "port") == Setting(
        "port", str(port), "preferred; the leader takes the next free one if it is in use", source
    )


# ---- where the leader may be


def test_the_first_node_of_the_step_may_be_the_leader():
    assert plan(env=slurm_env()).guesses == (Hint("node01", 29500, "first node of the step"),)


def test_the_name_of_the_first_node_is_tried_before_the_files_address():
    cluster = Cluster(
        network=NetworkTable(port=29611), node=(Node(name="node01", address="192.168.20.1", interface=None),)
    )
    assert plan(env=slurm_env(), cluster=cluster).guesses == (
        Hint("node01", 29611, "first node of the step"),
        Hint("192.168.20.1", 29611, "cluster.toml"),
    )


def test_without_a_scheduler_nothing_is_guessed():
    assert plan(Request(min_nodes=2, max_nodes=2, endpoint=ENDPOINT)).guesses == ()


# ---- the name of the job


TWO_NODES = {"min_nodes": 2, "max_nodes": 2, "endpoint": ENDPOINT}


@pytest.mark.parametrize(
    ("request_", "env", "job", "attempt"),
    [
        (Request(), {}, "20261121-7", None),
        (Request(rdzv_id="exp 7"), {}, "exp 7", None),
        (Request(**TWO_NODES), {}, "node01-29500", None),
        (Request(**TWO_NODES, rdzv_id="exp7"), {}, "exp7", None),
        (Request(endpoint=ENDPOINT), {}, "20261121-7", None),
        (Request(), slurm_env(), "4711", 0),
        (Request(), slurm_env(step="3"), "4711.3", 0),
        (Request(), slurm_env(SLURM_ARRAY_JOB_ID="4711", SLURM_ARRAY_TASK_ID="12"), "4711_12", 0),
        (Request(), slurm_env(step="1", SLURM_ARRAY_JOB_ID="4711", SLURM_ARRAY_TASK_ID="12"), "4711_12.1", 0),
        (Request(), slurm_env(SLURM_RESTART_COUNT="2"), "4711", 2),
        (Request(rdzv_id="$SLURM_JOB_ID"), slurm_env(), "4711", 0),
    ],
)
def test_the_job_is_named_by_the_scheduler_else_the_user_else_the_clock(request_, env, job, attempt):
    made = plan(request_, env=env)
    assert (made.job, made.attempt) == (job, attempt)


# ---- ranks


def test_mpi_on_several_nodes_needs_a_meeting_point():
    with pytest.raises(UsageError, match=r"^MPI does not tell the address of the first node; give it with --rdzv"):
        plan(Request(), env=MPI_ENV)


def test_a_node_rank_alone_asks_for_the_number_of_nodes():
    with pytest.raises(
        UsageError, match=r"^--node-rank 3, but the job has one node; add --nnodes with the number of nodes$"
    ):
        plan(Request(node_rank=3))


def test_an_interface_that_is_up_goes_before_one_that_is_down():
    nics = (Interface("ens1f0", ("192.168.20.18",), False), Interface("ens1f1", ("192.168.20.19",), True))
    assert find_interface_in(ip_network("192.168.20.0/24"), nics) == (nics[1], "192.168.20.19")
    assert find_interface_in(ip_network("192.168.20.0/24"), nics, preferred="ens1f0") == (nics[0], "192.168.20.18")


# ---- launchers that start one process a node, or every rank


POD = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "3", "LWS_LEADER_ADDRESS": "gpt-0.gpt"}
PYTORCHJOB = {"RANK": "1", "WORLD_SIZE": "16", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"}
PYTORCHJOB |= {"MASTER_ADDR": "gpt-master-0", "MASTER_PORT": "23456"}
FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_LOCAL_ID": "0",
    "FLUX_JOB_ID": "f2",
}


@pytest.mark.parametrize(
    ("request_", "env", "place", "guess", "job"),
    [
        (Request(), POD, (1, 3, 3), Hint("gpt-0.gpt", 29500, "LWS_LEADER_ADDRESS"), "gpt-0.gpt-0"),
        (
            Request(port=29777),
            POD,
            (1, 3, 3),
            Hint("gpt-0.gpt", 29777, "LWS_LEADER_ADDRESS"),
            "gpt-0.gpt-0",
        ),
        (Request(rdzv_id="exp7"), POD, (1, 3, 3), Hint("gpt-0.gpt", 29500, "LWS_LEADER_ADDRESS"), "exp7"),
        (
            Request(min_nodes=2, max_nodes=3),
            POD,
            (1, 2, 3),
            Hint("gpt-0.gpt", 29500, "LWS_LEADER_ADDRESS"),
            "gpt-0.gpt-0",
        ),
        (Request(), PYTORCHJOB, (1, 2, 2), Hint("gpt-master-0", 23456, "MASTER_ADDR"), "gpt-master-0-23456"),
        (Request(), FLUX | {"MASTER_ADDR": "n1"}, (1, 2, 2), Hint("n1", 29500, "MASTER_ADDR"), "f2"),
        (Request(), MPI_ENV | {"MASTER_ADDR": "n1"}, (1, 3, 3), Hint("n1", 29500, "MASTER_ADDR"), "n1-0"),
    ],
)
def test_a_launcher_of_nodes_gives_place_leader_and_name(request_, env, place, guess, job):
    made = plan(request_, env=env)
    assert (made.node_index, made.min_nodes, made.num_nodes) == place
    assert made.guesses == (guess,)
    assert made.job == job


def test_agents_of_mpi_with_an_endpoint_have_one_name():
    assert plan(Request(endpoint=ENDPOINT), env=MPI_ENV).job == "node01-29500"


@pytest.mark.parametrize(
    ("asked", "env", "facts", "num_workers", "source"),
    [
        (None, PYTORCHJOB, FACTS, 8, "PET_NPROC_PER_NODE"),
        ("2", PYTORCHJOB, FACTS, 2, "--nproc-per-node"),
        (None, PYTORCHJOB | {"PET_NPROC_PER_NODE": "auto", "WORLD_SIZE": "2"}, GPU_FACTS, 4, "PET_NPROC_PER_NODE"),
        (None, POD, GPU_FACTS, 4, "driver"),
        (None, POD, FACTS, 1, "default"),
        (None, FLUX | {"MASTER_ADDR": "n1"}, GPU_FACTS, 4, "driver"),
    ],
)
def test_a_launcher_may_say_the_ranks_of_a_node(asked, env, facts, num_workers, source):
    made = plan(Request(num_workers=asked), env=env, facts=facts)
    assert made.num_workers == num_workers
    assert setting(made, "num_workers").source == source


def test_the_launchers_port_beats_the_files():
    cluster = Cluster(network=NetworkTable(port=29611))
    assert plan(env=PYTORCHJOB, cluster=cluster).port == 23456
    assert plan(env=POD, cluster=cluster).port == 29611


def test_flags_against_a_launcher_of_nodes_are_refused():
    assert refusal(Request(min_nodes=4, max_nodes=4), env=POD, kind=IdentityError) == (
        "--nnodes 4, but leaderworkerset started this on 3 nodes; remove the flag, or request that number from the "
        "scheduler"
    )
    assert refusal(Request(node_rank=2), env=POD, kind=IdentityError) == (
        "--node-rank 2, but LWS_WORKER_INDEX=1; remove the flag, or unset the variable"
    )


def test_a_launcher_that_names_no_node_asks_for_the_first():
    assert refusal(Request(), env=FLUX, kind=UsageError) == (
        "Flux does not tell the address of the first node; give it with --rdzv-endpoint HOST:PORT or MASTER_ADDR; "
        "add to the flux command line: --env=MASTER_ADDR=$(flux hostlist --nth=0 local)"
    )
