"""Does an elastic job resume, and from its last checkpoint?"""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_NOBODY = Blames.NOBODY


class ElasticNoResume(Cause, id="AR602"):
    """An elastic job restarted but did not resume from its checkpoint.

    ## What it means
    torchrun restarts all workers when one fails or a node joins, but it restores nothing: the script must load its last
    checkpoint when it starts. This script found none, did not look for one, or looked in another place. Or the agents
    did not meet again: the first agent that gives up or finishes closes the rendezvous. An agent that joins later gets
    a RendezvousClosedError, even after a restart of its pod, as long as the run's id is the same.

    ## Why it breaks the job
    All steps since the start are lost without an error. Learning rate and data order start again too, so the curves
    before and after do not match. With frequent preemptions the job never finishes.

    ## Example
    From torchrun of torch 2.4, followed by Megatron-LM:

        INFO:torch.distributed.elastic.agent.server.api:[default] Worker group FAILED. 3/3 attempts left; will restart worker group
        WARNING: could not find the metadata file /ckpt/latest_checkpointed_iteration.txt
            will not load any checkpoints and will start from random

    ## Fix
    Load the checkpoint at every start: `trainer.train(resume_from_checkpoint=True)`, `trainer.fit(model,
    ckpt_path="last")`, Megatron `--load` equal to `--save`, DeepSpeed `load_checkpoint(DIR)` with its `latest` file.
    Save often, with optimizer, step, data position and random state. Save to a directory that all nodes share and whose
    name contains neither the time nor the attempt.

    ## Source
    PyTorch, "Train script": https://docs.pytorch.org/docs/stable/elastic/train_script.html; its words: 2.13,
    torch/distributed/elastic/agent/server/api.py. The lines of Megatron-LM, DeepSpeed and transformers as their code and
    copies of it have them (read 2026-11-21).
    """  # noqa: E501  (a real line)

    message = "an elastic job restarted but did not resume from its checkpoint"
    told = "an elastic job restarted but did not resume from its checkpoint"
    fix = "load the last checkpoint when the script starts; after a closed rendezvous, start with a new --rdzv-id"
    exit_code = Exit.USER_CODE
    traits = frozenset({Trait.REPORTED_BY_WATCHERS})
    aliases = ("MN5",)
    also = ("AR404", "AR414", "AR509")
    signs = (
        # dynamic_rendezvous.py and etcd_rendezvous.py: of who comes to a rendezvous that another agent has closed.
        Sign(r"RendezvousClosedE(?:rror|xception)(?:$|[:\"' ])", Role.LIKELY, _NOBODY, Confidence.UNDECIDED),
        Sign(r"attempts left; {1,2}will restart worker group", Role.CONTEXT, _NOBODY),
        Sign(r"new nodes from group_rank=[0-9]+; {1,2}will restart worker group", Role.CONTEXT, _NOBODY),
        Sign(r"\brestart_count=[1-9]", Role.CONTEXT, _NOBODY),
        Sign(r"will not load any checkpoints and will start from", Role.CONTEXT, _NOBODY),
        Sign(r"no checkpoint found at '?(?P<thing>[^ ']{1,300})", Role.CONTEXT, _NOBODY),
        Sign(r"Unable to find latest file at (?P<thing>[^ ,]{1,300})", Role.CONTEXT),
        Sign(r"No valid checkpoint found in output directory \((?P<thing>[^)]{1,300})\)", Role.LIKELY),
    )
    hits = (
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
        "torchelastic.rendezvous.api.RendezvousClosedException",
        '    "message": "RendezvousClosedError: ",',
        "INFO:torch.distributed.elastic.agent.server.api:[default] Worker group FAILED. 3/3 attempts left; will "
        "restart "
        "worker group",
        "INFO:torch.distributed.elastic.agent.server.api:[default] Detected 1 new nodes from group_rank=0; will "
        "restart "
        "worker group",
        "  restart_count=1",
        "    will not load any checkpoints and will start from random",
        "=> no checkpoint found at '/tmp/checkpoint.pth.tar'",
        "[WARNING] [engine.py:2706:load_checkpoint] Unable to find latest file at /ckpt/latest, if trying to load "
        "latest "
        "checkpoint please ensure this file exists or pass an explicit checkpoint tag when loading a checkpoint.",
        "ValueError: No valid checkpoint found in output directory (/work/out)",
    )
    misses = (
        "  restart_count=0",
        "Restored all states from the checkpoint at /ckpt/last.ckpt",
        "[default] worker group successfully finished. Waiting 300 seconds for other agents to finish.",
    )
    no_fault_yet = "the lab's script loads its newest checkpoint at every start, and its strikes wait for one"


class BelowMinimum(Cause, id="AR608"):
    """Fewer nodes are left than the elastic job needs.

    ## What it means
    An elastic job runs with a number of nodes between a minimum and a maximum (`torchrun --nnodes=4:8`). Nodes left,
    and the rest is below the minimum.

    ## Why it breaks the job
    The job does not end, it waits: the agents meet at a new rendezvous until enough nodes join, or until the rendezvous
    times out (torchrun: `join_timeout`, 600 s). Meanwhile the GPUs are reserved and idle.

    ## Example
    From torch 2.13 with the rendezvous logger at DEBUG; otherwise torchrun prints nothing while it waits. In
    intelligent-machine-learning/dlrover#1534, a job of `--nnodes=3:4` with 2 nodes left ended ten minutes later:

        Number of participants 2 less than min_nodes 3, clearing deadline in state

    ## Fix
    Bring nodes back, or allow fewer (`--nnodes=MIN:MAX`, Horovod `--min-np`). Set how long the job may wait:
    `--rdzv-conf=join_timeout=1800`. If nodes keep leaving, find out why: that is the cause.

    ## Source
    PyTorch, torchrun, "Elastic": https://docs.pytorch.org/docs/stable/elastic/run.html (2.13);
    torch/distributed/elastic/ rendezvous/dynamic_rendezvous.py, _remove_participant_epilogue, 2.13 (read 2026-11-21).
    """

    message = "fewer nodes are left than the job needs"
    told = "fewer nodes are left than the elastic job needs, so it waits for more"
    fix = "bring nodes back, or allow fewer: --nnodes MIN:MAX; find out why the nodes left"
    exit_code = Exit.NODE_FAULT
    signs = (
        Sign(
            r"Number of participants (?P<present>[0-9]+) less than min_nodes (?P<wanted>[0-9]+), clearing deadline",
            blames=_NOBODY,
            confidence=Confidence.LIKELY,
        ),
    )
    hits = ("DEBUG:root:Number of participants 2 less than min_nodes 3, clearing deadline in state",)
    misses = (
        "  min_nodes        : 2",
        "  max_nodes        : 4",
        "The minimum number of nodes (0) must be greater than zero.",
    )


class HorovodElasticTimeout(Cause, id="AR609"):
    """Elastic Horovod did not get enough slots in time.

    ## What it means
    Horovod ran elastically (`--min-np`), lost hosts, and had fewer slots than `--min-np`. It does not fail at once: it
    pauses, and asks the discovery script once a second for more hosts. It gives up after `HOROVOD_ELASTIC_TIMEOUT` (600
    s, or `--elastic-timeout`). Hosts on which a worker failed are blacklisted and do not count, even if the script
    still lists them. The job also ends when `--reset-limit` restarts are used up.

    ## Why it breaks the job
    For ten minutes the job seems to hang: no step, no error, all GPUs idle. The cause came before the pause: a
    preempted host, a worker that crashed (its host is then blacklisted), or a discovery script that lists too few
    hosts.

    ## Example
    From horovod/runner/elastic/driver.py, with `--min-np 4`:

        Timed out waiting for {activity}. Please check that you have enough resources to run at least 4 Horovod processes. Timeout after 600 seconds.

    ## Fix
    If hosts do come back, raise the timeout and lower the minimum:

        horovodrun -np 8 --min-np 2 --max-np 12 --elastic-timeout 3600 --blacklist-cooldown-range 30 300 --host-discovery-script ./hosts.sh python train.py

    Run the discovery script by hand: it must print one `HOST:SLOTS` per line. `--verbose` shows which host was
    blacklisted (`blacklist failing host: HOST`); read the first error of its workers.

    ## Source
    Horovod, "Elastic Horovod": https://horovod.readthedocs.io/en/stable/elastic_include.html;
    horovod/runner/elastic/driver.py, registration.py, discovery.py, a newer and an older version each (read
    2026-11-21). 0.28.1 prints `{activity}` with its braces (seen 2026-11-23). The deadlock after a pause:
    horovod/horovod#3494 (read 2026-11-21).
    """  # noqa: E501  (a real line, a command)

    message = "elastic Horovod did not get enough slots in time"
    told = "elastic Horovod fell below --min-np, paused, and gave up after HOROVOD_ELASTIC_TIMEOUT"
    fix = "bring hosts back, lower --min-np, or raise --elastic-timeout; find out why hosts left or were blacklisted"
    exit_code = Exit.SETUP
    aliases = ("MN6",)
    signs = (
        Sign(
            r"enough resources to run at least (?P<wanted>[0-9]+) Horovod processes",
            blames=_NOBODY,
        ),
        Sign(r"Timed out waiting for minimum number of (?:slots|hosts) to become available", blames=_NOBODY),
        Sign(r"reset count (?P<present>[0-9]+) has exceeded limit (?P<limit>[0-9]+) -> stop running", blames=_NOBODY),
        Sign(r"No hosts from previous set remaining, unable to broadcast state", blames=_NOBODY),
        Sign(r"failed to activate new hosts -> stop running", Role.LIKELY, _NOBODY),
        Sign(r"blacklisted slots count == (?P<present>[0-9]+) -> stop running", Role.LIKELY, _NOBODY),
        Sign(r"blacklist failing host: (?P<node>[^ ]{1,200})", Role.VICTIM, Blames.NAMED, Confidence.LIKELY),
        Sign(r"host (?P<node>[^ ]{1,200}) has been blacklisted", Role.VICTIM, Blames.NAMED, Confidence.LIKELY),
        Sign(r"failure count == (?P<present>[0-9]+) -> stop running", Role.VICTIM, _NOBODY),
        Sign(r"wait for available slots: (?P<wanted>[0-9]+)", Role.CONTEXT, _NOBODY),
    )
    hits = (
        "horovod.runner.common.util.timeout.TimeoutException: Timed out waiting for minimum number of slots to become "
        "available. Please check that you have enough resources to run at least 4 Horovod processes.",
        "ERROR:root:reset count 3 has exceeded limit 3 -> stop running",
        "RuntimeError: No hosts from previous set remaining, unable to broadcast state.",
        "horovod.runner.common.util.timeout.TimeoutException: Timed out waiting for {activity}. Please check that you "
        "have enough resources to run at least 4 Horovod processes. Timeout after 600 seconds.",
        "ERROR:root:failed to activate new hosts -> stop running",
        "ERROR:root:blacklisted slots count == 4 -> stop running",
        "WARNING:root:blacklist failing host: ip-10-0-1-7",
        "INFO:root:host ip-10-0-1-7 has been blacklisted, ignoring exit from local_rank=0",
        "ERROR:root:failure count == 2 -> stop running",
        "INFO:root:wait for available slots: 4",
    )
    misses = (
        "Exception: Timed out waiting for tasks to start. Please check connectivity between servers.",
        "INFO:root:start worker process: ip-10-0-1-7[0]",
    )
    no_fault_yet = "Horovod is not part of the lab"
