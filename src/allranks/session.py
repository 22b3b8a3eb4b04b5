"""A session inside a script: hold the roll call, form the group, run the block, leave the group.

    with allranks.session() as s:
        model = s.ddp(Net().to(s.device))
        state = s.track(model=model, optimizer=optimizer, sampler=sampler)      # resumes where it stopped
        for step in state.steps(loader, total=10_000):
            with step as batch:
                ...

Phase 1  who am I        the environment; contradictions are refused before torch is imported   (preflight.identify)
Phase 2  roll call       `allranks run`: its agents have held it. srun, MPI: the ranks hold it themselves.
                         torchrun: there is none. Nobody launched this: a world of one.               (preflight.place)
Phase 3  form the group  init_process_group, given the environment that an agent would give            (join.group)
Phase 4  the block       its steps, and checkpoints between them                              (state.resumed.track)
Phase 5  leave           destroy_process_group, after an exception, too                                (join.leave)

What stops it before phase 4 is said once on the terminal and raised as SessionError. Uncaught, it ends the process with
the exit code that `allranks run` would have, and without a traceback. Errors of torch and of the block stay what they
are. Limits: the roll call uses `runs/` in the working directory; torch is imported when session() is entered.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from allranks.comm.sizing import choose_by_environment
from allranks.config.file import LoadedCluster, find_cluster_file, read_cluster
from allranks.guard.inside.cell import Cell
from allranks.host.node import read_facts
from allranks.join.device import choose_backend, leave_cores, take_device
from allranks.join.group import LAST_WORK_S
from allranks.join.leave import leave
from allranks.model.cluster import Backend
from allranks.model.errors import AllranksError, UsageError
from allranks.model.membership import GroupId, Membership
from allranks.model.world import Launcher
from allranks.preflight.identify import describe_membership, identify
from allranks.preflight.ranks_as_nodes import demand_gpu, job_name
from allranks.report.refusal import SessionError as SessionError
from allranks.report.refusal import refuse, refusing
from allranks.report.rundir import RunDir
from allranks.report.text import say

if TYPE_CHECKING:
    import torch

    from allranks.comm.local_sgd import LocalSGD
    from allranks.preflight.ground import Ground
    from allranks.state.resumed.buckets import PinnedBuckets, Wrapped
    from allranks.state.resumed.sampler import Sampler, SeededDataset
    from allranks.state.resumed.track import Tracked

RUN_ROOT = Path("runs")
_grounds: dict[int, Ground] = {}
"""By process id, since a fork inherits it: the roll call is held once."""
_incarnations = itertools.count(1)
"""Of the default group in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """This process in its group, while the group lasts."""

    membership: Membership
    """Which ranks train together, and which of them is this."""
    local_rank: int
    node: str
    """Name of this machine in the job."""
    backend: str
    """nccl or gloo. With nccl that nobody asked for, tensors on the CPU go over gloo."""
    device: torch.device
    """This rank's GPU, already the current one, where the backend is nccl; else the CPU."""
    job: str = ""
    """Name of the job, the same in all its attempts; empty where nobody gave it one."""
    _on_exit: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False, compare=False)
    _wrapped: Wrapped = field(repr=False, compare=False)

    @property
    def rank(self) -> int:
        """Of this process, from 0."""
        return self.membership.rank

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return self.membership.world_size

    @property
    def local_world_size(self) -> int:
        """Ranks on this node; other nodes may have another number."""
        return self.membership.local_world_size

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0: the one that prints and saves."""
        return self.membership.is_leader

    def barrier(self) -> None:
        """Wait until all ranks are here.

        Raises:
            RuntimeError: torch's, when one is lost or the timeout passes.
        """
        import torch.distributed as dist

        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def ddp(
        self, module: torch.nn.Module, *, compress: str | None = None, noise_scale: bool = False, **arguments: Any
    ) -> PinnedBuckets:
        """Wrap a module in DistributedDataParallel whose sums come out the same after a restart; all ranks together.

        Its buckets fit the network (comm.sizing). They fix the order of the sums: `track` takes them from a checkpoint.

        Args:
            module: on `device` already.
            compress: "bf16", "int8", "powersgd" (comm.hooks). None: what `allranks run --compress` says, else fp32.
            noise_scale: say every 100 steps how many steps a larger batch would save; see comm.noise.
            arguments: of DistributedDataParallel; with bucket_cap_mb, that size stays.
        Raises:
            UsageError: there is no such format, or the module cannot have it.
        """
        own: dict[str, Any] = {"device_ids": [self.device.index]} if self.device.type == "cuda" else {}
        choose = partial(choose_by_environment, os.environ, ranks=self.world_size, backend=self.backend)
        attach: Callable[[PinnedBuckets], Any] | None = None
        if compress := compress or os.environ.get("ALLRANKS_COMPRESS"):
            from allranks.comm import hooks  # and torch's, which only who asks for them has to import

            choose, attach = partial(choose, compress=compress), partial(hooks.attach, wire_format=compress)
            own |= {"bucket_cap_mb": size} if (size := hooks.preferred_bucket_mb(compress)) else {}
        if noise_scale:
            from allranks.comm import noise

            attach = noise.around(attach, say=say if self.is_leader else None)
        from allranks.state.resumed.buckets import asked_size

        with refusing():
            own |= {"bucket_cap_mb": mb} if (mb := asked_size(os.environ)) else {}
            return self._wrapped.wrap(module, own | arguments, choose, attach=attach)

    def local_sgd(self, ddp: PinnedBuckets, optimizer: torch.optim.Optimizer, **arguments: Any) -> LocalSGD:
        """Return an optimizer whose ranks step apart, and meet every few steps; for its arguments see comm.local."""
        from allranks.comm.local_sgd import LocalSGD

        with refusing():
            return LocalSGD(ddp, optimizer, **arguments)

    def sampler(self, dataset: int | Sized, *, global_batch_size: int, **arguments: Any) -> Sampler:
        """Return a batch sampler for this rank, with the same global batches at any number of ranks.

        Args:
            dataset: or its length.
            global_batch_size: samples of a step over all ranks.
            arguments: seed, shuffle, drop_last, micro_batch_size; see state.resumed.sampler.
        """
        from allranks.state.resumed.sampler import Sampler

        return Sampler(dataset, global_batch_size=global_batch_size, membership=self.membership, **arguments)

    def seeded(self, dataset: Any) -> SeededDataset:
        """Return the dataset with a seed for each sample: the same augmentation on any rank, and after a restart."""
        from allranks.state.resumed.sampler import SeededDataset

        return SeededDataset(dataset)

    def validate(
        self,
        model: torch.nn.Module,
        dataset: Any,
        measure: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int,
        **arguments: Any,
    ) -> dict[str, float]:
        """Return sums over a whole dataset, each sample counted once; all ranks call it together.

        Args:
            model: in eval mode meanwhile; no gradients are computed, and random generators stay where they are.
            dataset: with `__getitem__` and `__len__`; the ranks share it.
            measure: returns the sums of a batch, by name, the same names each time: {"loss": ..., "correct": ...}.
            batch_size: most samples of one forward pass on one rank.
            arguments: of DataLoader: num_workers, collate_fn.
        """
        from allranks.state.resumed.validation import validate

        arguments |= {"membership": self.membership, "device": self.device}
        return validate(model, dataset, measure, batch_size=batch_size, **arguments)

    def track(
        self,
        *unnamed: Any,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        keep_best: tuple[str, str] | None = None,
        partial: bool = False,
        accumulates: bool = False,
        on_corruption: str | None = None,
        replay: Callable[[Any], object] | None = None,
        replay_every: int | None = None,
        log: Any = None,
        **parts: Any,
    ) -> Tracked:
        """Say what a checkpoint holds, and put it back where there is one; all ranks call it together.

        Args:
            unnamed: refused: each part has a name in the checkpoint.
            checkpoint_dir: seen by all nodes. None: what `allranks run` says, else checkpoints/ of this job.
            checkpoint_every: steps. None: what `allranks run --checkpoint-every` says, else the cadence decides.
            keep: how many of the newest checkpoints stay, at least 2.
            keep_best: name of a value given to `state.save`, and "min" or "max"; the best checkpoint stays, too.
            partial: take the parts that are in the checkpoint, and let the others begin anew; says which.
            accumulates: gradients go on from step to step, so checkpoints hold them.
            on_corruption: of a rank's bits: "roll-back" to where all agreed (as None), "stop", "heal" by others' bits.
            replay: f(batch), forward and backward: all ranks repeat a batch, to find one that computes wrongly.
            replay_every: steps between two replays, which cost a forward and backward pass each; given with `replay`.
            log: gets the values of `step.log`, too, on rank 0: a run of W&B, SummaryWriter, mlflow, or f(step, values).
            parts: model, optimizer, scheduler, sampler, scaler: anything with state_dict, the same on all ranks.
        Raises:
            UsageError: a part cannot be saved, or the newest checkpoint is of other parts or another experiment.
        """
        from allranks.state.resumed.begin import begin

        with refusing():
            if unnamed:
                raise UsageError("track() takes its parts by name: track(model=model, optimizer=optimizer)")
            return begin(
                parts,
                checkpoint_dir=checkpoint_dir,
                checkpoint_every=checkpoint_every,
                default=RunDir(RUN_ROOT, self.job).checkpoints_path(None) if self.job else Path("checkpoints"),
                membership=self.membership,
                device=self.device,
                keep=keep,
                keep_best=keep_best,
                partial=partial,
                accumulates=accumulates,
                on_corruption=on_corruption,
                replay=replay,
                replay_every=replay_every,
                log=log,
                cell=cell if (cell := Cell.inherited()) and cell.claim() else None,
                on_exit=self._on_exit,
                wrapped=self._wrapped,
                on_loss=_say_last_words,
            )


class Opening(contextlib.AbstractContextManager[Session]):
    """A session that is not entered yet. Its attributes are those of the Session that `with` gives."""

    def __init__(self, opened: contextlib.AbstractContextManager[Session]) -> None:
        self._opened = opened

    def __enter__(self) -> Session:
        return self._opened.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        hint = f"the session has not begun; write `with allranks.session() as s:`, and s.{name} in its block"
        raise AttributeError(f"allranks.session().{name}: {hint if hasattr(Session, name) else 'no such attribute'}")


def session(
    *, backend: str | None = None, timeout_s: float | None = None, cluster: str | Path | None = None
) -> Opening:
    """Form the group on entry, and destroy it on exit; works under `allranks run`, srun, MPI, torchrun, and alone.

    A second session in the same process, after the first, forms the group again without another roll call.

    Args:
        backend: nccl or gloo. None: what launcher or cluster.toml say, else nccl where every rank has a GPU.
        timeout_s: of collectives. None: what launcher or cluster.toml say, else 600.
        cluster: path of cluster.toml. None: $ALLRANKS_CLUSTER, ./cluster.toml. `allranks run` has read its own.
    Raises:
        SessionError: it could not begin. What torch itself raises stays as it is.
    """
    return Opening(_open(backend=backend, timeout_s=timeout_s, cluster=cluster))


@contextlib.contextmanager
def _open(**arguments: Any) -> Iterator[Session]:
    with contextlib.ExitStack() as on_exit:
        try:
            made = _enter(on_exit, **arguments)
        except SessionError:
            raise
        except AllranksError as exc:
            raise refuse(exc) from exc
        yield made


def _enter(
    on_exit: contextlib.ExitStack, *, backend: str | None, timeout_s: float | None, cluster: str | Path | None
) -> Session:
    if backend not in (None, *Backend):
        raise UsageError(f"session(backend={backend!r}): expected 'nccl', 'gloo' or None")
    if timeout_s is not None and not timeout_s > 0:
        raise UsageError(f"session(timeout_s={timeout_s!r}): expected seconds, more than 0")

    # Phase 1: who am I
    is_below_agent = "ALLRANKS_AGENT_PID" in os.environ
    world = identify(os.environ, is_below_agent=is_below_agent)
    path = None if is_below_agent else find_cluster_file(cluster, os.environ, Path())
    loaded = LoadedCluster() if path is None else read_cluster(path)
    wanted = backend or str(loaded.cluster.train.backend)

    # Phase 2: roll call
    ground: Ground | None = None
    has_threads = "OMP_NUM_THREADS" in os.environ
    if not is_below_agent and world.is_placed and not world.is_alone:
        from allranks.preflight.ground import hold_roll_call  # 0.08 s, which workers of an agent do not need

        ground = _grounds.get(os.getpid()) or hold_roll_call(world, loaded, wanted=wanted, run_root=RUN_ROOT)
        _grounds[os.getpid()] = ground
        on_exit.enter_context(ground.in_environment())
    elif world.launcher is Launcher.TORCHRUN and not is_below_agent:
        from allranks.preflight.ground import lasting

        on_exit.enter_context(lasting(os.environ).in_environment())

    # Phase 3: form the group
    dist, c10d = _import_torch()
    if ground is not None and not has_threads:
        leave_cores(on_exit, int(ground.values["OMP_NUM_THREADS"]))
    if dist.is_initialized():
        raise UsageError("a process group exists already; leave init_process_group out, session() forms the group")
    if ground is not None and not _watch(c10d):
        ground.release_port()  # rank 0 binds it itself, as under torchrun
    asked = None if wanted == Backend.AUTO else wanted
    chosen = asked or os.environ.get("ALLRANKS_BACKEND") or choose_backend(dist, world.local_world_size)
    node = os.environ.get("ALLRANKS_NODE") or read_facts(os.environ).host
    device = take_device(chosen, partial(demand_gpu, world.local_rank, node=node))
    timeout_s = timeout_s or float(os.environ.get("ALLRANKS_TIMEOUT_S") or loaded.cluster.train.timeout_s)
    of_one: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    c10d.init_process_group(
        "cpu:gloo,cuda:nccl" if chosen == Backend.NCCL and asked is None else chosen,
        timeout=timedelta(seconds=timeout_s), **(of_one if world.is_alone else {}),
    )  # fmt: skip
    if ground is not None:
        ground.release_port()  # the store has its own hold on it
    on_exit.push(partial(leave, dist, LAST_WORK_S))
    from allranks.state.resumed.buckets import Wrapped

    backends = {part.rpartition(":")[2] for part in c10d.get_backend_config().split(",")}
    name, number = c10d._get_default_group().group_name, next(_incarnations)
    groups = tuple(GroupId(name, own, number) for own in sorted(backends))
    wrapped = Wrapped(membership := describe_membership(world, os.environ, groups), device)
    on_exit.callback(wrapped.close)
    if "ALLRANKS_RERUN" in os.environ:
        from allranks.state.resumed.rerun_tracked import begin_setup

        begin_setup()
    return Session(
        membership=membership,
        local_rank=world.local_rank,
        node=node,
        backend=chosen,
        device=device,
        job=job_name(world) if ground is not None else "",
        _on_exit=on_exit,
        _wrapped=wrapped,
    )


def _say_last_words() -> None:
    """Have the agent learn what this rank last called: a SystemExit passes by the hook that does so otherwise."""
    if entry := sys.modules.get("_allranks_inside.entry"):
        entry.last_words()


def _import_torch() -> tuple[ModuleType, Any]:
    """Return torch.distributed and the module in which it defines init_process_group."""
    why, cause = "this build has no torch.distributed", None
    try:
        import torch.distributed as dist

        if dist.is_available():
            from torch.distributed import distributed_c10d

            return dist, distributed_c10d
    except (ImportError, OSError) as exc:  # OSError: a shared library of its is missing
        why, cause = str(exc), exc
    from allranks.preflight.ground import no_torch

    raise no_torch(why) from cause


def _watch(c10d: Any) -> bool:
    """Have init_process_group name who is missing, as in a worker of `allranks run`; False: this torch is another."""
    from allranks.join import group, refused

    try:
        group.wrap(c10d, refused)
    except AttributeError as exc:
        say(f"init_process_group is not watched: {exc!r}")
        return False
    return True


class _CallableModule(ModuleType):
    """`allranks.session()` is the function, also after somebody has imported this module and so taken its name."""

    def __call__(self, **arguments: Any) -> Opening:
        return session(**arguments)


sys.modules[__name__].__class__ = _CallableModule
