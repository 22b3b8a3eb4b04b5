"""The table of launchers: which variables each sets, and what to write where one is missing. Data only.

A new launcher is a value of `Launcher`, one row here, and one recorded environment in tests/model/environments.
Only SLURM's step (`ranks.py`), and Volcano's and PyTorchJob's pods (`nodes.py`) need more than the names of variables.

    LauncherRow(launcher=Launcher.LWS, title="LeaderWorkerSet", level=LaunchLevel.NODE, names={...}, ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from allranks.model.world import Launcher, LaunchLevel

RANK_FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "node_index", "num_nodes")
WORKER = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
"""A process that has one of these is a worker: its RANK counts ranks."""
_KEY_OF_POD = "ALLRANKS_SECRET in the container's env, from a Secret (secretKeyRef)"
_KEY_OF_MPIRUN = "ALLRANKS_SECRET (Open MPI: mpirun -x ALLRANKS_SECRET)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRow:
    """One launcher. `A|B` is A, or B where A is not set."""

    launcher: Launcher
    title: str
    """As the documentation has it."""
    level: LaunchLevel
    marks: tuple[str, ...]
    """It is this launcher if all of these are set"""
    unless: tuple[str, ...] = ()
    """and none of these."""
    names: Mapping[str, str]
    """Variables of RANK_FIELDS, or of node_index, num_nodes, hosts, host, leader, port, processes; and of job_id."""
    key_from: str
    """Where the job's key comes from, if the nodes share no directory."""
    where: str = "pass on to this process"
    """Begins the line that says what to add."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """What to add where a value is missing; {job} is the name of the pod without its index. Without: the variable."""
    one_a_node: str = "start one process a node: allranks run ..."
    """The command for one agent a node."""


def _ranks(text: str) -> dict[str, str]:
    return {name: variable for name, variable in zip(RANK_FIELDS, text.split(), strict=False) if variable != "-"}


_POD = "add to the container's env"
_MASTER = {"leader": "PET_MASTER_ADDR|PET_RDZV_ENDPOINT|MASTER_ADDR", "port": "PET_MASTER_PORT|MASTER_PORT"}
_POD_LINES = {
    "node_index": "{name: PET_NODE_RANK, valueFrom: {fieldRef: {fieldPath: "
    "\"metadata.annotations['batch.kubernetes.io/job-completion-index']\"}}}",
    "num_nodes": '{name: PET_NNODES, value: "NODES"}',
    "leader": "{name: PET_MASTER_ADDR, value: {job}-0.SERVICE}",
}
_PODS = {"node_index": "RANK", "num_nodes": "WORLD_SIZE", "leader": "MASTER_ADDR", "port": "MASTER_PORT"}

# Order matters. Ranks before nodes: whoever starts the ranks knows more than who placed the pods they run in. Among
# those that start ranks the outermost first: an inner one takes over where the outer one has one task a node. Among
# those that place nodes the most specific first: Trainer runs on JobSet, and JobSet on Indexed Jobs.
LAUNCHERS = (
    LauncherRow(
        launcher=Launcher.SLURM,
        title="SLURM step",
        level=LaunchLevel.RANK,
        marks=("SLURM_STEP_NUM_TASKS",),
        names=_ranks(
            "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE SLURM_NODEID "
            "SLURM_STEP_NUM_NODES"
        ),
        key_from="munge",
        one_a_node="srun --ntasks-per-node=1 allranks run ...",
    ),
    LauncherRow(  # flux-core, src/shell/task.c. No variable has the number of tasks on a node.
        launcher=Launcher.FLUX,
        title="Flux",
        level=LaunchLevel.RANK,
        marks=("FLUX_TASK_RANK",),
        names=_ranks("FLUX_TASK_RANK FLUX_JOB_SIZE FLUX_TASK_LOCAL_ID - - FLUX_JOB_NNODES") | {"job_id": "FLUX_JOB_ID"},
        key_from="ALLRANKS_SECRET (flux run copies the environment)",
        where="add to the flux command line",
        lines={"leader": "--env=MASTER_ADDR=$(flux hostlist --nth=0 local)"},
        one_a_node="flux run --nodes=NODES --tasks-per-node=1 --exclusive allranks run ...",
    ),
    LauncherRow(  # Lightning, fabric/plugins/environments/lsf.py
        launcher=Launcher.LSF,
        title="LSF with jsrun",
        level=LaunchLevel.RANK,
        marks=("JSM_NAMESPACE_RANK",),
        names=_ranks("JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE")
        | {"job_id": "LSB_JOBID"},
        key_from="ALLRANKS_SECRET (jsrun -E ALLRANKS_SECRET)",
        where="set on the jsrun command line",
        lines={"leader": "-E MASTER_ADDR=HOST"},
        one_a_node="jsrun --rs_per_host=1 --tasks_per_rs=1 -c ALL_CPUS -g ALL_GPUS allranks run ...",
    ),
    LauncherRow(  # SLURM, src/plugins/mpi/cray_shasta, sets the same; PBS starts it with mpiexec of PALS.
        launcher=Launcher.PALS,
        title="PBS with PALS",
        level=LaunchLevel.RANK,
        marks=("PALS_RANKID",),
        names=_ranks("PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID|PMI_LOCAL_RANK PMI_LOCAL_SIZE PALS_NODEID")
        | {"job_id": "PBS_JOBID"},
        key_from="ALLRANKS_SECRET (mpiexec --env ALLRANKS_SECRET=...)",
        where="set on the mpiexec command line",
        lines={"leader": "--env MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)"},
        one_a_node="mpiexec -n NODES --ppn 1 allranks run ...",
    ),
    LauncherRow(
        launcher=Launcher.MPI,
        title="Open MPI",
        level=LaunchLevel.RANK,
        marks=("OMPI_COMM_WORLD_RANK|OMPI_COMM_WORLD_SIZE",),
        names=_ranks("OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE"),
        key_from=_KEY_OF_MPIRUN,
    ),
    LauncherRow(  # Before hydra's row: MVAPICH2 is started by hydra.
        launcher=Launcher.MPI,
        title="MVAPICH2",
        level=LaunchLevel.RANK,
        marks=("MV2_COMM_WORLD_RANK|MV2_COMM_WORLD_SIZE",),
        names=_ranks("MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE"),
        key_from=_KEY_OF_MPIRUN,
    ),
    LauncherRow(  # PMI_LOCAL_*: Cray's PMI.
        launcher=Launcher.MPI,
        title="MPICH, Intel MPI",
        level=LaunchLevel.RANK,
        marks=("PMI_RANK|PMI_SIZE",),
        names=_ranks("PMI_RANK PMI_SIZE MPI_LOCALRANKID|PMI_LOCAL_RANK|SLURM_LOCALID MPI_LOCALNRANKS|PMI_LOCAL_SIZE"),
        key_from=_KEY_OF_MPIRUN,
    ),
    LauncherRow(  # cloud.baidu.com/doc/AIHC/s/mm346i20k. A PyTorchJob, whose WORLD_SIZE may be nodes x processes.
        launcher=Launcher.AIHC,
        title="AIHC",
        level=LaunchLevel.NODE,
        marks=("RANK", "WORLD_SIZE", "AIHC_JOB_NAME"),
        unless=WORKER,
        names=_PODS | {"processes": "PET_NPROC_PER_NODE|NPROC_PER_NODE"},
        key_from=_KEY_OF_POD,
        where=_POD,
        lines=_POD_LINES,
    ),
    LauncherRow(  # www.alibabacloud.com/help/en/pai/general-environment-variables: WORLD_SIZE is the number of nodes.
        launcher=Launcher.PAI,
        title="PAI DLC",
        level=LaunchLevel.NODE,
        marks=("RANK", "WORLD_SIZE", "NPROC_PER_NODE"),
        unless=WORKER,
        names=_PODS | {"processes": "NPROC_PER_NODE"},
        key_from=_KEY_OF_POD,
        where=_POD,
        lines=_POD_LINES,
    ),
    LauncherRow(  # kubernetes-sigs/lws, pkg/utils/pod
        launcher=Launcher.LWS,
        title="LeaderWorkerSet",
        level=LaunchLevel.NODE,
        marks=("LWS_WORKER_INDEX|LWS_GROUP_SIZE",),
        names={"node_index": "LWS_WORKER_INDEX", "num_nodes": "LWS_GROUP_SIZE", "leader": "LWS_LEADER_ADDRESS"}
        | {"port": "MASTER_PORT", "processes": "PET_NPROC_PER_NODE"},
        key_from=_KEY_OF_POD,
        where=_POD,
        lines=_POD_LINES | {"leader": "{name: MASTER_ADDR, value: LEADER}"},
    ),
    LauncherRow(  # volcano-sh/volcano, pkg/controllers/job/plugins: env, svc; nodes.py reads VC_<TASK>_HOSTS and _NUM.
        launcher=Launcher.VOLCANO,
        title="Volcano",
        level=LaunchLevel.NODE,
        marks=("VC_TASK_INDEX|VK_TASK_INDEX",),
        names={"node_index": "VC_TASK_INDEX|VK_TASK_INDEX", "port": "MASTER_PORT", "processes": "PET_NPROC_PER_NODE"},
        key_from=_KEY_OF_POD,
        where="add to the Job's spec",
        lines=dict.fromkeys(("node_index", "num_nodes", "leader"), "plugins: {svc: [], env: []}"),
    ),
    LauncherRow(  # kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go; Volcano's pytorch plugin sets it.
        launcher=Launcher.PYTORCHJOB,
        title="PyTorchJob v1",
        level=LaunchLevel.NODE,
        marks=("RANK", "WORLD_SIZE", "PET_NODE_RANK|PET_NNODES|KUBERNETES_SERVICE_HOST"),
        unless=WORKER,
        names=_PODS | {"processes": "PET_NPROC_PER_NODE"},
        key_from=_KEY_OF_POD,
        where=_POD,
        lines=_POD_LINES,
    ),
    LauncherRow(  # kubeflow/trainer, pkg/runtime/framework/plugins/torch
        launcher=Launcher.TRAINER,
        title="Kubeflow Trainer v2",
        level=LaunchLevel.NODE,
        marks=("PET_NODE_RANK",),
        names={"node_index": "PET_NODE_RANK", "num_nodes": "PET_NNODES", **_MASTER, "processes": "PET_NPROC_PER_NODE"},
        key_from=_KEY_OF_POD,
        where=_POD,
        lines=_POD_LINES,
    ),
    LauncherRow(  # kubernetes.io/docs/concepts/workloads/controllers/job; kubernetes-sigs/jobset sets no more.
        launcher=Launcher.INDEXED_JOB,
        title="JobSet, Indexed Job",
        level=LaunchLevel.NODE,
        marks=("JOB_COMPLETION_INDEX",),
        names={"node_index": "JOB_COMPLETION_INDEX", "num_nodes": "PET_NNODES", **_MASTER}
        | {"processes": "PET_NPROC_PER_NODE"},
        key_from=_KEY_OF_POD,
        where=_POD,
        lines=_POD_LINES,
    ),
    LauncherRow(  # docs.skypilot.co, running-jobs/environment-variables
        launcher=Launcher.SKYPILOT,
        title="SkyPilot",
        level=LaunchLevel.NODE,
        marks=("SKYPILOT_NODE_RANK",),
        names={"node_index": "SKYPILOT_NODE_RANK", "num_nodes": "SKYPILOT_NUM_NODES", "hosts": "SKYPILOT_NODE_IPS"}
        | {"job_id": "SKYPILOT_TASK_ID"},
        key_from="ALLRANKS_SECRET under secrets: of the task",
    ),
    LauncherRow(  # dstackai/dstack, runner/internal/executor; no port.
        launcher=Launcher.DSTACK,
        title="dstack",
        level=LaunchLevel.NODE,
        marks=("DSTACK_NODE_RANK",),
        names={"node_index": "DSTACK_NODE_RANK", "num_nodes": "DSTACK_NODES_NUM", "leader": "DSTACK_MASTER_NODE_IP"}
        | {"hosts": "DSTACK_NODES_IPS", "job_id": "DSTACK_RUN_NAME"},
        key_from="ALLRANKS_SECRET=${{ secrets.NAME }} under env: of the task",
    ),
    LauncherRow(  # aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md
        launcher=Launcher.SAGEMAKER,
        title="SageMaker",
        level=LaunchLevel.NODE,
        marks=("SM_HOSTS|SM_CURRENT_HOST",),
        names={"hosts": "SM_HOSTS", "host": "SM_CURRENT_HOST", "job_id": "TRAINING_JOB_NAME"},
        key_from="ALLRANKS_SECRET in environment= of the estimator",
    ),
)


def row_of(launcher: Launcher) -> LauncherRow | None:
    """Return a launcher's row, the first one of MPI; None where nobody, or torchrun, started this process."""
    return next((row for row in LAUNCHERS if row.launcher is launcher), None)
