"""All that `init_process_group` needs, for a rank that srun or MPI started without an agent; from its roll call."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from allranks.config.file import LoadedCluster
from allranks.host.node import read_facts
from allranks.model.errors import AllranksError, SetupError
from allranks.model.finding import Verdict
from allranks.model.world import World
from allranks.preflight.group_environment import SettingList
from allranks.preflight.ranks_as_nodes import cores_of_node, describe_group, job_name, settings_of
from allranks.preflight.without_agents import apply_rank, take_place
from allranks.report.refusal import SessionError, print_findings, pronounce
from allranks.report.rundir import RunDir
from allranks.report.text import say
from allranks.wire.protocol import Goodbye

_STORE_FD = "ALLRANKS_STORE_FD"


@dataclass(slots=True)
class Ground:
    """What the roll call came to: all that init_process_group needs."""

    values: dict[str, str]
    listener: socket.socket | None

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """Have the values in the environment, and everything as it was afterwards."""
        before = {name: os.environ.get(name) for name in self.values}
        os.environ.update(self.values)
        try:
            yield
        finally:
            self.release_port()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def release_port(self) -> None:
        """Let go of the socket that rank 0's store has been given; safe to call twice."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        self.values.pop(_STORE_FD, None)
        os.environ.pop(_STORE_FD, None)


def hold_roll_call(world: World, loaded: LoadedCluster, *, wanted: str, run_root: Path) -> Ground:
    """Hold the roll call with the other ranks, and return what this one needs to form the group.

    Args:
        world: who this rank is.
        loaded: cluster.toml.
        wanted: the backend that was asked for, or auto.
        run_root: where run directories are made.
    Raises:
        SessionError: it ended with a verdict, which has been said.
    """
    started_s, env = time.time(), dict(os.environ)
    run_dir = RunDir(run_root, job_name(world))
    facts = read_facts(env)
    problem = None if importlib.util.find_spec("torch") else no_torch("it is not installed")
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
        verdict = Verdict(
            job=applicant.plan.job, attempt=run_dir.attempt, exit_code=exc.exit_code, findings=(exc.finding,)
        )
        is_speaker = world.local_rank == 0 or world.rank == 1  # one a node; where rank 0 is missing, its neighbour
        raise pronounce(verdict, run_dir, world, node=facts.host, is_speaker=is_speaker) from exc
    if isinstance(answer, Goodbye):
        if answer.verdict is None or not answer.verdict.findings:
            say(answer.summary)
            raise SessionError(answer.summary, exit_code=answer.exit_code)
        raise pronounce(answer.verdict, run_dir, world, node=facts.host, is_speaker=world.rank == 0)
    print_findings(answer.warnings, after="\n")
    interface, num_local = answer.interface, world.local_world_size
    on_node = env.get("SLURM_CPUS_ON_NODE", "").partition("(")[0]
    num_cpus = int(on_node) if on_node.isdecimal() else os.cpu_count() or facts.num_cpus
    recorder = (run_dir.node_path(facts.host) / "recorder_rank_").absolute()
    settings = settings_of(
        world,
        answer.group,
        loaded,
        interface=interface,
        num_cpus=cores_of_node(facts.num_cpus, num_cpus, num_local),
        recorder=recorder,
        env=env,
    )
    if world.rank == 0:
        if advice := answer.advice:
            say(f"note: {advice}")
        hosts = list(dict.fromkeys(member.host for member in answer.group.members))
        network = interface if world.num_nodes == 1 else loaded.cluster.network.data or interface
        group = describe_group(answer.group, hosts, network)
        say(f"{group}; roll call {time.time() - started_s:.1f} s; verdicts in {run_dir.attempt_path}")
    if world.local_rank == 0:
        run_dir.create_node(facts.host)
        run_dir.write_settings(facts.host, settings)
    values = {setting.name: setting.value for setting in settings} | {"ALLRANKS_STARTED_S": str(started_s)}
    if answer.listener is not None:
        values[_STORE_FD] = str(answer.listener.fileno())
    return Ground(values, answer.listener)


def lasting(env: Mapping[str, str]) -> Ground:
    """Return what a rank of torchrun gets, whose place and cores torchrun has given it."""
    given = SettingList(env)
    given.lasting()
    return Ground({setting.name: setting.value for setting in given.settings}, None)


def no_torch(why: str) -> SetupError:
    """The error of a Python that cannot take part."""
    return SetupError(f"session() needs PyTorch in {sys.executable}: {why}; pip install 'torch>=2.4'")
