"""How the job was started, and what it ended with: SLURM's environment, timeouts, the user's own code."""

from __future__ import annotations

from allranks.causes.cause import PASSED, Cause, Outcome, unknown, warned
from allranks.causes.sign import Sign
from allranks.model.card import Card
from allranks.model.errors import Exit


class SlurmEnv(Cause, id="AR501"):
    """The environment contradicts itself about who this process is.

    ## What it means
    Rank, world size and leader can be read from several variables: SLURM's, torchrun's, MPI's, and those that a person
    set. Here two of them disagree.

    ## Why it breaks the job
    Whichever is believed, some ranks believe the other one. The typical results: six jobs of one rank each instead of
    one of six, two ranks with one number, or all waiting for a MASTER_ADDR that was left in .bashrc last month.

    ## Example
    From allranks' own refusal, shortened:

        error: SLURM_NTASKS=6 but WORLD_SIZE=1; unset what is left over from another launcher

    ## Fix
    See where each value comes from:

        allranks env --explain
        env | grep -E '^(SLURM_|RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMI)'

    Take away what is left over: `unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT`, and the same lines in
    .bashrc and the batch script. In an `salloc` or `sbatch` shell start ranks with `srun`; the shell itself is no rank.

    ## Source
    SLURM, srun(1), "Output environment variables": https://slurm.schedmd.com/srun.html.
    PyTorch, torchrun, "Environment variables": https://docs.pytorch.org/docs/stable/elastic/run.html (2.13).
    """

    message = "{what}"
    fix = "allranks env --explain names both sources; unset the one that is left over"
    exit_code = Exit.USAGE
    no_fault_yet = "it is refused before a job begins; the tests of model/identity.py have the cases"


class SpawnInsideSrun(Cause, id="AR502"):
    """A launcher runs in each of several tasks of a node.

    ## What it means
    `srun` starts one task for each rank, and the command of each task is again a launcher (`torchrun`, `allranks run`),
    which starts a worker for each GPU: eight times eight on a node with eight GPUs.

    ## Why it breaks the job
    The launchers of a node fight for one port, each believes that it is the only one, and the ranks are counted several
    times. The job ends with "address already in use", hangs at the rendezvous, or runs out of GPU memory.

    ## Example
    From allranks' own refusal. With torchrun: "RuntimeError: Address already in use", ai4d-iasc/trixie#52:

        error: node node01 has 8 agents (SLURM_STEP_TASKS_PER_NODE=8(x2)), allranks needs one a node: srun --nodes=2 --ntasks-per-node=1 allranks run ...

    ## Fix
    One task a node, and the launcher makes the ranks:

        srun --ntasks-per-node=1 allranks run --nproc-per-node=8 train.py

    or one task a rank, and no launcher:

        srun --ntasks-per-node=8 python train.py

    `allranks submit` writes the first one.

    ## Source
    PyTorch, torchrun, one agent a node: https://docs.pytorch.org/docs/stable/elastic/run.html (2.13).
    """  # noqa: E501  (a real line)

    message = "{what}"
    fix = "srun --ntasks-per-node=1 allranks run ...: one agent a node, it starts the workers"
    exit_code = Exit.USAGE
    signs = (
        Sign(r"agents \([^)]{1,80}\), allranks needs one a node"),
        Sign(r"runs inside each of [0-9]+ tasks a node"),
    )
    hits = (
        "error: node node01 has 8 agents (SLURM_STEP_TASKS_PER_NODE=8), allranks needs one a node: srun --nodes=2 "
        "--ntasks-per-node=1 allranks run ...",
        "error: torchrun (TORCHELASTIC_RUN_ID=12, LOCAL_WORLD_SIZE=8) runs inside each of 8 tasks a node "
        "(SLURM_NTASKS_PER_NODE=8); start one a node: srun --nodes=2 --ntasks-per-node=1 torchrun ...",
    )
    misses = ("allranks: 6 nodes are here, 6 ranks",)


class TimeoutByAccident(Cause, id="AR510"):
    """A timeout setting does not do what it seems to do.

    ## What it means
    The environment has a variable that shortens, switches off or only pretends to set the timeout of collectives.

    ## Why it breaks the job
    A short heartbeat ends healthy ranks during a long checkpoint or a slow first compile. With error handling off,
    a rank whose partner died waits for ever. A variable that nobody reads gives false safety: the timeout in force is
    another one.

    ## Example
    From public batch scripts; neither NCCL 2.30 nor torch 2.13 reads NCCL_TIMEOUT:

        export NCCL_TIMEOUT=1800
        export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=30

    ## Fix
    Take the variables away and set the timeout on purpose, in one place:

        init_process_group(timeout=datetime.timedelta(seconds=600))

    or `[train] timeout_s` in cluster.toml. Leave the heartbeat above the longest time in which the process is busy
    without Python: compiles, checkpoints, first steps; 480 s is PyTorch's own value.

    ## Source
    PyTorch, "ProcessGroupNCCL environment variables":
    https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html (2.13, read 2026-09).
    """

    message = "{what}"
    fix = "unset {variable}; set the timeout in one place: [train] timeout_s, or init_process_group(timeout=...)"
    no_fault_yet = "a job runs with it; only the variable is looked at"

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Warns of variables that shorten, switch off or only pretend to set the timeout of collectives."""
        if card.facts is None:
            return unknown("no facts of this node")
        said = [
            (name, value, why)
            for name, value in sorted(card.facts.environment.items())
            if (why := _surprise(name, value)) is not None
        ]
        if not said:
            return PASSED
        name, value, why = said[0]
        return warned(*(f"{n}={v}: {w}" for n, v, w in said), what=f"{name}={value} {why}", variable=name)


class NodeCannotStart(Cause, id="AR512"):
    """A node's agent says that it cannot take part.

    ## What it means
    The agent of this node came to the roll call and brought a reason why it cannot start its workers: the script is not
    there, a flag or cluster.toml does not fit this machine, the environment contradicts itself.

    ## Why it breaks the job
    A group needs all its ranks. The other nodes are told at once and end with it, instead of waiting for the timeout.

    ## Example
    From allranks' own verdict, shortened:

        AR512 node-cannot-start   node03   train.py: no such file here

    ## Fix
    Do what the message says, on the node that it names. A file is missing on one node only: is its file system mounted
    (`findmnt --target DIRECTORY`)? The same on all nodes: it is a flag or cluster.toml; `allranks run --plan` on a node
    shows what is wrong before the job.

    ## Source
    What is checked, and with which words: `allranks run --plan`, `allranks config show --origin`.
    """

    message = "{what}"
    fix = "do what the message says on {node}; allranks run --plan shows it there without a job"
    exit_code = Exit.SETUP
    no_fault_yet = "the launcher says it; its own tests leave the script away on one node"


class UserCodeError(Cause, id="AR590"):
    """A worker's own code failed.

    ## What it means
    The script raised an exception or ended with an exit code other than 0, and nothing points to the cluster.

    ## Why it breaks the job
    One rank that leaves ends the job: the others would wait for it in the next collective.

    ## Example
    From allranks' own verdict:

        AR590 user-code-error   node07 - rank 1   ValueError: bad batch (train.py:7 in <module>)

    ## Fix
    The traceback in the verdict is the first one in time; those of other ranks follow from it. The whole output lies in
    `runs/JOB/attempt_K/NODE/rank_R.err`. One rank only, and always the same one: look at its share of the data.

    ## Source
    How the first one is found: allranks' verdict (times of the workers' ends, each on its agent's clock).
    """

    is_outcome = True
    message = "{what}"
    exit_code = Exit.USER_CODE


class Healthy(Cause, id="AR599"):
    """All is well.

    ## What it means
    All ranks ended with exit code 0, or are running, and nothing speaks against them.

    ## Why it breaks the job
    It does not.

    ## Example
    From verdict.json:

        "exit_code": 0, "findings": []

    ## Source
    The exit codes of the workers.
    """

    is_outcome = True
    message = "nothing found"
    exit_code = Exit.OK


_DEAD_NAMES = {
    "NCCL_TIMEOUT": "is read by nobody: the timeout is another one",
    "NCCL_BLOCKING_WAIT": "is the old name of TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "is the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "is the old name of TORCH_NCCL_DESYNC_DEBUG",
}


def _surprise(name: str, value: str) -> str | None:
    """What is surprising about this variable, or None."""
    if name in _DEAD_NAMES:
        return _DEAD_NAMES[name]
    if name == "TORCH_NCCL_BLOCKING_WAIT" and value not in ("", "0"):
        return "blocks the CPU in each collective and switches the watchdog's error handling off"
    if name == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and value == "0":
        return "switches error handling off: a rank whose partner died waits for ever"
    if name == "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" and value.isdecimal() and int(value) < 60:
        return "ends ranks that are busy for longer: compiles, checkpoints"
    return None
