"""What is said about an elastic Horovod job, from the events of its driver? The texts are those of Horovod 0.28.1."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.horovod.start_worker import place_command
from allranks.horovod.usable_nodes import Change, NodeMemory
from allranks.horovod.watch import HorovodWatch, Said, StackRequest
from allranks.model.finding import Confidence, Finding

HOSTS = ("node01", "node02", "node03", "node04")
SYNC = ["synchronize", "broadcast_parameters", "sync", "wrapper", "<module>"]
TRAINING = ["synchronize", "_step", "step", "train", "wrapper", "<module>"]


class Job:
    """A job with one worker on each of four nodes; each event comes a second after the one before."""

    def __init__(self, *, min_np: int = 4, timeout_s: float = 600) -> None:
        self.now_s = 1000.0
        self.watch = HorovodWatch(min_np=min_np, start_np=4, timeout_s=timeout_s, now_s=self.now_s)
        self.said: list[Said] = []
        self.discover(*HOSTS)
        self.log("current available slots: 4")
        self.log("wait for available slots: 4")
        self.log("current available slots: 4")
        self.reset(*HOSTS, new=HOSTS)

    def feed(self, event: str, **more: Any) -> None:
        self.now_s += 1
        self.said += self.watch.feed({"time_s": self.now_s, "event": event, **more})

    def log(self, text: str) -> None:
        self.feed("log", level="INFO", text=text)

    def discover(self, *hosts: str) -> None:
        self.feed("discovered", hosts=dict.fromkeys(hosts, 1))

    def end(self, host: str, exit_code: int) -> None:
        self.feed("ended", host=host, slot=0, rank=HOSTS.index(host), exit_code=exit_code)

    def reset(self, *hosts: str, new: tuple[str, ...] = ()) -> None:
        self.log(f"reset workers: {len(hosts)}")
        for host in new:
            self.feed("started", host=host, slot=0, rank=hosts.index(host))
        for rank in range(len(hosts) - len(new)):
            self.log(f"rank and size: {rank} {len(hosts)}")

    def pause(self, *, have: int = 3) -> None:
        self.log("wait for available slots: 4")
        self.log(f"current available slots: {have}")

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.said += self.watch.turn(self.now_s)

    @property
    def findings(self) -> list[Finding]:
        return [each for each in self.said if isinstance(each, Finding)]

    @property
    def lines(self) -> list[str]:
        return [each for each in self.said if isinstance(each, str)]


def test_a_healthy_job_says_nothing() -> None:
    job = Job()
    job.wait(300)
    job.log("success count == 4 -> stop running")
    for host in HOSTS:
        job.end(host, 0)
    assert job.said == []


@pytest.mark.parametrize(
    ("blacklisted", "discovered", "lines"),
    [
        ([], HOSTS, []),
        ([], HOSTS[1:], ["paused: Horovod has 3 of the 4 slots that it needs; in 598 s"]),
        (["node02"], HOSTS, ["paused: Horovod has 3 of the 4 slots that it needs; in 598 s"]),
    ],
)
def test_a_driver_that_is_silent_about_its_slots_is_counted_for(
    blacklisted: list[str], discovered: tuple[str, ...], lines: list[str]
) -> None:
    job = Job()
    for host in blacklisted:
        job.log(f"blacklist failing host: {host}")
    job.discover(*discovered)
    job.log("wait for available slots: 4")
    job.wait(0.5)
    assert job.lines == []
    job.wait(1)
    assert [line.partition(" (")[0] for line in job.lines] == lines
    job.log(f"current available slots: {4 - len(lines)}")
    assert len(job.lines) == len(lines)


@pytest.mark.parametrize(
    ("exit_code", "output", "cause", "message"),
    [
        (137, [], "AR407 dead-rank", "the worker was ended by SIGKILL"),
        (139, [], "AR407 dead-rank", "the worker was ended by SIGSEGV"),
        (
            1,
            ["[1]<stderr>:Traceback (most recent call last):", '[1]<stderr>:  File "t.py", line 3, in train',
             "[1]<stderr>:ValueError: bad batch", "[2]<stderr>:KeyError: 7"],
            "AR590 user-code-error",
            "ValueError: bad batch",
        ),
        (3, ["[1]<stdout>:bye"], "AR590 user-code-error", "the worker ended with exit code 3"),
    ],
)  # fmt: skip
def test_a_worker_that_ends_is_named(exit_code: int, output: list[str], cause: str, message: str) -> None:
    job = Job(min_np=3)
    for line in output:
        job.watch.feed_output(line)
    job.end("node02", exit_code)
    (found,) = job.findings
    assert (found.cause, found.message, found.node, found.ranks) == (cause, message, "node02", (1,))


def test_a_pause_is_said_with_the_time_that_is_left() -> None:
    job = Job()
    job.end("node02", 137)
    job.discover("node01", "node03", "node04")
    job.pause()
    job.log("current available slots: 3")
    (line,) = job.lines
    assert line == (
        "paused: Horovod has 3 of the 4 slots that it needs, without node02; in 599 s (HOROVOD_ELASTIC_TIMEOUT) it "
        "ends the job"
    )
    job.wait(59)
    assert len(job.lines) == 2
    assert job.lines[1].startswith("still paused: ")
    assert "in 539 s" in job.lines[1]
    job.log("current available slots: 4")
    job.reset(*HOSTS, new=("node02",))
    assert job.lines[2].startswith("goes on with 4 workers after a pause of ")
    job.wait(500)
    assert len(job.said) == 4  # with the finding


def test_a_start_with_too_few_hosts_is_a_pause() -> None:
    watch = HorovodWatch(min_np=4, start_np=4, timeout_s=600, now_s=1000)
    (line,) = watch.feed({"time_s": 1001, "event": "log", "level": "DEBUG", "text": "current available slots: 2"})
    assert isinstance(line, str)
    assert line.startswith("paused: Horovod has 2 of the 4 slots")


def test_the_end_of_a_pause_is_named() -> None:
    job = Job(timeout_s=20)
    job.end("node02", 137)
    job.pause()
    job.log(
        "failed to activate new hosts -> stop running: TimeoutException('Timed out waiting for {activity}. Please "
        "check that you have enough resources to run at least 4 Horovod processes. Timeout after 20 seconds.')"
    )
    dead, timeout = job.findings
    assert dead.cause == "AR407 dead-rank"
    assert timeout.cause == "AR609 horovod-elastic-timeout"
    assert timeout.message == "only 3 of 4 slots came back within 20 s; Horovod ended the job"
    for host in ("node01", "node03", "node04"):
        job.end(host, 1)
    job.feed("failed", text="Horovod detected that one or more processes exited with non-zero status")
    assert len(job.findings) == 2  # the others are victims


def test_a_lost_node_is_one_finding() -> None:
    job = Job(min_np=3)
    job.said += job.watch.lose("node03", "port 6818 of node03 has not answered for 3 s")
    job.said += job.watch.lose("node03", "port 6818 of node03 has not answered for 4 s")
    job.end("node03", 143)
    (found,) = job.findings
    assert (found.cause, found.node, found.ranks) == ("AR012 node-failure", "node03", (2,))
    assert job.watch.regain("node03") == ["node03 answers again; Horovod may use it"]
    assert job.watch.regain("node03") == []


def lose_gracefully(job: Job, *, new: str) -> None:
    """node04 leaves the discovery while its worker trains, and another node comes."""
    job.discover("node01", "node02", "node03")
    job.pause()
    job.discover("node01", "node02", "node03", new)
    job.log("current available slots: 4")
    job.reset("node01", "node02", "node03", new, new=(new,))


def test_the_deadlock_after_a_graceful_loss_is_named() -> None:
    job = Job()
    lose_gracefully(job, new="node05")
    job.wait(1)
    assert StackRequest() not in job.said
    for number in (1, 2):
        job.wait(1.5)
        assert job.said.count(StackRequest()) == number
        assert job.watch.judge({"node05": [["import"]], "node01": [TRAINING]}) == []  # it is still being started
    job.said += job.watch.judge({"node05": [SYNC], "node01": [TRAINING], "node02": [TRAINING], "node03": [TRAINING]})
    (found,) = job.findings
    assert (found.cause, found.confidence, found.node) == ("AR410 collective-mismatch", Confidence.CERTAIN, "node05")
    assert "the workers on node[01-03] have skipped it" in found.message
    job.wait(10)
    assert job.said.count(StackRequest()) == 2


@pytest.mark.parametrize(
    "stacks",
    [
        {"node05": [SYNC], "node01": [SYNC], "node02": [SYNC], "node03": [SYNC]},  # the state of allranks
        {"node05": [TRAINING], "node01": [TRAINING]},
        {"node05": [["forward", "train"]], "node01": [TRAINING]},
        {"node05": [SYNC], "node01": [["sleep", "train"]]},
    ],
)
def test_ranks_that_go_on_are_no_deadlock(stacks: dict[str, list[list[str]]]) -> None:
    job = Job()
    lose_gracefully(job, new="node05")
    job.wait(2)
    assert job.watch.judge(stacks) == []


def test_without_stacks_nobody_is_blamed() -> None:
    job = Job()
    lose_gracefully(job, new="node05")
    job.wait(2)
    (line,) = job.watch.judge({}, "py-spy is missing")
    assert isinstance(line, str)
    assert line.startswith("no stack can be read (py-spy is missing); ")
    assert job.watch.judge({}, "py-spy is missing") == []


def test_the_worker_of_a_host_that_left_is_no_culprit() -> None:
    job = Job()
    lose_gracefully(job, new="node05")
    job.end("node04", 134)
    assert job.findings == []
    job.discover("node01", "node02", "node05")
    job.pause()
    job.discover("node01", "node02", "node05", "node06")
    job.reset("node01", "node02", "node05", "node06", new=("node06",))
    job.wait(2)
    assert StackRequest() in job.said  # its end was no failure that the others saw: they skip state.sync() again


def test_survivors_that_a_new_worker_kept_waiting_are_one_finding() -> None:
    job = Job()
    job.end("node02", 137)
    job.pause()
    job.reset(*HOSTS, new=("node02",))
    for rank in (0, 2, 3):
        job.watch.feed_output(
            f"[{rank}]<stderr>:  what():  [http_store.cc:54] Wait timeout after 30 seconds for key(s): 1"
        )
        job.end(HOSTS[rank], 134)
    _, found = job.findings
    assert (found.cause, found.node) == ("AR402 rendezvous-timeout", "node02")
    assert found.message == "node02 did not join within 30 s, and the workers that waited aborted"


def test_after_a_failure_all_ranks_synchronize() -> None:
    job = Job()
    job.end("node04", 137)
    lose_gracefully(job, new="node05")
    job.wait(5)
    assert StackRequest() not in job.said


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        ([True] * 5, []),
        ([False, True, False, True], []),
        ([False, False, False], [True]),
        ([False, False, True, False], [True, False]),
    ],
)
def test_a_node_is_lost_after_two_misses_and_back_with_one_answer(seen: list[bool], changes: list[bool]) -> None:
    memory = NodeMemory("node01")
    found = [memory.note(has_answered=each, is_in_job=True) for each in seen]
    assert [change.is_lost for change in found if change is not None] == changes


def test_a_node_that_slurm_took_away_is_lost_at_once() -> None:
    words = "SLURM no longer lists node01 among the job's nodes"
    assert NodeMemory("node01").note(has_answered=True, is_in_job=False) == Change("node01", True, words)


def test_a_worker_gets_the_interface_of_its_node() -> None:
    command = ["env", "HOROVOD_GLOO_IFACE=ens1f1", "NCCL_SOCKET_IFNAME=ens1f1", "SLURM_NODEID=0", "PATH=/bin", "python"]
    assert place_command(command, "eth7") == [
        "env", "HOROVOD_GLOO_IFACE=eth7", "NCCL_SOCKET_IFNAME=eth7", "PATH=/bin", "python",
    ]  # fmt: skip
