"""The in-process way through: who am I, is everybody here, form the group, run the block, leave the group.

    with allranks.session() as s:
        model = DistributedDataParallel(Net().to(s.device))
        print(f"rank {s.rank} of {s.world_size} on {s.node}")

Phase 1  who am I        the environment; what contradicts itself is refused before torch is imported  (model.identity)
Phase 2  roll call       `allranks run`: its agents have held it. srun, MPI: the ranks hold it themselves.
                         torchrun: there is none. Nobody launched this: a world of one.               (preflight.place)
Phase 3  form the group  init_process_group, given the environment that an agent would give            (join.group)
Phase 4  the block
Phase 5  leave           destroy_process_group, after an exception, too

What stops it before phase 4 is said once on the terminal and raised as SessionError. Uncaught, it ends the process with
the exit code that `allranks run` would have, and without a traceback. Errors of torch and of the block stay what they
are. Limits: the roll call uses `runs/` in the working directory; torch is imported when session() is entered.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from allranks.config import LoadedCluster, find_cluster_file, read_cluster
from allranks.host.node import read_facts
from allranks.model.cluster import Backend
from allranks.model.contradiction import check_no_launcher_inside, check_not_spawned, finding_of_refusals
from allranks.model.errors import AllranksError, IdentityError, SetupError, UsageError
from allranks.model.finding import Finding, Verdict
from allranks.model.identity import Launcher, World, world_from_env
from allranks.preflight.place import apply_rank, take_place
from allranks.preflight.ranks import describe_group, job_name, own_gpu, settings_of
from allranks.report.rundir import RunDir
from allranks.report.text import Style, render_findings, say
from allranks.wire.protocol import Goodbye

if TYPE_CHECKING:
    import torch

RUN_ROOT = Path("runs")
_SCHEDULERS = ("SLURM", "OMPI_", "MV2_", "PMI", "MPI_")
"""Prefixes of what `allranks run` has judged already when it started this process."""


class SessionError(AllranksError, SystemExit):
    """The session could not begin; what is wrong has been printed. Uncaught, it ends the process with `exit_code`.

    75: a node is at fault, leaving it out cures it. 78: cluster or set-up. 2: the environment or the call.
    """

    def __init__(self, message: str, *, exit_code: int, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message, finding=findings[0] if findings else None)
        self.exit_code = exit_code
        self.code = exit_code  # what the interpreter ends with
        self.findings = findings
        """Culprit first; the same on all ranks that the roll call reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """This process in its group, while the group lasts."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """Ranks on this node; other nodes may have another number."""
    node: str
    """Name of this machine in the job."""
    backend: str
    """nccl or gloo. With nccl that nobody asked for, tensors on the CPU go over gloo."""
    device: torch.device
    """This rank's GPU, already the current one, where the backend is nccl; else the CPU."""

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0: the one that prints and saves."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all ranks are here.

        Raises:
            RuntimeError: torch's, when one is lost or the timeout passes.
        """
        import torch.distributed as dist

        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


@contextlib.contextmanager
def session(
    *, backend: str | None = None, timeout_s: float | None = None, cluster: str | Path | None = None
) -> Iterator[Session]:
    """Form the group on entry, and destroy it on exit; works under `allranks run`, srun, MPI, torchrun, and alone.

    A second session in the same process, after the first, forms the group again without another roll call.

    Args:
        backend: nccl or gloo. None: what launcher or cluster.toml say, else nccl where every rank has a GPU.
        timeout_s: of collectives. None: what launcher or cluster.toml say, else 600.
        cluster: path of cluster.toml. None: $ALLRANKS_CLUSTER, ./cluster.toml. `allranks run` has read its own.
    Raises:
        SessionError: it could not begin. What torch itself raises stays as it is.
    """
    with contextlib.ExitStack() as on_exit:
        try:
            made = _enter(on_exit, backend=backend, timeout_s=timeout_s, cluster=cluster)
        except SessionError:
            raise
        except AllranksError as exc:
            raise _refuse(exc) from exc
        yield made


def _enter(
    on_exit: contextlib.ExitStack,
    *,
    backend: str | None,
    timeout_s: float | None,
    cluster: str | Path | None,
) -> Session:
    if backend not in (None, *Backend):
        raise UsageError(f"session(backend={backend!r}): expected 'nccl', 'gloo' or None")
    if timeout_s is not None and not timeout_s > 0:
        raise UsageError(f"session(timeout_s={timeout_s!r}): expected seconds, more than 0")

    # Phase 1: who am I
    is_below_agent = "ALLRANKS_AGENT_PID" in os.environ
    world = _identify(os.environ, is_below_agent=is_below_agent)
    loaded = LoadedCluster() if is_below_agent else _load_cluster(cluster)
    wanted = backend or str(loaded.cluster.train.backend)

    # Phase 2: roll call
    ground: _Ground | None = None
    if not is_below_agent and world.launcher in (Launcher.SLURM, Launcher.MPI):
        ground = _grounds.get(os.getpid()) or _hold_roll_call(world, loaded, wanted=wanted)
        _grounds[os.getpid()] = ground
        on_exit.enter_context(_environment(ground.values))
        on_exit.callback(ground.release_port)

    # Phase 3: form the group
    dist, c10d = _import_torch()
    if dist.is_initialized():
        raise UsageError("a process group exists already; leave init_process_group out, session() forms the group")
    if ground is not None and not _watch(c10d):
        ground.release_port()  # rank 0 binds it itself, as under torchrun
    asked = None if wanted == Backend.AUTO else wanted
    chosen = asked or os.environ.get("ALLRANKS_BACKEND") or _choose_backend(dist, world)
    node = os.environ.get("ALLRANKS_NODE") or read_facts(os.environ).host
    device = _take_device(chosen, world, node=node)
    seconds = timeout_s or float(os.environ.get("ALLRANKS_TIMEOUT_S") or loaded.cluster.train.timeout_s)
    of_one: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    c10d.init_process_group(
        backend="cpu:gloo,cuda:nccl" if chosen == Backend.NCCL and asked is None else chosen,
        timeout=timedelta(seconds=seconds),
        **(of_one if world.launcher is Launcher.NONE else {}),
    )
    if ground is not None:
        ground.release_port()  # the store has its own hold on it
    on_exit.push(partial(_leave, dist))
    return Session(
        rank=world.rank,
        local_rank=world.local_rank,
        world_size=world.world_size,
        local_world_size=world.local_world_size,
        node=node,
        backend=chosen,
        device=device,
    )


def _leave(dist: ModuleType, kind: type[BaseException] | None, *_: object) -> None:
    """Destroy the group; what that says is of no interest where the block has failed already."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except RuntimeError:
        if kind is None:
            raise


# Phase 1


def _identify(env: Mapping[str, str], *, is_below_agent: bool) -> World:
    """Who this process is, or why it cannot be believed."""
    if is_below_agent:
        check_no_launcher_inside(env)
        node = {"SLURMD_NODENAME": env.get("ALLRANKS_NODE", "")}
        env = {name: value for name, value in env.items() if not name.startswith(_SCHEDULERS)} | node
    world = world_from_env(env)
    is_spawned = multiprocessing.parent_process() is not None
    if is_spawned and (is_below_agent or world.launcher in (Launcher.SLURM, Launcher.MPI)):
        check_not_spawned(world)
    if world.launcher is Launcher.NONE:
        if world.num_job_nodes > 1:
            with finding_of_refusals(world.node_name):
                raise IdentityError(f"{world.notes[0]}; on this one alone: allranks run --standalone")
        if is_spawned:
            say("no launcher says which rank this process of multiprocessing is: it is a world of one")
    return world


def _load_cluster(explicit: str | Path | None) -> LoadedCluster:
    path = find_cluster_file(explicit, os.environ, Path())
    return LoadedCluster() if path is None else read_cluster(path)


# Phase 2


@dataclass(slots=True)
class _Ground:
    """What the roll call came to: all that init_process_group needs."""

    values: dict[str, str]
    listener: socket.socket | None

    def release_port(self) -> None:
        """Let go of the socket that rank 0's store has been given; safe to call twice."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        self.values.pop(_STORE_FD, None)
        os.environ.pop(_STORE_FD, None)


_STORE_FD = "ALLRANKS_STORE_FD"
_grounds: dict[int, _Ground] = {}
"""By process id, since a fork inherits it: the roll call is held once."""


def _hold_roll_call(world: World, loaded: LoadedCluster, *, wanted: str) -> _Ground:
    started_s, env = time.time(), dict(os.environ)
    run_dir = RunDir(RUN_ROOT, job_name(world))
    facts = read_facts(env)
    problem = None if importlib.util.find_spec("torch") else _no_torch("it is not installed")
    applicant = apply_rank(
        world,
        loaded,
        facts,
        wanted_backend=wanted,
        run_dir=run_dir,
        env=env,
        problem=problem,
    )
    try:
        answer = take_place(applicant)
    except AllranksError as exc:
        if exc.finding is None:
            raise
        verdict = Verdict(job=applicant.job, attempt=run_dir.attempt, exit_code=exc.exit_code, findings=(exc.finding,))
        is_speaker = world.local_rank == 0 or world.rank == 1  # one a node; where rank 0 is missing, its neighbour
        raise _pronounce(verdict, run_dir, world, node=facts.host, is_speaker=is_speaker) from exc
    if isinstance(answer, Goodbye):
        if answer.verdict is None or not answer.verdict.findings:
            say(answer.summary)
            raise SessionError(answer.summary, exit_code=answer.exit_code)
        raise _pronounce(answer.verdict, run_dir, world, node=facts.host, is_speaker=world.rank == 0)
    if answer.warnings:
        _print_findings(answer.warnings)
    settings = settings_of(world, answer.group, loaded, interface=answer.interface, env=env)
    if world.rank == 0:
        group = describe_group(world, answer.group, loaded, interface=answer.interface)
        say(f"{group}; roll call {time.time() - started_s:.1f} s; verdicts in {run_dir.attempt_path}")
    if world.local_rank == 0:
        run_dir.create_node(facts.host)
        run_dir.write_settings(facts.host, settings)
    values = {setting.name: setting.value for setting in settings} | {"ALLRANKS_STARTED_S": str(started_s)}
    if answer.listener is not None:
        values[_STORE_FD] = str(answer.listener.fileno())
    return _Ground(values, answer.listener)


# Phase 3


def _import_torch() -> tuple[ModuleType, Any]:
    """Return torch.distributed and the module in which it defines init_process_group."""
    try:
        import torch.distributed as dist

        if dist.is_available():
            from torch.distributed import distributed_c10d

            return dist, distributed_c10d
    except (ImportError, OSError) as exc:  # OSError: a shared library of its is missing
        raise _no_torch(str(exc)) from exc
    raise _no_torch("this build has no torch.distributed")


def _no_torch(why: str) -> SetupError:
    return SetupError(f"session() needs PyTorch in {sys.executable}: {why}; pip install 'torch>=2.11'")


def _watch(c10d: Any) -> bool:
    """Have init_process_group name who is missing, as in a worker of `allranks run`; False: this torch is another."""
    from allranks.join import group

    try:
        group.wrap(c10d)
    except AttributeError as exc:
        say(f"init_process_group is not watched: {exc!r}")
        return False
    return True


def _choose_backend(dist: ModuleType, world: World) -> str:
    """What this node alone can tell: under torchrun, and for a world of one."""
    import torch

    return "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= world.local_world_size else "gloo"


def _take_device(backend: str, world: World, *, node: str) -> torch.device:
    import torch

    if backend != Backend.NCCL:
        return torch.device("cpu")
    position = own_gpu(world.local_rank, torch.cuda.device_count())
    if position is None:
        raise SetupError(
            f"backend nccl, but PyTorch sees {torch.cuda.device_count()} GPUs on {node} and this is local rank "
            f"{world.local_rank}; nvidia-smi and torch.version.cuda say why, or session(backend='gloo')"
        )
    device = torch.device("cuda", position)
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have these variables set, and everything as it was afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# What is wrong


def _pronounce(verdict: Verdict, run_dir: RunDir, world: World, *, node: str, is_speaker: bool) -> SessionError:
    """Write the verdict down, say it where nobody else on this terminal does, and return it as the error."""
    run_dir.attempt = verdict.attempt
    if is_speaker or world.local_rank == 0:
        run_dir.write_verdict(verdict, node=node)
    if is_speaker:
        run_dir.add_event("ended", exit_code=verdict.exit_code)
        _print_findings(verdict.findings)
    culprit = verdict.findings[0]
    return SessionError(
        f"{culprit.cause}: {culprit.node + ': ' if culprit.node else ''}{culprit.message}",
        exit_code=verdict.exit_code,
        findings=verdict.findings,
    )


def _refuse(exc: AllranksError) -> SessionError:
    """Say why this process cannot begin, at length in one process of a node, and return it as the error."""
    is_first = all(os.environ.get(name, "0") == "0" for name in ("SLURM_LOCALID", "LOCAL_RANK"))
    if exc.finding is not None and is_first:
        _print_findings((exc.finding,))
    else:
        cause = f"{exc.finding.cause}: " if exc.finding else ""
        print(f"error: {cause}{exc}", file=sys.stderr, flush=True)
    findings = (exc.finding,) if exc.finding else ()
    return SessionError(str(exc), exit_code=exc.exit_code, findings=findings)


def _print_findings(findings: Sequence[Finding]) -> None:
    print("\n" + render_findings(findings, Style.of(sys.stderr)) + "\n", file=sys.stderr, flush=True)


class _CallableModule(ModuleType):
    """`allranks.session()` is the function, also after somebody has imported this module and so taken its name."""

    def __call__(self, **arguments: Any) -> contextlib.AbstractContextManager[Session]:
        return session(**arguments)


sys.modules[__name__].__class__ = _CallableModule
