"""What does the leader make of a signal that comes while no worker runs? The reducer alone, in time that is told."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from allranks.guard.verdict import Guard
from allranks.host.slurm_job import OwnJob
from allranks.launch.events import (
    AskScheduler,
    CheckpointFound,
    Due,
    Effect,
    Event,
    FindCheckpoint,
    FindKillWait,
    Heard,
    Joined,
    KillWaitFound,
    Lost,
    Meant,
    Record,
    Reject,
    Say,
    Send,
)  # fmt: skip
from allranks.launch.lead.assignment import make_group
from allranks.launch.lead.course import (
    ANSWER_S,
    OWN_STOPPED_S,
    RESTART_GRACE_S,
    RETURN_S,
    SHUTDOWN_S,
    STOPPED_S,
    Phase,
    Terms,
)
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.members import ConnectedNode
from allranks.launch.queue import ending
from allranks.model.beat import NodeBeat, RankBeat
from allranks.model.card import Card
from allranks.model.cluster import GuardTable
from allranks.model.errors import Exit
from allranks.model.past import History, Past
from allranks.model.room import FullPlace, Room
from allranks.wire.protocol import Beat, Ended, Goodbye, Interrupted, Message, Plan, Relay, Stop, Stopped, WorkerEnd

JOB = OwnJob(id="12", restarts=0, num_nodes=2, is_heterogeneous=False)
SAVED_BEFORE = "; no worker is running, so the last checkpoint is used"
TIME_LIMIT = signal.SIGUSR1


CRASH = WorkerEnd(rank=1, node="n1", exit_code=-signal.SIGSEGV, time_s=0.0)


class Job:
    """Two nodes with a rank each, and the leader of both; rank 1 has died, and they are restarted; or all is well."""

    def __init__(
        self,
        *,
        job: OwnJob | None = JOB,
        step: int | None = 7,
        no_requeue: str = "",
        ran_s: float = 0.0,
        checkpoint: int | None = None,
        is_well: bool = False,
        handles: tuple[int, ...] = (),
        kill_wait_s: float = 30.0,
        end: WorkerEnd = CRASH,
        full: tuple[FullPlace, ...] = (),
        room: Room | None = None,
    ) -> None:
        self.full, self.room = full, room
        cards = {
            index: Card(host=f"n{index}", pid=1, node_index=index, num_workers=1, num_gpus=0, incarnation=7)
            for index in (0, 1)
        }
        self.job, self.told = job, ending.Told(no_requeue=no_requeue, kill_wait_s=kill_wait_s)
        self.handles = handles
        self.is_scheduler_mute = self.is_disk_mute = False
        self.effects: list[Effect] = []
        self.now_s = 1000.0
        self.leader = Leader(
            Terms(
                job="j",
                wanted_backend="gloo",
                store_address="127.0.0.1",
                store_port=1,
                num_nodes=2,
                min_nodes=2,
                capacity_s=600.0,
            ),
            guard=Guard(GuardTable()),
            past=Past(history=History(restarts_left=1)),
            nodes={
                index: ConnectedNode(card=card, name=card.host, address="127.0.0.1") for index, card in cards.items()
            },
            plan=make_group(
                cards, wanted_backend="gloo", attempt=0, store_address="127.0.0.1", store_port=1, max_restarts=1
            )[0],
            now_s=self.now_s,
        )
        self.now_s += ran_s
        for index in (0, 1):
            self.beat(index, step=step, checkpoint=checkpoint)
        if is_well:
            return
        self.tell(1, Ended(end=end, age_s=0.0))
        self.wait(3.0)
        assert self.sent(Stop, to=0)

    def feed(self, event: Event) -> None:
        for effect in self.leader.step(event):
            self.effects.append(effect)
            match effect:
                case AskScheduler(signum=signum, can_save=can_save) if not self.is_scheduler_mute:
                    meant = ending.decide(signum, job=self.job, can_save=can_save, told=self.told)
                    self.feed(Meant(now_s=self.now_s, signum=signum, decision=meant))
                case FindKillWait() if self.job is not None:
                    self.feed(KillWaitFound(now_s=self.now_s, kill_wait_s=self.told.kill_wait_s))
                case FindCheckpoint() if not self.is_disk_mute:
                    self.feed(CheckpointFound(now_s=self.now_s, step=None))

    def beat(
        self, index: int, *, step: int | None = None, checkpoint: int | None = None, is_saving: bool = False
    ) -> None:
        told = {"step": step, "checkpoint": checkpoint, "handles": self.handles, "is_saving": is_saving}
        ranks = (RankBeat(rank=index, pid=1, **told),)
        disks = {"full": self.full, "room": self.room}
        self.tell(index, Beat(node=NodeBeat(node_index=index, generation=0, ranks=ranks, **disks)))

    def tell(self, index: int, message: Message) -> None:
        self.feed(Heard(now_s=self.now_s, node=index, message=message))

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            self.feed(Due(now_s=self.now_s))

    def sent(self, kind: type, *, to: int) -> Any:
        """The last message of a kind to a node."""
        found = [e.message for e in self.effects if isinstance(e, Send) and e.node == to]
        return next((each for each in reversed(found) if isinstance(each, kind)), None)

    @property
    def goes_back(self) -> bool:
        return ending.goes_back(
            self.leader.verdict.exit_code,
            is_to_requeue=self.leader.is_to_requeue,
            interrupted_by=self.leader.interrupted_by,
            has_restarts=True,
        )

    @property
    def lines(self) -> list[str]:
        return [each.text for each in self.effects if isinstance(each, Say)]

    def stop(self, *, is_one_lost: bool) -> None:
        """All workers have ended; the other node's agent is gone with them, or not."""
        self.tell(0, Stopped())
        self.feed(Lost(now_s=self.now_s, node=1, reason="gone")) if is_one_lost else self.tell(1, Stopped())
        self.wait(RETURN_S + 0.5 if is_one_lost else 1.0)

    def interrupt(self, signum: int, *, is_paused: bool) -> None:
        """A signal comes while the job is paused below its minimum, or else while its workers are being stopped."""
        if is_paused:
            self.stop(is_one_lost=True)
            assert self.leader.phase is Phase.PAUSED
        self.tell(0, Interrupted(signum=signum))
        self.wait(1.0) if is_paused else self.stop(is_one_lost=False)


@pytest.mark.parametrize(
    ("step", "checkpoint", "lost_s"),
    [(7, None, 24.0), (7, 5, 4.0), (None, None, 24.0)],
    ids=["no checkpoint", "a checkpoint 4 s before", "a script that tells no steps"],
)
def test_a_restart_is_written_down_with_the_time_since_the_last_checkpoint(
    step: int | None, checkpoint: int | None, lost_s: float
):
    job = Job(step=step, checkpoint=checkpoint, ran_s=20.0)
    job.stop(is_one_lost=False)
    (fields,) = (each.fields for each in job.effects if isinstance(each, Record) and each.event == "restarting")
    assert (fields["lost_s"], fields["is_tracked"], fields["checkpoint"]) == (lost_s, step is not None, checkpoint)


@pytest.mark.parametrize("is_paused", [False, True], ids=["stopping", "paused"])
def test_a_time_limit_that_comes_then_puts_the_job_back(is_paused: bool):
    job = Job()
    job.interrupt(TIME_LIMIT, is_paused=is_paused)
    assert job.sent(Goodbye, to=0).exit_code == 0
    assert (job.goes_back, job.leader.interrupted_by) == (True, None)
    line = "SIGUSR1: saving a checkpoint, then job 12 goes back into the queue and resumes from it" + SAVED_BEFORE
    assert job.lines.count(line) == 1


@pytest.mark.parametrize("is_paused", [False, True], ids=["stopping", "paused"])
def test_a_job_that_cannot_go_back_ends_with_the_faults_own_code(is_paused: bool):
    job = Job(no_requeue="it has no batch script")
    job.interrupt(TIME_LIMIT, is_paused=is_paused)
    assert job.sent(Goodbye, to=0).exit_code == 139
    assert not job.goes_back


def test_a_script_that_has_nothing_to_save_is_started_again_all_the_same():
    job = Job(step=None)
    job.tell(0, Interrupted(signum=TIME_LIMIT))
    job.stop(is_one_lost=False)
    assert job.sent(Plan, to=1).generation == 1


@pytest.mark.parametrize("is_paused", [False, True], ids=["stopping", "paused"])
def test_sigterm_ends_it_with_its_own_code_and_a_verdict(is_paused: bool):
    job = Job()
    job.interrupt(signal.SIGTERM, is_paused=is_paused)
    assert job.sent(Goodbye, to=0).exit_code == 143
    assert job.leader.verdict is not None
    assert not job.goes_back


@pytest.mark.parametrize("first", [TIME_LIMIT, signal.SIGTERM])
def test_a_job_that_was_cancelled_does_not_go_back_whatever_else_came(first: int):
    """The warning of the time limit and scancel cross: before, such a job went back into the queue with 143."""
    job = Job()
    job.tell(0, Interrupted(signum=first))
    job.tell(1, Interrupted(signum=signal.SIGTERM if first == TIME_LIMIT else TIME_LIMIT))
    job.stop(is_one_lost=False)
    assert job.sent(Goodbye, to=0).exit_code == 143
    assert not job.goes_back


def test_an_hour_in_which_the_leader_itself_slept_is_nobodys_delay():
    job = Job(job=None)
    job.now_s += 3600.0
    job.feed(Due(now_s=job.now_s))
    job.stop(is_one_lost=False)
    assert all(job.sent(Plan, to=index) for index in (0, 1))


def test_neither_a_file_server_nor_the_scheduler_can_keep_the_job_from_going_on():
    job = Job()
    job.is_disk_mute = job.is_scheduler_mute = True
    job.tell(0, Interrupted(signum=TIME_LIMIT))
    job.stop(is_one_lost=False)
    assert job.leader.phase is Phase.FORMING
    job.wait(ANSWER_S + 0.5)
    assert job.sent(Plan, to=1).generation == 1


def test_below_the_minimum_it_waits_for_nodes():
    job = Job()
    job.stop(is_one_lost=True)
    assert job.leader.phase is Phase.PAUSED
    assert not job.sent(Plan, to=0)
    card = Card(host="n1", pid=2, node_index=1, num_workers=1, num_gpus=0)
    job.feed(Joined(now_s=job.now_s, connection=1, card=card, address="127.0.0.1"))
    job.wait(1.0)
    assert job.sent(Plan, to=1).generation == 1


def test_an_agent_that_does_not_report_is_disconnected_and_the_leaders_own_never():
    job = Job()
    job.wait(RESTART_GRACE_S + STOPPED_S)
    assert job.leader.unresponsive == {1}
    assert job.leader.phase is Phase.STOPPING
    job.wait(OWN_STOPPED_S + 0.5)
    assert job.sent(Goodbye, to=0).exit_code == Exit.NODE_FAULT


@pytest.mark.parametrize(
    ("handles", "job", "kill_wait_s", "saving_s", "line"),
    [
        pytest.param((signal.SIGTERM,), JOB, 40.0, 30.0, "", id="enough"),
        pytest.param(
            (signal.SIGTERM,), JOB, 15.0, 11.0,
            "ranks that handle SIGTERM have 11 s when SLURM ends this job: KillWait is 15 s, of which 4 s are kept "
            "back; --signal=TERM@120 (sbatch) warns them before the time limit",
            id="SLURM leaves less, which is said before",
        ),
        pytest.param((), JOB, 15.0, 11.0, "", id="nobody needs it"),
        pytest.param((signal.SIGTERM,), None, 15.0, 30.0, "", id="without SLURM"),
    ],
)  # fmt: skip
def test_ranks_that_save_have_what_slurm_leaves(
    handles: tuple[int, ...], job: OwnJob | None, kill_wait_s: float, saving_s: float, line: str
):
    here = Job(is_well=True, step=None, job=job, handles=handles, kill_wait_s=kill_wait_s)
    assert here.lines == ([line] if line else [])
    here.tell(1, Interrupted(signum=signal.SIGTERM))
    here.wait(1.0)
    stop = here.sent(Stop, to=0)
    assert (stop.signum, stop.is_wanted, stop.saving_s) == (signal.SIGTERM, True, pytest.approx(saving_s, abs=0.6))


def test_where_slurm_answers_late_the_agents_hear_what_it_leaves():
    job = Job(is_well=True, step=None, handles=(signal.SIGTERM,))
    job.is_scheduler_mute = True
    job.tell(1, Interrupted(signum=signal.SIGTERM))
    end = WorkerEnd(rank=1, node="n1", exit_code=0, time_s=0.0, ended_by_us=True)
    job.tell(1, Ended(end=end, age_s=0.0))
    job.wait(1.0)
    assert job.sent(Stop, to=0).saving_s == SHUTDOWN_S, "a worker has ended before SLURM answered"
    meant = ending.decide(signal.SIGTERM, job=JOB, told=ending.Told(kill_wait_s=10.0), can_save=False)
    job.feed(Meant(now_s=job.now_s, signum=signal.SIGTERM, decision=meant))
    assert job.sent(Stop, to=0).saving_s == 6.0


@pytest.mark.parametrize(
    ("handles", "is_saving", "waits_s"),
    [((), False, 8.0), ((signal.SIGTERM,), False, 38.0), ((signal.SIGUSR1,), False, 8.0), ((), True, 38.0)],
    ids=["no handler", "handler", "handler of a warning", "saves"],
)
def test_an_agent_whose_ranks_save_is_waited_for(handles: tuple[int, ...], is_saving: bool, waits_s: float):
    job = Job(is_well=True, step=None, job=None, handles=handles)
    job.tell(1, Interrupted(signum=signal.SIGTERM))
    job.wait(0.5)
    job.beat(1, is_saving=is_saving)
    job.tell(0, Stopped())
    job.wait(waits_s - 1.5)
    assert job.leader.phase is Phase.STOPPING
    job.wait(2.0)
    assert job.leader.unresponsive == {1}


@pytest.mark.parametrize(("handles", "is_passed_on"), [((signal.SIGUSR2,), True), ((), False)])
def test_a_signal_that_means_nothing_reaches_who_handles_it_once(handles: tuple[int, ...], is_passed_on: bool):
    job = Job(is_well=True, handles=handles)
    for index in (0, 1):
        job.tell(index, Interrupted(signum=signal.SIGUSR2))  # SLURM signals all agents
        job.wait(0.5)
    said = (
        "passed to the ranks that handle it" if is_passed_on else "no rank handles it, and it means nothing to allranks"
    )
    assert job.lines == [f"SIGUSR2: {said}"]
    sent = [each for each in job.effects if isinstance(each, Send) and isinstance(each.message, Relay)]
    assert [each.node for each in sent] == ([0, 1] if is_passed_on else [])
    job.tell(0, Interrupted(signum=signal.SIGUSR2))
    assert len(job.lines) == 2, "a second one of the same agent is another signal"
    assert job.leader.phase is Phase.RUNNING


def exited(rank: int) -> Ended:
    end = WorkerEnd(rank=rank, node=f"n{rank}", exit_code=0, time_s=0.0)
    return Ended(end=end, age_s=0.0, generation=1)


@pytest.mark.parametrize("comes_back", [True, False])
def test_the_last_word_waits_for_a_member_whose_connection_has_ended(comes_back: bool):
    job = Job()
    job.stop(is_one_lost=False)
    for index in (0, 1):
        job.tell(index, exited(index))
    job.wait(0.5)
    for index in (0, 1):
        job.tell(index, Stopped(generation=1))
    job.feed(Lost(now_s=job.now_s, node=1, reason="reset by peer"))
    job.wait(RETURN_S - 0.5)
    assert job.leader.phase is Phase.STOPPING
    if comes_back:
        card = Card(host="n1", pid=1, node_index=1, num_workers=1, num_gpus=0, incarnation=7, generation=1)
        job.feed(Joined(now_s=job.now_s, connection=1, card=card, address=""))
    job.wait(0.5)
    assert (job.sent(Goodbye, to=0).exit_code, job.sent(Goodbye, to=1) is not None) == (0, comes_back)


def test_a_node_that_has_come_back_is_silent_from_then_on():
    job = Job()
    job.stop(is_one_lost=False)
    job.feed(Lost(now_s=job.now_s, node=1, reason="reset by peer"))
    job.wait(RETURN_S - 0.5)
    card = Card(host="n1", pid=1, node_index=1, num_workers=1, num_gpus=0, incarnation=7, generation=1)
    job.feed(Joined(now_s=job.now_s, connection=1, card=card, address=""))
    job.wait(2 * GuardTable().gone_s)
    assert job.leader.phase is Phase.RUNNING


def test_who_joins_a_job_that_is_over_is_rejected():
    job = Job()
    job.interrupt(signal.SIGTERM, is_paused=False)
    card = Card(host="n1", pid=1, node_index=1, num_workers=1, num_gpus=0)
    job.feed(Joined(now_s=job.now_s, connection=1, card=card, address=""))
    assert job.effects[-1] == Reject(connection=1, reason="the job is over")


def test_a_worker_of_an_earlier_generation_says_nothing_of_the_new_one():
    job = Job()
    job.stop(is_one_lost=False)
    end = WorkerEnd(rank=0, node="n0", exit_code=1, time_s=0.0, message="ValueError")
    job.tell(0, Ended(end=end, age_s=0.0, generation=0))
    for rank in (0, 1):
        job.tell(rank, exited(rank))
    job.wait(1.0)
    for index in (0, 1):
        job.tell(index, Stopped(generation=1))
    job.wait(1.0)
    assert job.sent(Goodbye, to=1).exit_code == 0
