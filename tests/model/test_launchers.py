"""Every launcher's recorded environment, and what is refused: values that differ, are missing, or do not fit.

tests/model/environments/NAME.env: a comment with its source, `#=` what is expected of it, `#file VARIABLE host host`
for a file that a variable names, then variables; `\\n` is a newline.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.host.node_files import read_node_files
from allranks.model.claims.launcher_table import LAUNCHERS, row_of
from allranks.model.errors import AllranksError, HostlistError, IdentityError
from allranks.model.identity import NODE_FILES, GivenFlags, check_one_agent_per_node, world_from_env
from allranks.model.world import Launcher, LaunchLevel, World

ENVIRONMENTS = sorted((Path(__file__).parent / "environments").glob("*.env"))
K8S = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def read(name: str) -> dict[str, str]:
    """Variables of a recorded environment."""
    lines = (Path(__file__).parent / "environments" / f"{name}.env").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value.replace("\\n", "\n") for name, _, value in pairs}


def files_of(path: Path) -> dict[str, tuple[str, ...]]:
    words = [line.split()[1:] for line in path.read_text().splitlines() if line.startswith("#file ")]
    return {variable: tuple(hosts) for variable, *hosts in words}


def describe(world: World) -> str:
    if world.level is LaunchLevel.NODE:
        words = [f"{world.launcher}: node {world.node_index} of {world.num_nodes}"]
        words += [f"{world.processes} processes"] if world.processes else []
    else:
        words = [f"{world.launcher}: rank {world.rank} of {world.world_size}"]
        words += [f"local {world.local_rank} of {world.local_world_size}"]
        words += [f"node {world.node_index} of {world.num_nodes}"]
    words += ["leader " + ":".join(str(part) for part in world.master if part)] if world.master else []
    words += [f"job {world.job_id}"] if world.job_id else []
    return ", ".join(words)


def refusal(env: dict[str, str], **kwargs: object) -> str:
    with pytest.raises(IdentityError) as caught:
        world_from_env(env, **kwargs)
    assert str(caught.value).isprintable()
    assert caught.value.finding is not None
    return str(caught.value)


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.stem)
def test_a_recorded_environment_says_who_this_process_is(path: Path) -> None:
    (expected,) = re.findall("^#= (.+)$", path.read_text(), re.MULTILINE)
    world = world_from_env(read(path.stem), files=files_of(path))
    assert describe(world) == expected
    # The batch script and step variables speak of SLURM's other nodes; nothing else is odd here.
    assert not world.notes or world.launcher in (Launcher.SLURM, Launcher.NONE)


def test_every_row_has_a_recorded_environment_and_a_source_of_its_key() -> None:
    recorded = {world_from_env(read(path.stem), files=files_of(path)).launcher for path in ENVIRONMENTS}
    assert recorded == {row.launcher for row in LAUNCHERS} | {Launcher.NONE}
    assert {row.launcher for row in LAUNCHERS} == set(Launcher) - {Launcher.TORCHRUN, Launcher.NONE}
    assert all(row.key_from for row in LAUNCHERS)


def test_every_row_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/launchers.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| (rank|node) \|", page, re.MULTILINE)
    assert [(title, level) for title, _, level in rows] == [(row.title, str(row.level)) for row in LAUNCHERS]
    assert [launcher for _, launcher, _ in rows] == [str(row.launcher) for row in LAUNCHERS]


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.stem)
def test_values_say_which_variable_they_come_from(path: Path) -> None:
    env, files = read(path.stem), files_of(path)
    world = world_from_env(env, files=files)
    known = {*env, *files, "default", str(world.launcher)}
    assert {setting.source for setting in world.settings} <= known


# ---- one agent a node


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("flux", "flux run --nodes=NODES --tasks-per-node=1 --exclusive allranks run ..."),
        ("pals", "mpiexec -n NODES --ppn 1 allranks run ..."),
        ("lsf", "jsrun --rs_per_host=1 --tasks_per_rs=1 -c ALL_CPUS -g ALL_GPUS allranks run ..."),
        ("open-mpi", "mpirun --map-by ppr:1:node allranks run ... (Open MPI), "),
    ],
)
def test_several_agents_a_node_are_refused_with_the_launchers_command(name: str, command: str) -> None:
    with pytest.raises(IdentityError) as caught:
        check_one_agent_per_node(world_from_env(read(name)))
    assert f"allranks needs one a node: {command}" in str(caught.value)


@pytest.mark.parametrize(
    "row", [row for row in LAUNCHERS if row.level is LaunchLevel.NODE], ids=lambda row: row.launcher
)
def test_one_process_a_node_is_an_agents_place(row) -> None:
    path = next(path for path in ENVIRONMENTS if world_from_env(read(path.stem)).launcher is row.launcher)
    check_one_agent_per_node(world_from_env(read(path.stem)))


# ---- precedence


def test_a_slurm_step_wins_inside_a_pod_that_lacks_what_it_needs() -> None:
    world = world_from_env(read("slurm-step") | {"JOB_COMPLETION_INDEX": "1"})
    assert (world.launcher, world.rank, world.world_size) == (Launcher.SLURM, 3, 6)


def test_what_two_launchers_say_alike_is_no_contradiction() -> None:
    # A manifest that sets torchrun's names from LeaderWorkerSet's.
    world = world_from_env(read("leaderworkerset") | {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "gpt-0"})
    assert describe(world) == "leaderworkerset: node 2 of 3, leader gpt-0.gpt.default"


def test_daemons_that_another_launcher_started_are_not_the_ranks() -> None:
    # mpirun of Open MPI in a PBS job: PALS started a daemon on each node, and the ranks have its variables, too.
    daemon = {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "0", "PALS_NODEID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}
    world = world_from_env(read("open-mpi") | daemon | {"PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1"})
    assert describe(world) == "mpi: rank 3 of 4, local 1 of 2, node 1 of 2"


def test_workers_of_torchrun_in_a_pod_are_torchruns() -> None:
    worker = {"RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    more = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    for name in ("pytorchjob", "kubeflow-trainer", "indexed-job", "leaderworkerset", "skypilot"):
        world = world_from_env(read(name) | worker | more)
        assert (world.launcher, world.rank, world.level) == (Launcher.TORCHRUN, 13, LaunchLevel.RANK)


def test_ranks_spread_over_nodes_one_by_one_are_known_where_the_node_is_said() -> None:
    # mpiexec of PALS with --cpu-bind and a round-robin: rank 5 of 8 is the third on the second of two nodes.
    cyclic = read("pals") | {"PALS_LOCAL_RANKID": "2", "PMI_LOCAL_RANK": "2"}
    assert "rank 5 of 8, local 2 of 4, node 1 of 2" in describe(world_from_env(cyclic))


# ---- what differs in value


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(
            read("kubeflow-trainer") | {"JOB_COMPLETION_INDEX": "3"},
            "PET_NODE_RANK=2 but JOB_COMPLETION_INDEX=3, and both say which node this is, and of how many; variables",
            id="two-indices",
        ),
        pytest.param(
            read("leaderworkerset") | {"PET_NODE_RANK": "2", "PET_NNODES": "4"},
            "LWS_GROUP_SIZE=3 but PET_NNODES=4, and both say",
            id="two-counts",
        ),
        pytest.param(
            read("aihc") | {"WORLD_SIZE": "12"},
            "WORLD_SIZE=12 but PET_NNODES=2 and PET_NPROC_PER_NODE=8; WORLD_SIZE counts nodes, or nodes times",
            id="aihc-size",
        ),
        pytest.param(read("aihc") | {"RANK": "9"}, "RANK=9 but PET_NODE_RANK=1, and both", id="aihc-rank"),
        pytest.param(
            read("indexed-job") | {"RANK": "1"},
            "RANK=1 but JOB_COMPLETION_INDEX=3, and indexed-job started this process; variables of two launches",
            id="rank-of-the-manifest",
        ),
        pytest.param(
            read("skypilot") | {"SKYPILOT_NODE_IPS": "10.0.0.1"},
            "SKYPILOT_NODE_IPS=10.0.0.1 has 1 nodes but SKYPILOT_NUM_NODES=2; variables of two launches",
            id="list-of-one",
        ),
        pytest.param(
            read("volcano") | {"VC_WORKER_HOSTS": "gpt-worker-0.gpt"},
            "VC_WORKER_HOSTS=gpt-worker-0.gpt has 1 nodes but VC_WORKER_NUM=3",
            id="volcano-list-of-one",
        ),
        pytest.param(
            read("sagemaker") | {"SM_CURRENT_HOST": "algo-3"},
            "SM_CURRENT_HOST=algo-3 but SM_HOSTS does not contain it",
            id="host-not-in-list",
        ),
        pytest.param(read("sagemaker") | {"SM_HOSTS": '["algo-1"'}, "expected a JSON list of host names", id="json"),
        pytest.param(
            read("dstack") | {"DSTACK_NODE_RANK": "2"},
            "DSTACK_NODE_RANK=2 but DSTACK_NODES_NUM=2, expected a larger value",
            id="index-too-large",
        ),
        pytest.param(read("leaderworkerset") | {"LWS_GROUP_SIZE": "0"}, "expected an integer from 1 to", id="no-nodes"),
        pytest.param(
            read("flux") | {"FLUX_JOB_SIZE": "7", "PMI_SIZE": "7"},
            "FLUX_JOB_SIZE=7 but FLUX_JOB_NNODES=2: not the same number on each node; start equally many tasks",
            id="flux-uneven",
        ),
        pytest.param(read("flux") | {"PMI_RANK": "6"}, "FLUX_TASK_RANK=5, FLUX_JOB_SIZE=8 but PMI_RANK=6", id="pmi"),
        pytest.param(
            read("leaderworkerset") | {"LWS_LEADER_ADDRESS": "localhost"},
            "LWS_LEADER_ADDRESS=localhost means each node itself but LWS_GROUP_SIZE=3",
            id="leader-is-everybody",
        ),
    ],
)
def test_values_that_differ_are_refused_in_one_line(env: dict[str, str], expected: str) -> None:
    assert expected in refusal(env)


@pytest.mark.parametrize(
    ("name", "variable", "hosts", "expected"),
    [
        ("pals", "PBS_NODEFILE", ("n1",) * 8, "PBS_NODEFILE=/var/spool/pbs/aux/88123.pbs01 lists 1 host but 2 nodes"),
        ("lsf", "LSB_DJOB_RANKFILE", ("h1", "h1"), ".2817463.hostfile lists 1 host but 2 nodes"),
    ],
)
def test_a_file_with_fewer_hosts_than_nodes_is_refused(name, variable, hosts, expected) -> None:
    assert expected in refusal(read(name), files={variable: hosts})


def test_a_file_of_the_whole_allocation_names_where_rank_0_may_be() -> None:
    world = world_from_env(read("pals"), files={"PBS_NODEFILE": ("n1", "n1", "n2", "n3")})
    assert (world.master, world.hosts) == (("n1", None), ())


# ---- what is missing


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(
            K8S | {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"},
            "JOB_COMPLETION_INDEX=2 (JobSet, Indexed Job) but nothing says the number of nodes and the address of "
            'node 0; add to the container\'s env: {name: PET_NNODES, value: "NODES"}, '
            "{name: PET_MASTER_ADDR, value: train-0.SERVICE}; to run on this node only: allranks run --standalone",
            id="bare-indexed-job",
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "2", "PET_NNODES": "4"},
            "but nothing says the address of node 0; add to the container's env: {name: PET_MASTER_ADDR, value: JOB-0.",
            id="no-leader",
        ),
        pytest.param(
            {"LWS_GROUP_SIZE": "4", "LWS_LEADER_ADDRESS": "a-0.a"},
            "LWS_GROUP_SIZE=4 (LeaderWorkerSet) but nothing says the index of this node; add to the container's env: "
            "{name: PET_NODE_RANK, valueFrom: {fieldRef: {fieldPath: ",
            id="no-index",
        ),
        pytest.param(
            {"VC_TASK_INDEX": "1"},
            "VC_TASK_INDEX=1 (Volcano) but nothing says the number of nodes and the address of node 0; add to the "
            "Job's spec: plugins: {svc: [], env: []}; to run",
            id="volcano-without-svc",
        ),
        pytest.param(
            {"SKYPILOT_NODE_RANK": "1"},
            "SKYPILOT_NODE_RANK=1 (SkyPilot) but nothing says the number of nodes and the address of node 0; pass on "
            "to this process: SKYPILOT_NUM_NODES, SKYPILOT_NODE_IPS; to run",
            id="scrubbed",
        ),
        pytest.param({"PET_NODE_RANK": "0"}, "nothing says the number of nodes and the address", id="node-rank-alone"),
        pytest.param(
            {"PMI_RANK": "3", "PMI_SIZE": "8"}, "MPI_LOCALNRANKS is missing beside PMI_RANK=3", id="pmi2-alone"
        ),
    ],
)
def test_what_is_missing_is_named_with_the_lines_to_add(env: dict[str, str], expected: str) -> None:
    assert expected in refusal(env)


def test_the_lines_to_add_make_the_environment_whole() -> None:
    bare = K8S | {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"}
    lines = dict(re.findall(r"\{name: (\w+), value: \"?([^\"}]+)\"?\}", refusal(bare)))
    whole = bare | lines | {"PET_NNODES": "4"}
    assert describe(world_from_env(whole)) == "indexed-job: node 2 of 4, leader train-0.SERVICE"


def test_flags_say_what_no_variable_says() -> None:
    flags = GivenFlags(num_nodes=4, has_leader=True)
    world = world_from_env({"JOB_COMPLETION_INDEX": "2"}, given=flags)
    assert describe(world) == "indexed-job: node 2 of 4"
    assert world.source_of("num_nodes") == "--nnodes"
    assert "node_index" not in refusal({"JOB_COMPLETION_INDEX": "2"}, given=GivenFlags(num_nodes=4))


def test_a_job_of_one_node_needs_no_leader() -> None:
    assert describe(world_from_env({"JOB_COMPLETION_INDEX": "0", "PET_NNODES": "1"})) == "indexed-job: node 0 of 1"


def test_an_elastic_job_counts_its_most_nodes() -> None:
    world = world_from_env(read("kubeflow-trainer") | {"PET_NNODES": "2:4"})
    assert describe(world) == "kubeflow-trainer: node 2 of 4, 8 processes, leader gpt-node-0-0.gpt:29400"


@pytest.mark.parametrize(
    ("said", "leader"),
    [
        ("gpt-0.gpt:29400", ("gpt-0.gpt", 29400)),
        ("[fd00::1]:29400", ("fd00::1", 29400)),
        ("fd00::1", ("fd00::1", None)),
        ("10.0.0.1", ("10.0.0.1", None)),
    ],
)
def test_an_endpoint_may_have_a_port(said: str, leader: tuple[str, int | None]) -> None:
    env = {"JOB_COMPLETION_INDEX": "2", "PET_NNODES": "4", "PET_RDZV_ENDPOINT": said}
    assert world_from_env(env).master == leader


# ---- a script in an allocation


def test_the_script_of_a_pbs_job_on_several_nodes_is_no_task() -> None:
    world = world_from_env(
        {"PBS_JOBID": "1.pbs", "PBS_NODEFILE": "/aux/1"}, files={"PBS_NODEFILE": ("n1", "n1", "n2", "n2")}
    )
    assert (world.launcher, world.num_nodes, world.num_job_nodes) == (Launcher.NONE, 1, 2)
    assert world.notes == (
        "this is the job's script or shell, not a task: it runs on one node, and PBS_NODEFILE=/aux/1 has 2 nodes; "
        "on all nodes: mpiexec -n 2 --ppn 1 allranks run ...",
    )


@pytest.mark.parametrize("hosts", [("n1", "n1"), ("n1",)])
def test_the_script_of_a_job_on_one_node_may_run_alone(hosts) -> None:
    for variable in NODE_FILES.values():
        assert world_from_env({variable: "/aux/1"}, files={variable: hosts}).notes == ()


def test_node_files_are_read_as_far_as_they_can_be(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1 slots=2\n\nn2\n")
    env = {"PBS_NODEFILE": str(tmp_path / "nodes"), "LSB_DJOB_RANKFILE": str(tmp_path / "none")}
    assert read_node_files(env, NODE_FILES.values()) == {"PBS_NODEFILE": ("n1", "n1", "n2")}
    assert read_node_files({"PBS_NODEFILE": "a\0b"}, NODE_FILES.values()) == {}


# ---- any environment


NAMES = sorted({name for path in ENVIRONMENTS for name in read(path.stem)})
VALUES = st.one_of(
    st.integers(-2, 9).map(str),
    st.sampled_from(
        ["4294967290", "-5", "2:4", "auto", "n1,n2", "n1\nn2", '["a","b"]', "[", "localhost", "a:1", "a:99999"]
    ),
    st.text('\n\r\x00\x1b\u2028\udc80 ,[]():x-0123456789"', max_size=8),
)


@given(
    base=st.sampled_from([path.stem for path in ENVIRONMENTS]),
    more=st.sampled_from([path.stem for path in ENVIRONMENTS]),
    changed=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    removed=st.sets(st.sampled_from(NAMES), max_size=3),
)
def test_any_two_launchers_give_a_world_or_one_line(base, more, changed, removed) -> None:
    env = {name: text for name, text in (read(more) | read(base) | changed).items() if name not in removed}
    try:
        world = world_from_env(env, files={"PBS_NODEFILE": ("n1", "n2")})
        check_one_agent_per_node(world)
    except AllranksError as error:
        assert isinstance(error, IdentityError | HostlistError)  # noqa: PT017
        assert str(error).isprintable()  # noqa: PT017
        return
    assert 0 <= world.rank < world.world_size
    assert 0 <= world.node_index < world.num_nodes <= world.world_size
    assert len(world.hosts) in (0, world.num_nodes)
    assert world.level is not LaunchLevel.NODE or (world.rank, world.world_size) == (world.node_index, world.num_nodes)
    assert row_of(world.launcher) is not None or world.launcher in (Launcher.NONE, Launcher.TORCHRUN)


@given(nodes=st.integers(1, 12), each=st.integers(1, 9), data=st.data())
def test_ranks_of_a_pytorchjob_follow_from_its_nodes(nodes: int, each: int, data) -> None:
    # Any world of nodes x processes gives the same nodes, whether WORLD_SIZE counts the one or the other.
    index = data.draw(st.integers(0, nodes - 1))
    pod = {"RANK": str(index), "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(each), "MASTER_ADDR": "a"}
    for size in (nodes, nodes * each):
        world = world_from_env(pod | {"WORLD_SIZE": str(size), "PET_NODE_RANK": str(index)})
        assert (world.node_index, world.num_nodes, world.processes) == (index, nodes, str(each))
