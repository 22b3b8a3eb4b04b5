"""What does a leader make of a signal that comes while no worker runs? Its agents are played, all else is real."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.guard.verdict import Guard
from allranks.host.slurm_job import OwnJob
from allranks.launch.lead.course import Terms
from allranks.launch.lead.group import make_group
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.newcomers import Newcomers
from allranks.launch.lead.recovery import History
from allranks.launch.queue import ending
from allranks.model.beat import NodeBeat, RankBeat
from allranks.model.card import Card
from allranks.model.cluster import GuardTable
from allranks.wire.connection import Connection
from allranks.wire.protocol import Beat, Failed, Goodbye, Interrupted, Message, Plan, Stop, Stopped, WorkerEnd
from conftest import wait_until

JOB = OwnJob(id="12", restarts=0, num_nodes=2, is_heterogeneous=False)
SAVED_BEFORE = "; no worker is running, so the last checkpoint is used"


class Job:
    """Two nodes with a rank each, and the leader of both; rank 1 has died, and a restart is under way."""

    def __init__(self, tmp_path: Path, *, job: OwnJob | None, step: int | None, no_requeue: str = "") -> None:
        cards = {index: Card(host=f"n{index}", pid=1, node_index=index, num_workers=1, num_gpus=0) for index in (0, 1)}
        plans = make_group(
            cards, wanted_backend="gloo", attempt=0, store_address="127.0.0.1", store_port=1, max_restarts=1
        )
        self.lines: list[str] = []
        self.leader = Leader(
            Terms(
                job="j",
                attempt=0,
                wanted_backend="gloo",
                store_address="127.0.0.1",
                store_port=1,
                min_nodes=2,
                max_restarts=1,
                capacity_s=600.0,
                beat_s=0.25,
                checkpoints=tmp_path,
            ),
            guard=Guard(GuardTable()),
            history=History(restarts_left=1),
            newcomers=Newcomers(acceptor=None, num_seats=2, say=self.lines.append, gone_s=4.0, beat_s=0.25),
            say=self.lines.append,
            show=lambda findings: None,
            on_event=lambda event, **fields: None,
            on_signal=lambda signum, save_s: ending.decide(signum, job=job, save_s=save_s, no_requeue=no_requeue),
        )
        self._selector = selectors.DefaultSelector()
        self._agents: dict[int, Connection] = {}
        for index, card in cards.items():
            here, there = socket.socketpair()
            self._agents[index] = Connection(here, peer="leader")
            self.leader.seats.take(index, card, Connection(there, peer=card.host), name=card.host)
        self.leader.attach(self._selector)
        self.leader.begin(plans, time.monotonic())
        for index in (0, 1):
            ranks = (RankBeat(rank=index, pid=1, step=step),)
            self.tell(index, Beat(node=NodeBeat(node_index=index, generation=0, ranks=ranks)))
        end = WorkerEnd(rank=1, local_rank=0, node="n1", exit_code=-signal.SIGSEGV, time_s=time.time())
        self.tell(1, Failed(end=end, age_s=0.0))
        self.hear(0, Stop)

    def close(self) -> None:
        self.leader.close()
        for agent in self._agents.values():
            agent.close()
        self._selector.close()

    def tell(self, index: int, message: Message) -> None:
        self._agents[index].send(message)
        self.turn()

    def turn(self) -> None:
        while ready := self._selector.select(0):
            for key, _ in ready:
                key.data(key.fileobj)
        self.leader.turn(time.monotonic())

    def hear(self, index: int, kind: type[Message]) -> Message:
        """The next message of a kind that an agent gets."""

        def look() -> Message | None:
            self.turn()
            return next((each for each in self._agents[index].receive() if isinstance(each, kind)), None)

        found: Message = wait_until(look, kind.__name__)
        return found

    def stop(self, *, is_one_lost: bool) -> None:
        """All workers have ended; the other node's agent is gone with them, or not."""
        self.tell(0, Stopped())
        if is_one_lost:
            self._agents[1].close()
        else:
            self.tell(1, Stopped())
        self.turn()

    def interrupt(self, signum: int, *, is_paused: bool) -> None:
        """A signal comes while the job is paused below its minimum, or else while its workers are being stopped."""
        if is_paused:
            self.stop(is_one_lost=True)
        self.tell(0, Interrupted(signum=signum))
        if not is_paused:
            self.stop(is_one_lost=False)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        job.close()


@pytest.mark.parametrize("is_paused", [False, True], ids=["stopping", "paused"])
def test_a_time_limit_that_comes_then_puts_the_job_back(jobs: list[Job], tmp_path: Path, is_paused: bool):
    jobs.append(job := Job(tmp_path, job=JOB, step=7))
    job.interrupt(signal.SIGUSR1, is_paused=is_paused)
    assert job.hear(0, Goodbye).exit_code == 0
    assert (job.leader.is_to_requeue, job.leader.interrupted_by) == (True, None)
    line = "SIGUSR1: saving a checkpoint, then job 12 goes back into the queue and resumes from it" + SAVED_BEFORE
    assert job.lines.count(line) == 1


@pytest.mark.parametrize("is_paused", [False, True], ids=["stopping", "paused"])
def test_a_job_that_cannot_go_back_ends_with_the_faults_own_code(jobs: list[Job], tmp_path: Path, is_paused: bool):
    jobs.append(job := Job(tmp_path, job=JOB, step=7, no_requeue="it has no batch script"))
    job.interrupt(signal.SIGUSR1, is_paused=is_paused)
    assert job.hear(0, Goodbye).exit_code == 139
    assert not job.leader.is_to_requeue


def test_a_script_that_has_nothing_to_save_is_started_again_all_the_same(jobs: list[Job], tmp_path: Path):
    jobs.append(job := Job(tmp_path, job=JOB, step=None))
    job.tell(0, Interrupted(signum=signal.SIGUSR1))
    job.stop(is_one_lost=False)
    plan = job.hear(1, Plan)
    assert isinstance(plan, Plan)
    assert plan.generation == 1


@pytest.mark.parametrize("is_paused", [False, True], ids=["stopping", "paused"])
def test_sigterm_ends_it_with_its_own_code_and_a_verdict(jobs: list[Job], tmp_path: Path, is_paused: bool):
    jobs.append(job := Job(tmp_path, job=JOB, step=7))
    job.interrupt(signal.SIGTERM, is_paused=is_paused)
    assert job.hear(0, Goodbye).exit_code == 143
    assert job.leader.verdict is not None
    assert not job.leader.is_to_requeue


def test_an_hour_in_which_the_leader_itself_slept_is_nobodys_delay(jobs: list[Job], tmp_path: Path):
    jobs.append(job := Job(tmp_path, job=None, step=7))
    job.leader.turn(time.monotonic() + 3600.0)
    job.stop(is_one_lost=False)
    for index in (0, 1):
        job.hear(index, Plan)
