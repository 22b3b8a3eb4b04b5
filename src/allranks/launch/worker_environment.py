"""What a worker runs in, each part with its reason: torchrun's variables, those that keep a group alive, its torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from allranks.launch.lead.assignment import make_group
from allranks.launch.plan import JobPlan, Request
from allranks.model.card import WIRE_FLAGS, Card
from allranks.model.cluster import Backend
from allranks.model.data_network import DataNetwork
from allranks.model.membership import format_members
from allranks.model.setting import Setting
from allranks.preflight.datapath import LOOPBACK
from allranks.preflight.group_environment import SettingList
from allranks.report.text import count_of
from allranks.wire.protocol import Plan
from allranks.wire.secret import SECRET_VARIABLE

AFTER_GUARD_S = 60.0
"""Seconds between the guard's hang timeout and torch's collective timeout."""
HOOK_PATH = Path(__file__).parent.parent / "join" / "site"
"""Directory of the `sitecustomize` that enters the workers."""


def node_settings(
    plan: JobPlan,
    group: Plan,
    *,
    env: Mapping[str, str],
    interface: str | None = None,
    store_fd: int | None = None,
    checkpoints: Path | None = None,
    attempt: Path | None = None,
    recorder: Path | None = None,
    members: str | None = None,
) -> list[Setting]:
    """Return what all workers of this node get, beyond what they inherit.

    Args:
        env: the agent's environment; what the user set there is kept.
        interface: the data interface, None where it could not be found out.
        store_fd: the leader's socket for rank 0; None on other nodes and without the hook.
        attempt: directory of this attempt.
        recorder: how the files of torch's flight recorder begin; the rank follows.
        members: value of ALLRANKS_MEMBERS, which may be `@file`; None: the nodes themselves.
    """
    me, num_nodes = group.members[group.node_index], len(group.members)
    has_hook = env.get("ALLRANKS_HOOK") != "0"
    torchrun = "as torchrun sets it"
    given = SettingList(env)
    fix, offer = given.fix, given.offer
    fix("WORLD_SIZE", group.world_size, f"{count_of(num_nodes, 'node')}, {count_of(group.world_size, 'rank')}")
    fix("LOCAL_WORLD_SIZE", me.num_workers, "ranks on this node")
    fix("GROUP_RANK", group.node_index, group.network.ring_reason or "index of this node")
    fix("NODE_RANK", group.node_index, "index of this node, as Lightning and Composer call it")
    fix("GROUP_WORLD_SIZE", num_nodes, "nodes in the job")
    for name in ("SLURM_PROCID", "SLURM_NODEID"):
        if plan.is_slurm and env.get(name, "").isdecimal() and env[name] != str(group.node_index):
            fix(name, group.node_index, "as GROUP_RANK, which a script must not take for another")
    fix("ROLE_NAME", plan.request.role, torchrun)
    fix("ROLE_WORLD_SIZE", group.world_size, torchrun)
    fix("TORCHELASTIC_RUN_ID", plan.job, torchrun)
    fix("TORCHELASTIC_RESTART_COUNT", group.generation, torchrun)
    fix("TORCHELASTIC_MAX_RESTARTS", group.max_restarts, torchrun)
    fix("TORCHELASTIC_USE_AGENT_STORE", False, "rank 0 hosts the store, on a socket of its agent")
    offer("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", torchrun)
    given.of_group(
        group,
        node=me.name,
        num_nodes=num_nodes,
        num_local=me.num_workers,
        num_cpus=plan.facts.num_cpus,
        members=members or format_members(group.members),
        interface=interface,
        infiniband=plan.cluster.network.infiniband,
        recorder=recorder,
    )
    if not has_hook or plan.request.container is not None:  # the hook has Python write each line
        offer("PYTHONUNBUFFERED", 1, "lines appear in the files when they are printed")
    if plan.wanted_backend != Backend.AUTO:
        fix("ALLRANKS_BACKEND_CHOSEN", group.backend, "for scripts that choose no backend", "--backend")
    timeout_s, hang_s = plan.cluster.train.timeout_s, plan.guard.hang_s
    why, source = "collective timeout, unless script or framework pass one", "train.timeout_s"
    why += "; torch's default is 600 s (nccl) or 1800 s (gloo)"
    if has_hook and hang_s <= timeout_s < hang_s + AFTER_GUARD_S:
        timeout_s, source = hang_s + AFTER_GUARD_S, "guard.hang_s"
        why = f"later than the guard, which reports the hanging rank after {hang_s:g} s (guard.hang_s)"
    offer("ALLRANKS_TIMEOUT_S", timeout_s, why, source)
    fix("ALLRANKS_BEAT_S", plan.guard.beat_s, "heartbeat interval of a worker, in seconds", "guard.beat_s")
    if checkpoints is not None:
        if plan.request.checkpoint_dir is not None or "ALLRANKS_CHECKPOINT_DIR" in env:
            fix("ALLRANKS_CHECKPOINT_DIR_CHOSEN", 1, "checkpoints of another script are taken if they fit", "user")
        if plan.request.checkpoint_dir is not None:
            fix("ALLRANKS_CHECKPOINT_DIR", checkpoints, "the same for all attempts and restarts", "--checkpoint-dir")
        else:
            offer("ALLRANKS_CHECKPOINT_DIR", checkpoints, "the same for all attempts and restarts", "run dir")
    if attempt is not None:
        fix("ALLRANKS_ATTEMPT_DIR", attempt, "checkpoints of this run are known by it", "run dir")
    if (every := plan.request.checkpoint_every) is not None:
        fix("ALLRANKS_CHECKPOINT_EVERY", every, "steps between checkpoints", "--checkpoint-every")
    for name, value in wire_variables(plan.request).items():
        fix(name, value, "how DistributedDataParallel sends gradients", WIRE_FLAGS[name])
    fix("ALLRANKS_NODE_GPUS", plan.facts.num_gpus, "GPUs that the driver shows")
    if has_hook:
        fix("ALLRANKS_STORE_PORT", group.store_port, "init_process_group on this port is watched")
        if store_fd is not None:
            fix("ALLRANKS_STORE_FD", store_fd, "the leader's socket for rank 0's store")
        # Kept to the letter: an empty entry is the working directory.
        path = f"{HOOK_PATH}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else HOOK_PATH
        fix("PYTHONPATH", path, "loads the hook; ALLRANKS_HOOK=0 disables it")
    return given.settings


def wire_variables(request: Request) -> dict[str, str]:
    """Return what join/ddp.py reads in a worker, and what the roll call compares among the nodes."""
    given = {"ALLRANKS_COMPRESS": request.compress, "ALLRANKS_BUCKET_MB": request.bucket_mb}
    return {name: value for name, value in given.items() if value is not None}


def base_env(env: Mapping[str, str], settings: Sequence[Setting]) -> dict[str, str]:
    """Return what all workers of this node get: the agent's environment, except its key, and the settings."""
    kept = {name: value for name, value in env.items() if name != SECRET_VARIABLE}
    ours = {setting.name: setting.value for setting in settings}
    return kept | ours | {"ALLRANKS_AGENT_PID": str(os.getpid())}


def rank_settings(group: Plan, local_rank: int, *, error_file: Path) -> list[Setting]:
    """Return what one worker gets beyond `node_settings`."""
    rank = str(group.members[group.node_index].first_rank + local_rank)
    return [
        Setting("RANK", rank, "first rank of this node plus local rank", "allranks"),
        Setting("ROLE_RANK", rank, "as torchrun sets it", "allranks"),
        Setting("LOCAL_RANK", str(local_rank), "index of the worker on this node", "allranks"),
        Setting("TORCHELASTIC_ERROR_FILE", str(error_file), "@record writes its traceback there", "run dir"),
    ]


def provisional_group(plan: JobPlan, *, network: DataNetwork = DataNetwork()) -> Plan:  # noqa: B008
    """Return the group as one node can guess it: every other node has as many ranks and GPUs as this one.

    Args:
        network: as far as it is known before the roll call.
    Raises:
        SetupError: the backend cannot work even so.
    """
    names = plan.node_names or (plan.facts.host,) * plan.num_nodes
    num_workers, num_gpus = plan.num_workers, plan.facts.num_gpus
    return make_group(
        {
            index: Card(host=name, pid=0, node_index=index, num_workers=num_workers, num_gpus=num_gpus)
            for index, name in enumerate(names)
        },
        wanted_backend=plan.wanted_backend,
        network=network,
        attempt=plan.attempt or 0,
        store_address=LOOPBACK if plan.num_nodes == 1 else "(the leader announces it)",
        store_port=plan.port,
    )[plan.node_index or 0]


def describe_torch(version: str) -> list[Setting]:
    """Return the version of torch, and what it lacks of what allranks uses, as far as it was tried.

    A worker does not read this: it looks for each feature where it uses it (its door, tests/versions/table.py), so that
    a torch that nobody has tried works as far as it can. `make versions` compares this with what real jobs found.

    >>> [one.name for one in describe_torch("2.5.1+cu124")], [one.name for one in describe_torch("2.13.0+cpu")]
    (['torch', 'flight recorder', 'kept port'], ['torch'])
    """
    from allranks.join.group import TESTED, is_tested  # an agent needs nothing of it

    reason = f"allranks was tested with {' to '.join(f'{major}.{minor}' for major, minor in TESTED)}"
    if not is_tested(version):
        reason += "; with this one the guard may see less"
    settings = [Setting("torch", version, reason, source="installed package")]
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < (2, 8):
        instead = "the guard sees the collectives that Python code calls, but not those of DDP"
        settings.append(Setting("flight recorder", "none for gloo", instead, source=f"torch {version}"))
        instead = "rank 0's store uses torch's older server, on the same port"
        settings.append(Setting("kept port", "without libuv", instead, source=f"torch {version}"))
    return settings
