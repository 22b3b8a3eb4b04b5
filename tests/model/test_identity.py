"""Golden environments, job and step variables both, so that reading the wrong one gives a wrong number."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allranks.causes.book import find_cause
from allranks.model.contradiction import (
    SLURM_ENV,
    SPAWN_INSIDE_SRUN,
    check_no_launcher_inside,
    check_not_spawned,
)
from allranks.model.errors import AllranksError, HostlistError, IdentityError
from allranks.model.identity import check_one_agent_per_node, world_from_env
from allranks.model.world import Launcher, World

# What sbatch gives a script on six nodes: slurmd sets PROCID, LOCALID, NODEID and GTIDS here too.
BATCH = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NUM_NODES": "6",
    "SLURM_NNODES": "6",
    "SLURM_JOB_NODELIST": "n[1-6]",
    "SLURM_NODELIST": "n[1-6]",
    "SLURM_JOB_CPUS_PER_NODE": "48(x6)",
    "SLURM_NTASKS": "48",
    "SLURM_NPROCS": "48",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_TASKS_PER_NODE": "8(x6)",
    "SLURM_JOB_START_TIME": "1790000000",
    "SLURM_JOB_END_TIME": "1790086400",
    "SLURM_SUBMIT_HOST": "login1",
    "SLURM_SUBMIT_DIR": "/home/u/my runs",
    "SLURMD_NODENAME": "n1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_TASK_PID": "900",
    "SLURM_CPUS_ON_NODE": "48",
    "ENVIRONMENT": "BATCH",
}
# `srun --ntasks-per-node=1` in it, on the fourth node.
AGENT = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "n[1-6]",
    "SLURM_STEP_NUM_NODES": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "1(x6)",
    "SLURM_STEP_LAUNCHER_PORT": "40001",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_NTASKS": "6",
    "SLURM_NPROCS": "6",
    "SLURM_TASKS_PER_NODE": "1(x6)",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURMD_NODENAME": "n4",
    "SLURM_NODEID": "3",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "3",
}
# `srun` with a task for every GPU: 28 tasks on four of the six nodes, this one the second on the last node.
UNEVEN = {
    **BATCH,
    "SLURM_STEP_ID": "3",
    "SLURM_STEPID": "3",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "28",
    "SLURM_STEP_TASKS_PER_NODE": "8(x3),4",
    "SLURM_DISTRIBUTION": "block",
    "SLURMD_NODENAME": "n4",
    "SLURM_NODEID": "3",
    "SLURM_PROCID": "25",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "24,25,26,27",
}
# Eight tasks on each of the six nodes; this is rank 13.
GPU_TASK = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-6]",
    "SLURM_STEP_NUM_NODES": "6",
    "SLURM_STEP_NUM_TASKS": "48",
    "SLURM_STEP_TASKS_PER_NODE": "8(x6)",
    "SLURMD_NODENAME": "n2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "5",
    "SLURM_GTIDS": "8,9,10,11,12,13,14,15",
}
# A worker of torchrun on two nodes with eight GPUs.
TORCHRUN = {
    "RANK": "13",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "5",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "13",
    "ROLE_WORLD_SIZE": "16",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "gpu01.cluster",
    "MASTER_PORT": "41234",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "16",
    "PMIX_RANK": "5",
}
HYDRA = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "PMI_FD": "9",
    "HYDI_CONTROL_FD": "8",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
}
SRUN_6 = "srun --ntasks-per-node=1 --nodes=6 --ntasks=6 allranks run ..."


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def numbers(env: dict[str, str]) -> tuple[str, int, int, int, int, int, int]:
    """(launcher, rank, world_size, local_rank, local_world_size, node_index, num_nodes)."""
    w = world_from_env(env)
    place = (w.rank, w.world_size, w.local_rank, w.local_world_size, w.node_index, w.num_nodes)
    return (w.launcher.value, *place)


def refusal(env: dict[str, str]) -> str:
    with pytest.raises(IdentityError) as caught:
        world_from_env(env)
    return str(caught.value)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, ("none", 0, 1, 0, 1, 0, 1), id="nothing"),
        pytest.param({"SLURM_JOB_ID": "4711"}, ("none", 0, 1, 0, 1, 0, 1), id="leftover-job-id"),
        pytest.param(BATCH, ("none", 0, 1, 0, 1, 0, 1), id="batch-script"),
        pytest.param(AGENT, ("slurm", 3, 6, 0, 1, 3, 6), id="sbatch-srun"),
        pytest.param(without(AGENT, "ENVIRONMENT"), ("slurm", 3, 6, 0, 1, 3, 6), id="salloc-srun"),
        pytest.param(UNEVEN, ("slurm", 25, 28, 1, 4, 3, 4), id="uneven"),
        pytest.param(GPU_TASK, ("slurm", 13, 48, 5, 8, 1, 6), id="task-per-gpu"),
        pytest.param(TORCHRUN, ("torchrun", 13, 16, 5, 8, 1, 2), id="torchrun"),
        pytest.param(OPEN_MPI, ("mpi", 5, 8, 1, 4, 1, 2), id="open-mpi"),
        pytest.param(HYDRA, ("mpi", 5, 8, 1, 4, 1, 2), id="hydra"),
        pytest.param(MVAPICH, ("mpi", 5, 8, 1, 4, 1, 2), id="mvapich"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("mpi", 0, 1, 0, 1, 0, 1), id="mpi-world-of-one"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, 0, 1, 0, 1), id="plain-world-of-one"),
        pytest.param(BATCH | OPEN_MPI, ("mpi", 5, 8, 1, 4, 1, 2), id="mpirun-in-batch-script"),
        pytest.param(AGENT | HYDRA, ("mpi", 5, 8, 1, 4, 1, 2), id="mpirun-daemons-are-a-step"),
        pytest.param(
            # What `srun --mpi=pmi2` of SLURM 22.05 adds, recorded in the lab with other numbers.
            GPU_TASK
            | {"PMI_FD": "11", "PMI_JOBID": "77.0", "PMI_RANK": "13", "PMI_SIZE": "48", "SLURM_MPI_TYPE": "pmi2"},
            ("slurm", 13, 48, 5, 8, 1, 6),
            id="srun-mpi-pmi2",
        ),
        pytest.param(
            GPU_TASK | {"RANK": "13", "WORLD_SIZE": "48", "LOCAL_RANK": "5"},
            ("slurm", 13, 48, 5, 8, 1, 6),
            id="enroot-hook-agrees",
        ),
    ],
)
def test_golden_environment(env: dict[str, str], expected: tuple[object, ...]) -> None:
    assert numbers(env) == expected


def test_batch_script_says_how_to_start_on_all_nodes() -> None:
    world = world_from_env(BATCH)
    assert world.job_id == "4711"
    assert world.step_id is None
    assert world.node_name == "n1"
    assert world.notes == (
        "this is the job's script or shell, not a task: it runs on one node, and SLURM_JOB_NUM_NODES=6; "
        "on all nodes: srun --ntasks-per-node=1 --nodes=6 --ntasks=6 allranks run ...",
    )


@pytest.mark.parametrize("step_id", ["4294967290", "4294967291", "4294967292", "4294967293", "-5", "-6"])
def test_special_step_is_no_task(step_id: str) -> None:
    interactive = AGENT | {
        "SLURM_STEP_ID": step_id,
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURMD_NODENAME": "n1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_GTIDS": "0",
    }
    assert numbers(interactive) == ("none", 0, 1, 0, 1, 0, 1)
    assert world_from_env(interactive).step_id is None
    assert SRUN_6 in world_from_env(interactive).notes[0]


def test_step_has_its_nodes_and_says_where_each_value_is_from() -> None:
    world = world_from_env(UNEVEN)
    assert world.hosts == ("n1", "n2", "n3", "n4")
    assert world.tasks_per_node == (8, 8, 8, 4)
    assert (world.job_id, world.step_id, world.attempt, world.node_name) == ("4711", "3", 0, "n4")
    assert {s.name: (s.value, s.source) for s in world.settings} == {
        "rank": ("25", "SLURM_PROCID"),
        "world_size": ("28", "SLURM_STEP_NUM_TASKS"),
        "local_rank": ("1", "SLURM_LOCALID"),
        "local_world_size": ("4", "SLURM_STEP_TASKS_PER_NODE"),
        "node_index": ("3", "SLURM_NODEID"),
        "num_nodes": ("4", "SLURM_STEP_NUM_NODES"),
        "attempt": ("0", "default"),
        "job_id": ("4711", "SLURM_JOB_ID"),
        "step_id": ("3", "SLURM_STEP_ID"),
        "node_name": ("n4", "SLURMD_NODENAME"),
        "hosts": ("n1,n2,n3,n4", "SLURM_STEP_NODELIST"),
        "tasks_per_node": ("8(x3),4", "SLURM_STEP_TASKS_PER_NODE"),
    }
    assert all(s.reason for s in world.settings)
    assert world.notes == (
        "SLURM_STEP_NUM_NODES=4 but SLURM_JOB_NUM_NODES=6: other nodes of the job are not used; "
        "on all nodes: srun --ntasks-per-node=1 --nodes=6 --ntasks=6 allranks run ...",
    )


def test_subset_of_the_job_reads_the_steps_list() -> None:
    # srun -r 1 -N2 --ntasks-per-node=1, in the nested case too: SLURM_JOB_NODELIST stays that of the whole job
    subset = AGENT | {
        "SLURM_STEP_ID": "7",
        "SLURM_STEP_NODELIST": "n[2,5]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURMD_NODENAME": "n5",
        "SLURM_NODEID": "1",
        "SLURM_PROCID": "1",
        "SLURM_GTIDS": "1",
    }
    assert numbers(subset) == ("slurm", 1, 2, 0, 1, 1, 2)
    assert world_from_env(subset).hosts == ("n2", "n5")


def test_nested_srun_on_one_node_is_its_own_world() -> None:
    nested = AGENT | {
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NODELIST": "n4",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_GTIDS": "0,1",
        "SLURM_NTASKS": "6",
    }
    assert numbers(nested) == ("slurm", 1, 2, 1, 2, 0, 1)


def test_cyclic_distribution_is_noted() -> None:
    cyclic = GPU_TASK | {
        "SLURM_DISTRIBUTION": "cyclic",
        "SLURM_GTIDS": "1,7,13,19,25,31,37,43",
        "SLURM_LOCALID": "2",
    }
    assert numbers(cyclic) == ("slurm", 13, 48, 2, 8, 1, 6)
    assert world_from_env(cyclic).notes == (
        "ranks of this node are not contiguous (SLURM_GTIDS=1,7,13,19,25,31,37,43, SLURM_DISTRIBUTION=cyclic): "
        "rank // local_world_size is not its node",
    )


def test_array_job_is_named_by_array_and_task() -> None:
    array = AGENT | {"SLURM_JOB_ID": "4720", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "8"}
    assert world_from_env(array).job_id == "4711_8"
    assert "SLURM_ARRAY_TASK_ID is missing" in refusal(without(array, "SLURM_ARRAY_TASK_ID"))


def test_requeued_job_counts_its_attempts() -> None:
    world = world_from_env(AGENT | {"SLURM_RESTART_COUNT": "2"})
    assert world.attempt == 2
    assert world_from_env(TORCHRUN).attempt == 1


def test_heterogeneous_step_spans_its_parts() -> None:
    # srun --het-group=0,1 : NTASKS and PROCID are of the whole step, NPROCS and *_HET_GROUP_* of the parts
    het = without(AGENT, "SLURM_JOB_NUM_NODES") | {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_ID_HET_GROUP_0": "4711",
        "SLURM_JOB_ID_HET_GROUP_1": "4712",
        "SLURM_JOB_NODELIST": "big1,n[1-3]",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "big1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-3]",
        "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1",
        "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3",
        "SLURM_STEP_NODELIST": "big1,n[1-3]",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "2,1(x3)",
        "SLURM_NTASKS": "5",
        "SLURM_NPROCS": "3",
        "SLURMD_NODENAME": "n2",
        "SLURM_NODEID": "2",
        "SLURM_PROCID": "3",
        "SLURM_GTIDS": "3",
    }
    assert numbers(het) == ("slurm", 3, 5, 0, 1, 2, 4)
    world = world_from_env(het)
    assert world.job_id == "4711"
    assert world.notes == ("heterogeneous job, SLURM_HET_SIZE=2: srun starts only its first part by default",)


def test_a_step_counts_as_another_where_that_is_said() -> None:
    again = world_from_env(UNEVEN | {"ALLRANKS_STEP": "0"})
    assert again.step_id == "0"
    assert ("step_id", "0", "ALLRANKS_STEP") in {(s.name, s.value, s.source) for s in again.settings}
    with pytest.raises(IdentityError, match=r"ALLRANKS_STEP=../x: expected an integer"):
        world_from_env(UNEVEN | {"ALLRANKS_STEP": "../x"})


def test_workers_of_one_torchrun_per_node_are_torchruns() -> None:
    worker = AGENT | TORCHRUN | {"WORLD_SIZE": "48", "GROUP_WORLD_SIZE": "6", "TORCHELASTIC_RUN_ID": "4711"}
    assert numbers(worker) == ("torchrun", 13, 48, 5, 8, 1, 6)
    world = world_from_env(worker)
    assert world.master == ("gpu01.cluster", 41234)
    assert (world.job_id, world.step_id, world.node_name) == ("4711", "0", "n4")
    assert world.hosts == ()  # torchrun's nodes are not in SLURM's order
    assert world.notes == ()


def test_run_id_names_the_job_without_slurm() -> None:
    assert world_from_env(TORCHRUN).job_id is None
    assert world_from_env(TORCHRUN | {"TORCHELASTIC_RUN_ID": "exp7"}).job_id == "exp7"


@pytest.mark.parametrize(
    ("address", "note"),
    [
        ("n1", "MASTER_ADDR=n1 is only a hint; the leader announces itself"),
        ("n1.cluster.org", "MASTER_ADDR=n1.cluster.org is only a hint; the leader announces itself"),
        (
            "10.0.0.1",
            "MASTER_ADDR=10.0.0.1 is no name in SLURM_STEP_NODELIST and only a hint; the leader announces itself",
        ),
    ],
)
def test_master_address_is_a_hint(address: str, note: str) -> None:
    world = world_from_env(AGENT | {"MASTER_ADDR": address, "MASTER_PORT": "29500"})
    assert world.master == (address, 29500)
    assert world.notes == (note,)


@pytest.mark.parametrize("address", ["localhost", "LOCALHOST", "127.0.1.1", "::1", "[::1]", "0.0.0.0", "::"])
def test_loopback_leader_on_six_nodes_is_refused(address: str) -> None:
    assert refusal(AGENT | {"MASTER_ADDR": address}) == (
        f"MASTER_ADDR={address} means each node itself but SLURM_STEP_NUM_NODES=6; "
        "unset MASTER_ADDR MASTER_PORT, the leader announces itself"
    )


def test_loopback_leader_of_torchrun_is_only_noted() -> None:
    world = world_from_env(TORCHRUN | {"MASTER_ADDR": "127.0.0.1"})
    assert world.notes == ("MASTER_ADDR=127.0.0.1 but GROUP_WORLD_SIZE=2: correct only if all of them are one machine",)


def test_several_words_are_no_address() -> None:
    world = world_from_env(AGENT | {"MASTER_ADDR": "10.0.0.1 192.168.0.1\n"})
    assert world.master is None
    assert world.notes == (
        "MASTER_ADDR=10.0.0.1 192.168.0.1\\n is not a single address and is ignored; the leader announces itself",
    )


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(
            AGENT | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
            "RANK=0 but SLURM_PROCID=3, and slurm started this process; unset RANK, "
            "which a parent job, the job script or a shell profile set",
            id="stale-rank",
        ),
        pytest.param(
            GPU_TASK | {"WORLD_SIZE": "16"},
            "WORLD_SIZE=16 but SLURM_STEP_NUM_TASKS=48, and slurm started",
            id="stale-size",
        ),
        pytest.param(GPU_TASK | {"LOCAL_RANK": "0"}, "LOCAL_RANK=0 but SLURM_LOCALID=5, and", id="stale-local-rank"),
        pytest.param(
            GPU_TASK | TORCHRUN,
            "torchrun (TORCHELASTIC_RUN_ID=none, LOCAL_WORLD_SIZE=8) runs inside each of 8 tasks a node "
            "(SLURM_STEP_TASKS_PER_NODE=8(x6)); start one per node: srun --ntasks-per-node=1 --nodes=6 --ntasks=6 "
            "torchrun ..., or one task per GPU without torchrun",
            id="torchrun-in-eight-tasks",
        ),
        pytest.param(
            OPEN_MPI | TORCHRUN,
            "runs inside each of 4 tasks a node (OMPI_COMM_WORLD_LOCAL_SIZE=4)",
            id="torchrun-in-mpi",
        ),
        pytest.param(
            AGENT | TORCHRUN | {"RANK": "5", "WORLD_SIZE": "8", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
            "GROUP_WORLD_SIZE=1 but SLURM_STEP_NUM_NODES=6; every node would train alone; use srun",
            id="six-torchruns-alone",
        ),
        pytest.param(
            AGENT | {"PMI_RANK": "0", "PMI_SIZE": "1"},
            "PMI_RANK=0, PMI_SIZE=1 but SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=6; unset PMI_RANK PMI_SIZE, "
            f"or start with: {SRUN_6}",
            id="mpi-singleton-on-six-nodes",
        ),
        pytest.param(
            BATCH | {"RANK": "0", "WORLD_SIZE": "1"},
            f"WORLD_SIZE=1 but SLURM_JOB_NUM_NODES=6: a world of one on 6 nodes; unset RANK WORLD_SIZE and start "
            f"on all nodes: {SRUN_6}",
            id="world-of-one-in-batch-script",
        ),
        pytest.param(
            MVAPICH | {"PMI_RANK": "4"}, "MV2_COMM_WORLD_RANK=5, MV2_COMM_WORLD_SIZE=8 but PMI_RANK=4", id="mpis"
        ),
        pytest.param(
            {"RANK": "0"},
            "WORLD_SIZE is missing beside RANK=0; unset RANK if left over, or set WORLD_SIZE, too",
            id="no-size",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "12355"},
            "LOCAL_WORLD_SIZE is missing beside RANK=0; unset RANK WORLD_SIZE LOCAL_RANK if left over, or set ",
            id="a-shell-that-once-ran-one-rank",
        ),
        pytest.param({"WORLD_SIZE": "2"}, "RANK is missing beside WORLD_SIZE=2", id="no-rank"),
        pytest.param({"LOCAL_RANK": "2"}, "WORLD_SIZE is missing beside LOCAL_RANK=2", id="local-rank-alone"),
        pytest.param(
            {"TORCHELASTIC_RUN_ID": "x"}, "WORLD_SIZE is missing beside TORCHELASTIC_RUN_ID=x", id="run-id-alone"
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2"},
            "LOCAL_WORLD_SIZE is missing beside RANK=1; unset RANK WORLD_SIZE",
            id="no-local-size",
        ),
        pytest.param(
            without(AGENT, "SLURM_PROCID"), "SLURM_PROCID is missing beside SLURM_STEP_NUM_TASKS=6", id="no-procid"
        ),
        pytest.param(
            TORCHRUN | {"RANK": "16"}, "RANK=16 but WORLD_SIZE=16, expected a larger value", id="rank-too-large"
        ),
        pytest.param(
            TORCHRUN | {"RANK": "-1"},
            "RANK=-1: expected an integer from 0 to 1048576; correct or unset it",
            id="negative",
        ),
        pytest.param(TORCHRUN | {"RANK": "two"}, "RANK=two: expected an integer", id="word"),
        pytest.param(TORCHRUN | {"RANK": "1\n2"}, "RANK=1\\n2: expected an integer", id="two-lines"),
        pytest.param(
            TORCHRUN | {"RANK": "\N{ARABIC-INDIC DIGIT TWO}"}, "RANK=\\u0662: expected an integer", id="unicode"
        ),
        pytest.param(TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0: expected an integer from 1 to 65535", id="port"),
        pytest.param(TORCHRUN | {"LOCAL_WORLD_SIZE": "16"}, "WORLD_SIZE=16 but LOCAL_WORLD_SIZE=16, GROUP", id="sizes"),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"},
            "LOCAL_RANK=0 but LOCAL_WORLD_SIZE=0, expected a larger value",
            id="empty-node",
        ),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "7"},
            "equal nodes in block order cannot have these; start with srun",
            id="odd-mpi",
        ),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"},
            "equal nodes in block order cannot have these",
            id="cyclic-mpi",
        ),
        pytest.param(AGENT | {"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID=x: expected an integer", id="step-id"),
        pytest.param(
            AGENT | {"SLURM_NODEID": "6"}, "SLURM_NODEID=6 but SLURM_STEP_NUM_NODES=6, expected", id="node-id"
        ),
        pytest.param(
            AGENT | {"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1 but SLURM_STEP_TASKS_PER_NODE=1, expected", id="local-id"
        ),
        pytest.param(
            UNEVEN | {"SLURM_STEP_TASKS_PER_NODE": "8(x3),5"},
            "SLURM_STEP_TASKS_PER_NODE=8(x3),5 reads as 29 tasks on 4 nodes but SLURM_STEP_NUM_TASKS=28, "
            "SLURM_STEP_NUM_NODES=4; variables of two steps are mixed",
            id="sum",
        ),
        pytest.param(
            UNEVEN | {"SLURM_STEP_TASKS_PER_NODE": "7(x4)", "SLURM_STEP_NUM_NODES": "5"},
            "28 tasks on 4 nodes",
            id="length",
        ),
        pytest.param(
            UNEVEN | {"SLURM_STEP_TASKS_PER_NODE": "8x3,4"}, "=8x3,4 reads as 4 tasks on 1 nodes", id="syntax"
        ),
        pytest.param(
            AGENT | {"SLURM_STEP_NODELIST": "n[1-5]"},
            "SLURM_STEP_NODELIST=n[1-5] has 5 nodes but SLURM_STEP_NUM_NODES=6",
            id="nodelist-length",
        ),
        pytest.param(
            AGENT | {"SLURMD_NODENAME": "m4"},
            "SLURMD_NODENAME=m4 but SLURM_STEP_NODELIST=n[1-6] does not contain it; variables of two steps are mixed: "
            "start this process with srun, from a shell without SLURM_STEP_*",
            id="step-of-another-job",
        ),
        pytest.param(
            GPU_TASK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0", "SLURMD_NODENAME": "n2"},
            "SLURM_GTIDS=0 but SLURM_PROCID=0, SLURM_LOCALID=0, SLURM_STEP_TASKS_PER_NODE=8 here",
            id="sbatch-called-in-a-step",
        ),
    ],
)
def test_contradiction_is_refused(env: dict[str, str], expected: str) -> None:
    assert expected in refusal(env)


def test_nodes_in_another_order_than_the_list_are_noted() -> None:
    world = world_from_env(AGENT | {"SLURMD_NODENAME": "n2"})
    assert world.rank == 3
    assert world.notes == (
        "SLURM_NODEID=3 but SLURM_STEP_NODELIST=n[1-6] has SLURMD_NODENAME=n2 at another place: their orders differ",
    )


def test_variable_set_to_nothing_is_unset() -> None:
    assert numbers(AGENT | {"RANK": "", "MASTER_ADDR": "", "SLURM_RESTART_COUNT": ""}) == ("slurm", 3, 6, 0, 1, 3, 6)


def test_broken_nodelist_is_a_hostlist_error() -> None:
    with pytest.raises(HostlistError):
        world_from_env(AGENT | {"SLURM_STEP_NODELIST": "n[1-"})


@pytest.mark.parametrize(
    "env", [{}, BATCH, AGENT, {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}]
)
def test_one_agent_per_node_is_accepted(env: dict[str, str]) -> None:
    check_one_agent_per_node(world_from_env(env))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(
            UNEVEN,
            "node n1 has 8 agents (SLURM_STEP_TASKS_PER_NODE=8(x3),4), allranks needs one a node: "
            "srun --ntasks-per-node=1 --nodes=4 --ntasks=4 allranks run ...",
            id="uneven",
        ),
        pytest.param(without(UNEVEN, "SLURM_STEP_NODELIST"), "node 0 has 8 agents (", id="no-names"),
        pytest.param(
            AGENT | {"SLURM_STEP_NODELIST": "n[1-2],n[2-5]", "SLURMD_NODENAME": "n3"},
            "node n2 has 2 agents",
            id="node-in-two-parts",
        ),
        pytest.param(
            TORCHRUN,
            "allranks run is an agent, but RANK=13 and WORLD_SIZE=16 say that it is a worker of torchrun; start it "
            "instead of torchrun, with the same flags, or, if they are left over: unset RANK WORLD_SIZE LOCAL_RANK "
            "LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE TORCHELASTIC_RUN_ID",
            id="torchrun",
        ),
        pytest.param(OPEN_MPI, "this node has 4 agents (", id="open-mpi"),
        pytest.param(HYDRA, "mpiexec -ppn 1 allranks run ...", id="hydra"),
    ],
)
def test_second_agent_on_a_node_is_refused(env: dict[str, str], expected: str) -> None:
    with pytest.raises(IdentityError) as caught:
        check_one_agent_per_node(world_from_env(env))
    assert expected in str(caught.value)


# --- refusals as findings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "cause", "node", "message", "fix"),
    [
        pytest.param(
            AGENT | {"RANK": "0"},
            "AR501 slurm-env",
            "n4",
            "RANK=0 but SLURM_PROCID=3, and slurm started this process",
            "unset RANK, which a parent job, the job script or a shell profile set",
            id="stale-rank",
        ),
        pytest.param(
            GPU_TASK | TORCHRUN,
            "AR502 spawn-inside-srun",
            "n2",
            "torchrun (TORCHELASTIC_RUN_ID=none, LOCAL_WORLD_SIZE=8) runs inside each of 8 tasks a node "
            "(SLURM_STEP_TASKS_PER_NODE=8(x6))",
            "start one per node: srun --ntasks-per-node=1 --nodes=6 --ntasks=6 torchrun ..., or one task per GPU "
            "without torchrun",
            id="torchrun-in-tasks",
        ),
        pytest.param(
            UNEVEN,
            "AR502 spawn-inside-srun",
            "n4",
            "node n1 has 8 agents (SLURM_STEP_TASKS_PER_NODE=8(x3),4)",
            "allranks needs one a node: srun --ntasks-per-node=1 --nodes=4 --ntasks=4 allranks run ...",
            id="agents",
        ),
        pytest.param(
            {"RANK": "0"},
            "AR501 slurm-env",
            None,
            "WORLD_SIZE is missing beside RANK=0",
            "unset RANK if left over, or set WORLD_SIZE, too",
            id="nowhere",
        ),
    ],
)
def test_a_refusal_is_a_finding_with_the_node_and_what_to_do(
    env: dict[str, str], cause: str, node: str | None, message: str, fix: str
) -> None:
    with pytest.raises(IdentityError) as caught:
        check_one_agent_per_node(world_from_env(env))
    finding = caught.value.finding
    assert finding is not None
    assert (finding.cause, finding.node, finding.message, finding.fix) == (cause, node, message, fix)


def test_the_labels_are_those_of_the_causes() -> None:
    assert find_cause("AR501").label == SLURM_ENV
    assert find_cause("AR502").label == SPAWN_INSIDE_SRUN


@pytest.mark.parametrize("env", [AGENT, GPU_TASK, OPEN_MPI, TORCHRUN])
def test_a_spawned_process_of_several_ranks_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(
        IdentityError, match=r"\(mp.spawn\) started this process .* every process that it starts"
    ) as caught:
        check_not_spawned(world_from_env(env))
    assert caught.value.finding is not None
    assert caught.value.finding.cause == SPAWN_INSIDE_SRUN


@pytest.mark.parametrize("env", [{}, BATCH, {"RANK": "0", "WORLD_SIZE": "1"} | {"TORCHELASTIC_RUN_ID": "x"}])
def test_a_spawned_process_of_a_world_of_one_is_not(env: dict[str, str]) -> None:
    check_not_spawned(world_from_env(without(env, "SLURM_JOB_NUM_NODES")))


def test_another_launcher_inside_a_worker_is_refused() -> None:
    inside = {"ALLRANKS_MEMBERS": "a.0=0+4,b-1=4+12", "ALLRANKS_NODE": "b-1"}
    check_no_launcher_inside(inside | {"WORLD_SIZE": "16"})
    check_no_launcher_inside({"WORLD_SIZE": "16"})
    with pytest.raises(IdentityError, match="WORLD_SIZE=4 but ALLRANKS_MEMBERS has 16 ranks"):
        check_no_launcher_inside(inside | {"WORLD_SIZE": "4"})


# --- any environment: a world or one line ----------------------------------------------------------------------------

NAMES = sorted(
    {*AGENT, *TORCHRUN, *OPEN_MPI, *HYDRA, *MVAPICH}
    | {"SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_HET_SIZE", "SLURM_JOB_ID_HET_GROUP_0"}
)
VALUES = st.one_of(
    st.integers(-2, 9).map(str),
    st.sampled_from(
        ["4294967290", "9999999999", "1(x6)", "8(x3),4", "1(x9999999)", "n[1-6]", "n[1-", "localhost", "n1"]
    ),
    st.text(max_size=8),
    st.text("\n\r\x00\x1b\x85\u2028\udc80 ,[]()x-0123456789", max_size=8),
)


@given(
    base=st.sampled_from([{}, BATCH, AGENT, UNEVEN, GPU_TASK, TORCHRUN, OPEN_MPI, HYDRA, MVAPICH, AGENT | TORCHRUN]),
    changed=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6),
    removed=st.sets(st.sampled_from(NAMES), max_size=3),
)
@example(
    base=UNEVEN, changed={"SLURM_STEP_NUM_NODES": "1000000", "SLURM_STEP_TASKS_PER_NODE": "1(x9999999)"}, removed=set()
)
def test_any_environment_gives_a_world_or_one_line(
    base: dict[str, str], changed: dict[str, str], removed: set[str]
) -> None:
    try:
        world = world_from_env(without(base | changed, *removed))
        lines = [*world.notes, *(f"{s.name} {s.value} {s.reason} {s.source}" for s in world.settings)]
        assert_consistent(world)
        check_one_agent_per_node(world)
    except AllranksError as error:
        assert isinstance(error, IdentityError | HostlistError)  # noqa: PT017
        lines = [str(error)]
    assert all(line.isprintable() and line for line in lines)


def assert_consistent(world: World) -> None:
    assert 0 <= world.rank < world.world_size
    assert 0 <= world.local_rank < world.local_world_size <= world.world_size
    assert 0 <= world.node_index < world.num_nodes <= world.world_size
    assert len(world.hosts) in (0, world.num_nodes)
    assert sum(world.tasks_per_node) in (0, world.world_size)
    assert (world.launcher is Launcher.NONE) <= (world.world_size == 1)
