"""How a job ended without a fault of the cluster: an error of the script, or success."""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence


class UserCodeError(Cause, id="AR590"):
    """The user's own code failed.

    ## What it means
    The script raised an exception or exited with a code other than 0, and no evidence points to the cluster.

    ## Why it breaks the job
    One rank that exits ends the job: the others would wait for it in the next collective.

    ## Example
    A finding of allranks:

        AR590 user-code-error   node07 - rank 1   ValueError: bad batch (train.py:7 in <module>)

    ## Fix
    The verdict shows the traceback that came first; those of other ranks are consequences. The whole output is in
    `runs/JOB/attempt_K/NODE/rank_R.err`. If it is always the same rank, look at its share of the data.

    ## Source
    How the first one is found: allranks' verdict (times of the workers' ends, each on its agent's clock).
    """

    is_outcome = True
    message = "{what}"
    told = "the script itself failed; no evidence points to the cluster"
    exit_code = Exit.USER_CODE
    traits = frozenset({Trait.ENDS_BY_ITSELF, Trait.ERROR_OF_SCRIPT, Trait.REPORTED_BY_WATCHERS})
    also = ("AR407",)
    signs = (
        # argparse and Python itself, before the first line of training.
        Sign(r"error: unrecognized arguments: (?P<thing>.{1,200})"),
        Sign(r"error: the following arguments are required: (?P<thing>.{1,200})"),
        Sign(r"error: argument (?P<thing>[^:]{1,80}): (?:invalid|expected|not allowed)"),
        Sign(r"slurmstepd: error: execve\(\): (?P<thing>[^:]{1,200}): (?:No such file|Permission denied)"),
        # Open MPI, and PRRTE (help-errmgr-base.txt): where, and for whom first, stands on lines of their own.
        Sign(r"was unable to find the specified executable file", blames=Blames.NOBODY),
        Sign(r"as it could not find an executable:$", blames=Blames.NOBODY),
        Sign(r"^rank (?P<rank>[0-9]+); it may have occurred for other processes", Role.CONTEXT, Blames.NAMED),
        Sign(r"^Node:  +(?P<node>[A-Za-z0-9][A-Za-z0-9_.-]{0,120})$", Role.CONTEXT, Blames.NAMED),
        Sign(r"^Executable: +(?P<thing>[^ ].{0,200})$", Role.CONTEXT, Blames.NAMED),
        Sign(r"can't open file '(?P<thing>[^']{1,300})': \[Errno 2\]"),
        Sign(r"ModuleNotFoundError: No module named '(?P<thing>[^']{1,200})'", Role.LIKELY),
        Sign(r"ImportError: cannot import name '(?P<thing>[^']{1,200})'", Role.LIKELY),
        Sign(r"SyntaxError: [a-z]", Role.LIKELY),
        Sign(r"IndentationError: [a-z]", Role.LIKELY),
        # How a worker that raised ends: torchrun, srun, SLURM's daemon.
        Sign(r"exitcode  : (?P<code>[12]) \(pid: (?P<pid>[0-9]+)\)", Role.VICTIM, confidence=Confidence.UNDECIDED),
        Sign(
            r"failed \(exitcode: (?P<code>[12])\) local_rank: (?P<local_rank>[0-9]+) \(pid: (?P<pid>[0-9]+)\)",
            Role.VICTIM,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(
            r"FAILED \(non-zero exit code or other failure mode\)",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.UNDECIDED,
        ),
    )
    hits = (
        "slurmstepd: error: execve(): torchrun: No such file or directory",
        "prterun was unable to find the specified executable file, and therefore did",
        "mpirun was unable to launch the specified application as it could not find an executable:",
        "rank 1; it may have occurred for other processes as well.",
        "Node:       gpu2",
        "Executable: /home/mpi/.conda/envs/mpi/bin/python",
        "train.py: error: unrecognized arguments: --local-rank=3",
        "train.py: error: the following arguments are required: --data",
        "train.py: error: argument --lr: invalid float value: '1e-4x'",
        "python: can't open file '/work/train.py': [Errno 2] No such file or directory",
        "ModuleNotFoundError: No module named 'flash_attn'",
        "ImportError: cannot import name 'LlamaModel' from 'transformers' (/opt/venv/transformers/__init__.py)",
        "SyntaxError: invalid syntax",
        "IndentationError: unexpected indent",
        "  exitcode  : 1 (pid: 22747)",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 22747) of "
        "binary: "
        "/opt/venv/bin/python",
        "slurmstepd: error: *** STEP 77.0 ON n1 FAILED (non-zero exit code or other failure mode) ***",
    )
    misses = (
        "  exitcode  : -9 (pid: 3309)",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 22747) of "
        "binary: "
        "python",
        "UserWarning: Could not import flash_attn, falling back to the slow attention",
    )


class Healthy(Cause, id="AR599"):
    """The job is healthy.

    ## What it means
    All ranks exited with code 0 or are running, and there is no evidence of a fault.

    ## Why it breaks the job
    It does not.

    ## Example
    From verdict.json:

        "exit_code": 0, "findings": []

    ## Source
    The exit codes of the workers.
    """

    is_outcome = True
    also = ("AR491",)
    message = "no fault found"
    told = "the job finished without evidence of a fault"
    exit_code = Exit.OK
    traits = frozenset({Trait.SAYS_NOTHING, Trait.SUCCESS})
    also = ("AR491",)
    signs = (
        Sign(r"worker group successfully finished", Role.CONTEXT, Blames.NOBODY),
        # The last line of `allranks run` (launch/lead/outcome.py).
        Sign(r"allranks: .{1,300} succeeded: [0-9]+ ranks?, .{1,60}; output in ", Role.CONTEXT, Blames.NOBODY),
        Sign(r"Training completed\. Do not forget to share your model", Role.CONTEXT, Blames.NOBODY),
        # An agent comes to it when its own workers have finished well.
        Sign(r"Error waiting on exit barrier", Role.CONTEXT, Blames.NOBODY),
        Sign(r"\[exiting program (?:after|at)", Role.CONTEXT, Blames.NOBODY),
        Sign(r"`Trainer\.fit` stopped: `max_(?:epochs|steps)=[0-9]+` reached", Role.CONTEXT, Blames.NOBODY),
    )
    hits = (
        "INFO:torch.distributed.elastic.agent.server.api:[default] worker group successfully finished. Waiting 300 "
        "seconds "
        "for other agents to finish.",
        "allranks: train.py succeeded: 2 ranks, 3 min 20 s; output in runs/4711/attempt_0",
        "Training completed. Do not forget to share your model on huggingface.co/models =)",
        "E1121 14:03:24.123000 909 torch/distributed/elastic/agent/server/api.py:1008] Error waiting on exit barrier. "
        "Elapsed: 0.027895450592041016 seconds",
        "[exiting program after 1190.0357275923093 minutes] datetime: 2021-08-08 01:00:51",
        "`Trainer.fit` stopped: `max_epochs=10` reached.",
    )
    misses = ("[default] Worker group FAILED. 2/3 attempts left; will restart worker group",)
