"""How the job was started: SLURM's environment, launchers inside each other, timeouts."""

from __future__ import annotations

from allranks.causes.cause import PASSED, Cause, Outcome, unknown, warned
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence


class SlurmEnv(Cause, id="AR501"):
    """The environment contains contradictory ranks, sizes or addresses.

    ## What it means
    Rank, world size and leader can be read from several variables: SLURM's, torchrun's, MPI's, and those that a person
    set. Here two of them contradict each other.

    ## Why it breaks the job
    Whichever value one rank uses, another rank may use the other. Typical results are six jobs of one rank instead of
    one job of six, two ranks with the same number, or ranks that wait for a MASTER_ADDR left in .bashrc last month.

    ## Example
    An error of allranks, shortened:

        error: SLURM_NTASKS=6 but WORLD_SIZE=1; unset what is left over from another launcher

    ## Fix
    Show where each value comes from:

        allranks env --explain
        env | grep -E '^(SLURM_|RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMI)'

    Unset leftover variables (`unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT`), and remove such lines from
    .bashrc and the batch script. In an `salloc` or `sbatch` shell, start ranks with `srun`; the shell itself is not a
    rank.

    ## Source
    SLURM, srun(1), "Output environment variables": https://slurm.schedmd.com/srun.html.
    PyTorch, torchrun, "Environment variables": https://docs.pytorch.org/docs/stable/elastic/run.html (2.13).
    """

    message = "{what}"
    fix = "allranks env --explain shows where both values come from; unset the leftover one"
    exit_code = Exit.USAGE
    traits = frozenset({Trait.OF_ONE_CALL})
    told = "SLURM's tasks do not match what the program expects: they count tasks, ranks or nodes differently"
    also = ("AR502", "AR401", "AR106")
    signs = (
        # Lightning, plugins/environments/slurm.py, 1.8 to 2.6.
        Sign(r"You set `--ntasks=(?P<present>[0-9]+)` in your SLURM bash script, but this variable is not supported"),
        Sign(
            r"You set `devices=(?P<wanted>[0-9]+)` in Lightning, but the number of tasks per node configured in SLURM"
        ),
        Sign(r"You set `num_nodes=(?P<wanted>[0-9]+)` in Lightning, but the number of nodes configured in SLURM"),
        Sign(  # 0.4 to 1.2
            r"You requested (?P<wanted>[0-9]+) GPUs but launched (?P<present>[0-9]+) slurm tasks",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        Sign(r"The `srun` command is available on your system but is not used", Role.CONTEXT),
        Sign(
            r"GLOBAL_RANK: (?P<rank>[0-9]+), MEMBER: (?P<present>[0-9]+)/(?P<wanted>[0-9]+)",
            Role.CONTEXT,
            Blames.NAMED,
        ),
        # What is read from the environment, and is not there.
        Sign(r"environment variable (?P<thing>[A-Z_]{4,20}) expected, but not set"),
        Sign(r"KeyError: '(?P<thing>SLURM_[A-Z_]{2,40})'"),
        Sign(r"KeyError: '(?P<thing>(?:LOCAL_|NODE_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)|OMPI_[A-Z_]+)'"),
        Sign(r"invalid literal for int\(\) with base 10: '(?P<value>[0-9]+\(x[0-9]+\)[^']{0,80})'"),
        Sign(
            r"os\.environ(?:\.get\(|\[) ?['\"](?P<thing>SLURM_[A-Z_]{2,40})['\"]", Role.CONTEXT, Blames.NOBODY
        ),  # as a traceback shows the line
        # Ranks and sizes that contradict each other.
        Sign(r"Invalid rank requested : (?P<rank>-?[0-9]+)/(?P<wanted>[0-9]+)"),
        Sign(
            r"MPI (?:world size|rank) (?P<wanted>[0-9]+) does not match torch (?:world size|rank) (?P<present>[0-9]+)",
            blames=Blames.NOBODY,
        ),
        Sign(r"Invalid rank (?P<rank>-?[0-9]+), rank should be in the interval \[0, ", Role.LIKELY),
        Sign(
            r"world size \((?P<present>[0-9]+)\) is not divisible by (?:tensor|pipeline|context|data|expert)",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        # An address of SLURM's that is not one of the leader's; 127.x is AR209's.
        Sign(r"IP address (?P<address>(?:[02-9]|1[013-9]|12[0-689]|12?\.)[0-9.]*) not found in cluster", Role.LIKELY),
        # srun itself (src/common/slurm_opt.c, src/srun, 15.08 to 24.11).
        Sign(r"Unable to satisfy cpu bind request", blames=Blames.NOBODY),
        Sign(r"CPU binding outside of job step allocation"),
        Sign(r"can't honor --ntasks-per-node set to (?P<wanted>[0-9]+)", Role.LIKELY, Blames.NOBODY, Confidence.LIKELY),
        Sign(
            r"can't run (?P<present>[0-9]+) processes on (?P<wanted>[0-9]+) nodes, setting nnodes",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        Sign(r"More processors requested than permitted", blames=Blames.NOBODY),
        Sign(
            r"SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive", blames=Blames.NOBODY
        ),
        Sign(
            r"(?P<thing>srun): error: Unable to (?:create step|allocate resources)[^:]{0,40}: (?P<error>[A-Z].{4,120})",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        # MPI below srun.
        Sign(r"OMPI was not built with SLURM"),
        Sign(r"No PMIx server was reachable, but a PMI1/2 was detected", Role.LIKELY, Blames.NOBODY),
        # Where: Open MPI says so once for each process, before the reason.
        Sign(
            r"^\[(?P<node>[A-Za-z0-9_.-]+):[0-9]+\] (?:OPAL|PMIX) ERROR: .{1,60} in file (?:pmix|ext|ptl)",
            Role.CONTEXT,
            Blames.NAMED,
        ),
        Sign(r"There are not enough slots available in the system to satisfy", Role.LIKELY, Blames.NOBODY),
    )
    hits = (
        "srun: error: Unable to create step for job 4711: Invalid generic resource (gres) specification",
        "AssertionError: MPI world size 16 does not match torch world size 8",
        "RuntimeError: You set `--ntasks=8` in your SLURM bash script, but this variable is not supported. HINT: Use "
        "`--ntasks-per-node=8` instead.",
        "ValueError: You set `devices=2` in Lightning, but the number of tasks per node configured in SLURM "
        "`--ntasks-per-node=8` does not match. HINT: Set `devices=8`.",
        "ValueError: You set `num_nodes=1` in Lightning, but the number of nodes configured in SLURM `--nodes=2` "
        "does not "
        "match. HINT: Set `num_nodes=2`.",
        "You requested 2 GPUs but launched 1 slurm tasks.",
        "PossibleUserWarning: The `srun` command is available on your system but is not used. HINT: If your "
        "intention is",
        "initializing ddp: GLOBAL_RANK: 1, MEMBER: 2/8",
        "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/16",
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK "
        "expected, but "
        "not set",
        "KeyError: 'SLURM_PROCID'",
        "KeyError: 'LOCAL_RANK'",
        "ValueError: invalid literal for int() with base 10: '4(x2)'",
        "n1:1:1 [0] init.cc:942 NCCL WARN Invalid rank requested : 8/8",
        "ValueError: Invalid rank 8, rank should be in the interval [0, 7]",
        "AssertionError: world size (1) is not divisible by tensor parallel size (4) times pipeline parallel size (2)",
        "RuntimeError: IP address 10.4.1.7 not found in cluster IPs: ['10.4.1.2']",
        "srun: error: Application launch failed: Unable to satisfy cpu bind request",
        "slurmstepd: error: CPU binding outside of job step allocation, allocated CPUs are: 0x200000.",
        "srun: warning: can't honor --ntasks-per-node set to 8 which doesn't match the requested tasks 2 with the "
        "number of "
        "requested nodes 2. Ignoring --ntasks-per-node.",
        "srun: warning: can't run 1 processes on 2 nodes, setting nnodes to 1",
        "srun: error: Unable to create step for job 77: More processors requested than permitted",
        "srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive.",
        "No PMIx server was reachable, but a PMI1/2 was detected.",
        "    _WorkerInfo.LOCAL_WORLD_SIZE = int(os.environ['SLURM_STEP_TASKS_PER_NODE'])",
        "but OMPI was not built with SLURM's PMI support and therefore cannot",
        "[node001:94018] OPAL ERROR: Unreachable in file pmix3x_client.c at line 112",
        "There are not enough slots available in the system to satisfy the 16",
    )
    misses = (
        "RuntimeError: IP address 127.0.1.1 not found in cluster IPs: ['10.0.0.4']",
        "KeyError: 'labels'",
        "SLURM auto-requeueing enabled. Setting signal handlers.",
        "LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1,2,3]",
        "ValueError: invalid literal for int() with base 10: 'abc'",
    )


class SpawnInsideSrun(Cause, id="AR502"):
    """A launcher runs in each of several tasks on one node.

    ## What it means
    `srun` starts one task for each rank, and each task runs a launcher (`torchrun`, `allranks run`) that starts a
    worker for each GPU. A node with eight GPUs then runs 64 workers.

    ## Why it breaks the job
    The launchers of a node compete for one port, each acts as if it were the only one, and ranks are counted several
    times. The job fails with "address already in use", hangs at the rendezvous, or runs out of GPU memory.

    ## Example
    An error of allranks; torchrun prints "RuntimeError: Address already in use", ai4d-iasc/trixie#52:

        error: node node01 has 8 agents (SLURM_STEP_TASKS_PER_NODE=8(x2)), allranks needs one a node: srun --nodes=2 --ntasks-per-node=1 allranks run ...

    ## Fix
    Start one task per node, and let the launcher start the ranks:

        srun --ntasks-per-node=1 allranks run --nproc-per-node=8 train.py

    Or start one task per rank, without a launcher:

        srun --ntasks-per-node=8 python train.py

    `allranks submit` writes the first form.

    ## Source
    PyTorch, torchrun, one agent a node: https://docs.pytorch.org/docs/stable/elastic/run.html (2.13).
    """  # noqa: E501  (a real line)

    message = "{what}"
    fix = "start one agent per node, which starts the workers: srun --ntasks-per-node=1 allranks run ..."
    exit_code = Exit.USAGE
    traits = frozenset({Trait.BEFORE_THE_FIRST_STEP})
    also = ("AR501", "AR405", "AR404")
    signs = (
        Sign(r"agents \([^)]{1,80}\), allranks needs one a node"),
        Sign(r"runs inside each of [0-9]+ tasks a node"),
        # It waits for what another step of its job holds: for ever, where that is the step it runs in.
        Sign(
            r"srun: Job (?:[0-9]+ )?step creation (?:temporarily|still) disabled, retrying",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.UNDECIDED,
        ),
    )
    hits = (
        "error: node node01 has 8 agents (SLURM_STEP_TASKS_PER_NODE=8), allranks needs one a node: srun --nodes=2 "
        "--ntasks-per-node=1 allranks run ...",
        "error: torchrun (TORCHELASTIC_RUN_ID=12, LOCAL_WORLD_SIZE=8) runs inside each of 8 tasks a node "
        "(SLURM_NTASKS_PER_NODE=8); start one a node: srun --nodes=2 --ntasks-per-node=1 torchrun ...",
        "srun: Job 2617225 step creation temporarily disabled, retrying (Requested nodes are busy)",
        "srun: Job step creation still disabled, retrying",
    )
    misses = ("allranks: 6 nodes are here, 6 ranks",)


class TimeoutByAccident(Cause, id="AR510"):
    """A timeout variable does not do what its name suggests.

    ## What it means
    The environment has a variable that shortens or disables the timeout of collectives, or that has no effect.

    ## Why it breaks the job
    A short heartbeat timeout ends healthy ranks during a long checkpoint or a slow first compile. With error handling
    off, a rank whose peer died waits forever. A variable that no program reads gives false safety: another timeout is
    in force.

    ## Example
    From public batch scripts; neither NCCL 2.30 nor torch 2.13 reads NCCL_TIMEOUT:

        export NCCL_TIMEOUT=1800
        export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=30

    ## Fix
    Unset these variables, and set the timeout in one place:

        init_process_group(timeout=datetime.timedelta(seconds=600))

    or `[train] timeout_s` in cluster.toml. The heartbeat timeout must exceed the longest time in which the process does
    not run Python: compiles, checkpoints, first steps. PyTorch's default is 480 s.

    ## Source
    PyTorch, "ProcessGroupNCCL environment variables":
    https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html (2.13, read 2026-09).
    """

    message = "{what}"
    fix = "unset {variable}; set the timeout in one place: [train] timeout_s, or init_process_group(timeout=...)"
    no_fault_yet = "a job runs with it; the roll call checks the variable"

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Warns about variables that shorten or disable the timeout of collectives, or have no effect."""
        if card.facts is None:
            return unknown("this node reported no facts")
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
    """A node's agent cannot start its workers.

    ## What it means
    The agent of this node joined the roll call and reported why it cannot start its workers: the script is missing, a
    flag or cluster.toml does not match this machine, or the environment contains contradictory values.

    ## Why it breaks the job
    A group needs all its ranks. The other nodes are told at once and exit, instead of waiting for the timeout.

    ## Example
    A finding of allranks, shortened:

        AR512 node-cannot-start   node03   train.py: no such file here

    ## Fix
    Follow the message on the node that it names. If a file is missing on one node only, check that its file system is
    mounted (`findmnt --target DIRECTORY`). If all nodes report it, correct the flag or cluster.toml; `allranks run
    --dry-run` on a node shows the error without a job.

    ## Source
    What is checked, and with which words: `allranks run --dry-run`, `allranks config show --origin`.
    """

    roll_call = "a node reports that it cannot take part"
    message = "{what}"
    fix = "correct on {node} what the message reports; allranks run --dry-run tests it there without a job"
    exit_code = Exit.SETUP
    traits = frozenset({Trait.KEEPS_ITS_NODE_OUT})
    no_fault_yet = "the launcher reports it; its own tests omit the script on one node"


_DEAD_NAMES = {
    "NCCL_TIMEOUT": "has no effect: no program reads it",
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
        return "switches error handling off: a rank whose peer died waits forever"
    if name == "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" and value.isdecimal() and int(value) < 60:
        return "ends ranks that compile or save a checkpoint for longer than that"
    return None
