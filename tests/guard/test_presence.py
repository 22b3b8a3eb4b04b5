"""Is a node gone, by two signs? Is a process stopped?"""

from __future__ import annotations

import pytest

from allranks.causes.book import find_cause
from allranks.guard import presence
from allranks.guard.presence import (
    NOT_COME,
    UNLED,
    find_suspects,
    judge_gone,
    judge_stopped,
)
from allranks.guard.scene import Tried
from allranks.guard.try_orders import TryOrders
from allranks.launch.lead.summary import describe_loss
from allranks.model.beat import ProcessState, TrySeen
from allranks.model.finding import Confidence
from allranks.model.fix import ANYBODY, Reader, SchedulerKind

from .scenes import NOW_S, away, beat, call, scene, waiting

NUM = 4
GONE = 2


def picture(*, silent_s: float, is_lost: bool = False, tries=(), waits: bool = False, who=(GONE,)):
    """Four nodes, of which one fell silent; tries: (from, network, connects, refused)."""
    ranks = [waiting(i, call(), num=NUM, for_s=20.0) if waits and i != GONE else away(i, num=NUM) for i in range(NUM)]
    made = scene([beat(i, ranks[i]) for i in range(NUM)])
    for index in who:
        node = made.nodes[index]
        node.heard_s = NOW_S - silent_s
        node.lost_s, node.lost_reason = (NOW_S - silent_s, "connection reset") if is_lost else (None, "")
        made.ranks[index].told_s = NOW_S - silent_s
    for source, network, connects, refused in tries:
        for index in who:
            seen = TrySeen(target=index, network=network, connects=connects, refused=refused, carries=None)
            made.note_try(made.nodes[source], Tried(seen, NOW_S))
    return made


NO_ANSWER = [(0, "data", False, False), (0, "control", False, False), (1, "data", False, False)]
ANSWERS = [(0, "data", True, False), (0, "control", True, False)]
REFUSED = [(0, "control", True, True)]
TABLE = {
    # name: (what is known, what is said or None, confidence)
    "silent for a moment": ({"silent_s": 0.5}, None, None),
    "silent, and not tried yet": ({"silent_s": 3.5}, None, None),
    "silent, and no answer on any network": ({"silent_s": 3.5, "tries": NO_ANSWER}, "answers on no network", "certain"),
    "not silent for long enough": ({"silent_s": 2.0, "tries": NO_ANSWER}, None, None),
    "lost, and no answer": ({"silent_s": 1.0, "is_lost": True, "tries": NO_ANSWER}, "answers on no network", "certain"),
    "lost, and tried on one network only": ({"silent_s": 1.0, "is_lost": True, "tries": NO_ANSWER[:1]}, None, None),
    "lost, and others tried one network only": ({"silent_s": 1.0, "is_lost": True, "tries": NO_ANSWER[2:]}, None, None),
    "lost, and refused": ({"silent_s": 0.3, "is_lost": True, "tries": REFUSED}, "the node's agent died", "certain"),
    "silent, and refused": ({"silent_s": 1.0, "tries": REFUSED}, "the node's agent died", "certain"),
    "silent, and its machine answers": ({"silent_s": 8.0, "tries": ANSWERS}, None, None),
    "one path answers": ({"silent_s": 8.0, "tries": [*NO_ANSWER, (1, "control", True, False)]}, None, None),
    "mute for long, and nobody waits": ({"silent_s": 100.0, "tries": ANSWERS}, None, None),
    "mute for long, and others wait": (
        {"silent_s": 9.5, "tries": ANSWERS, "waits": True},
        "the machine answers, but its agent does not",
        "likely",
    ),
    "lost for long, and its machine answers": (
        {"silent_s": 9.5, "is_lost": True, "tries": ANSWERS},
        "the machine answers, but its agent does not",
        "likely",
    ),
    "lost, and nobody can try": (
        {"silent_s": 6.5, "is_lost": True},
        "no other node could test its machine",
        "undecided",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_it_takes_two_signs(case):
    known, message, confidence = TABLE[case]
    judged, _ = judge_gone(picture(**known), NOW_S)
    if message is None:
        assert judged is None
        return
    finding = judged.findings[0]
    node = "node01 or node03" if confidence == "undecided" else "node03"
    assert (finding.cause, finding.node, finding.ranks) == ("AR012 node-failure", node, (2,))
    assert message in finding.message
    assert finding.confidence == confidence
    assert (judged.nodes, judged.cures, judged.exit_code, judged.is_retryable) == ((2,), True, 75, True)
    assert finding.evidence
    assert finding.fix


def test_one_that_has_not_come_to_a_new_leader_is_not_blamed_for_its_agent_but_for_its_machine():
    for tries, expected in ((REFUSED, None), (NO_ANSWER, NOT_COME)):
        made = picture(silent_s=1.0, is_lost=True, tries=tries)
        made.nodes[GONE].lost_reason = NOT_COME
        judged, _ = judge_gone(made, NOW_S)
        assert (judged and judged.findings[0].evidence[0].seen) == expected


def test_where_both_networks_are_one_the_machine_does_not_answer_on_that_one():
    made = picture(silent_s=3.5, tries=[NO_ANSWER[0], NO_ANSWER[2]])
    made.nodes[GONE].addresses = {network: made.nodes[GONE].address("data") for network in ("data", "control")}
    judged, _ = judge_gone(made, NOW_S)
    assert judged.findings[0].message == "the node is gone: its machine does not answer on the data network"


@pytest.mark.parametrize(
    ("slept_s", "woke_s", "node", "confidence"),
    [
        (20.0, NOW_S - 1.0, "node01 or node03", "undecided"),
        (2.5, NOW_S - 1.0, "node03", "certain"),
        (20.0, NOW_S - 11.0, "node03", "certain"),
    ],
    ids=["it slept since", "it slept for a moment", "it was heard after that"],
)
@pytest.mark.parametrize("tries", [REFUSED, ANSWERS, []], ids=["refused", "answers", "nobody can try"])
def test_an_agent_that_ended_while_the_leader_slept_may_have_given_up(slept_s, woke_s, node, confidence, tries):
    made = picture(silent_s=9.5, is_lost=True, tries=tries)
    made.slept_s, made.woke_s = slept_s, woke_s
    (finding,) = judge_gone(made, NOW_S)[0].findings
    assert ("the leader's agent did not run for 20 s" in [each.seen for each in finding.evidence]) is (
        confidence == "undecided"
    )
    if not tries:
        node, confidence = "node01 or node03", "undecided"
    confidence = "likely" if confidence == "certain" and tries != REFUSED else confidence
    assert (finding.cause, finding.node, finding.confidence) == ("AR012 node-failure", node, confidence)


@pytest.mark.parametrize(
    ("reason", "confidence"),
    [("closed", "certain"), (f"closed; {UNLED} 13 s", "undecided")],
    ids=["a leader follows at once", "nobody led for a while"],
)
def test_a_last_leader_may_have_left_while_nobody_led(reason: str, confidence: str):
    made = picture(silent_s=8.0, is_lost=True, tries=REFUSED)
    made.nodes[GONE].lost_reason = reason
    (finding,) = judge_gone(made, NOW_S)[0].findings
    assert (finding.evidence[0].seen, finding.confidence) == (reason, confidence)


@pytest.mark.parametrize(("more_s", "is_named"), [(-1.0, False), (1.0, True)])
def test_a_silent_agent_is_named_when_no_rank_has_moved_for_hang_s(more_s: float, is_named: bool):
    made = picture(silent_s=9.5, tries=ANSWERS)
    made.moved_s = NOW_S - made.settings.hang_s - more_s
    judged, _ = judge_gone(made, NOW_S)
    assert (judged is not None) is is_named
    if judged is not None:
        assert (judged.nodes, judged.findings[0].confidence) == ((GONE,), "likely")


def test_an_agent_that_has_not_come_to_a_new_leader_is_not_named_while_its_machine_answers():
    made = picture(silent_s=30.0, is_lost=True, tries=ANSWERS)
    assert judge_gone(made, NOW_S)[0] is not None
    made.nodes[GONE].lost_reason = NOT_COME
    assert judge_gone(made, NOW_S)[0] is None


@pytest.mark.parametrize(("silent_s", "is_over"), [(8.0, False), (9.5, True)])
def test_a_stopped_agent_is_named_when_all_other_ranks_have_finished(silent_s: float, is_over: bool):
    made = picture(silent_s=silent_s, tries=ANSWERS)
    made.left.update(dict.fromkeys([0, 1, 3], NOW_S))
    judged, _ = judge_gone(made, NOW_S)
    assert (judged is not None) is is_over
    if judged is not None:
        assert (judged.findings[0].cause, judged.nodes, judged.is_over) == ("AR010 process-stopped", (GONE,), True)
        assert "its machine answers, and all other ranks have finished" in judged.findings[0].message


@pytest.mark.parametrize(
    ("silent_s", "tries", "lost"),
    [
        pytest.param(1.0, REFUSED, (), id="only its agent has died"),
        pytest.param(3.5, NO_ANSWER, (GONE,), id="its machine is gone"),
    ],
)
def test_a_machine_that_refuses_is_not_lost(silent_s: float, tries: list, lost: tuple[int, ...]):
    judged, _ = judge_gone(picture(silent_s=silent_s, is_lost=True, tries=tries), NOW_S)
    assert (judged.nodes, judged.lost) == ((GONE,), lost)


def six_nodes(*silent: int):
    """Six nodes, of which some are silent, and tried by two others."""
    made = scene([beat(i, away(i, num=6)) for i in range(6)])
    for index in silent:
        made.nodes[index].heard_s = NOW_S - 3.5
        for source, network in ((0, "data"), (0, "control"), (2, "data"), (2, "control")):
            seen = TrySeen(target=index, network=network, connects=False, refused=False, carries=None)
            made.note_try(made.nodes[source], Tried(seen, NOW_S))
    return made


def test_two_nodes_are_named_in_one_verdict():
    judged, may_grow = judge_gone(six_nodes(1, 3), NOW_S)
    assert ([finding.node for finding in judged.findings], judged.nodes, may_grow) == (
        ["node02", "node04"],
        (1, 3),
        False,
    )
    assert [finding.victims for finding in judged.findings] == [(0, 2, 4, 5), (0, 2, 4, 5)]


def test_the_leader_alone_proves_nothing_about_two_nodes():
    assert judge_gone(picture(silent_s=3.5, tries=NO_ANSWER[:2], who=(1, 2)), NOW_S)[0] is None


def test_when_half_of_the_nodes_are_gone_the_job_goes_on_without_them_but_nobody_can_tell_which_side_it_is():
    judged, may_grow = judge_gone(six_nodes(1, 3, 4), NOW_S)
    (finding,) = judged.findings
    assert (finding.cause, finding.confidence, may_grow) == ("AR211 partition", "undecided", False)
    assert finding.node == "node[01,03,06] or node[02,04-05]"
    assert finding.message.endswith("the network between them failed, or half of the nodes did")
    assert (judged.nodes, judged.cures, judged.exit_code) == ((1, 3, 4), True, 75)


def test_a_leader_that_has_succeeded_another_counts_nodes_that_it_has_not_heard_yet():
    made = six_nodes(1, 3)
    made.leader = 5
    for index in (0, 2):
        made.nodes[index].heard_s, made.nodes[index].began_s = None, NOW_S - 3.5
    judged, _ = judge_gone(made, NOW_S)
    assert [(finding.cause, finding.confidence) for finding in judged.findings] == [("AR211 partition", "undecided")]


@pytest.mark.parametrize("tries", [ANSWERS, REFUSED], ids=["mute", "refused"])
def test_an_agent_of_a_job_that_was_told_to_stop_may_have_left(tries):
    made = picture(silent_s=60.0, is_lost=True, tries=tries)
    assert judge_gone(made, NOW_S)[0] is not None
    made.may_leave = True
    assert judge_gone(made, NOW_S)[0] is None


def test_a_second_silent_node_may_still_join_the_verdict():
    made = picture(silent_s=3.5, tries=NO_ANSWER)
    made.nodes[3].heard_s = NOW_S - 2.0
    assert judge_gone(made, NOW_S)[1] is True


def test_when_all_others_fall_silent_the_link_of_the_leader_is_at_fault():
    judged, _ = judge_gone(picture(silent_s=3.5, tries=NO_ANSWER[:2], who=(1, 2, 3)), NOW_S)
    assert (judged.findings[0].cause, judged.nodes) == ("AR210 link-down", (0,))


@pytest.mark.parametrize(
    ("who", "tries"),
    [((1, 2, 3), ANSWERS), ((1, 2, 3), [*NO_ANSWER[:1], *ANSWERS[1:]])],
    ids=["their machines answer", "on one network"],
)
def test_when_they_are_silent_but_their_machines_answer_nobody_can_tell(who, tries):
    judged, _ = judge_gone(picture(silent_s=9.5, is_lost=True, tries=tries, who=who), NOW_S)
    (finding,) = judged.findings
    assert (finding.cause, finding.node, finding.confidence) == (
        "AR211 partition",
        "node01 or node[02-04]",
        "undecided",
    )
    assert (judged.nodes, judged.ranks, judged.exit_code) == ((), (), 75)  # nobody is left out, or barred, for it


def test_when_most_of_the_nodes_fall_silent_nobody_can_tell_which_side_it_is():
    judged, may_grow = judge_gone(six_nodes(1, 3, 4, 5), NOW_S)
    (finding,) = judged.findings
    assert (finding.cause, finding.confidence, may_grow) == ("AR211 partition", "undecided", False)
    assert finding.node == "node[01,03] or node[02,04-06]"
    assert finding.message.startswith("node[01,03] lost node[02,04-06] at once: ")
    assert (judged.nodes, judged.cures) == ((), False)


@pytest.mark.parametrize(
    ("done", "node"),
    [((3, 4, 5), "node[01,03] or node[02,04-06]"), ((3, 4), "node[01,03,06] or node[02,04-05]"), ((3,), "node02")],
)
def test_silent_nodes_that_are_done_count_for_a_split(done, node):
    """Nobody needs them any more, but their silence shows that it is not one node that has failed."""
    made = six_nodes(1, *done)
    for index in done:
        made.left[index] = NOW_S - 5
    (finding,) = judge_gone(made, NOW_S)[0].findings
    assert (finding.node, finding.confidence == "undecided") == (node, len(done) > 1)


@pytest.mark.parametrize(
    ("leader", "node", "tries"),
    [
        (0, "node01 or node03", REFUSED),
        (0, "node01 or node03", []),
        (1, "node03", REFUSED),
        (1, "node02 or node03", []),
    ],
)
def test_an_agent_that_was_lost_before_it_began_may_have_lost_its_connection(leader, node, tries):
    """One that waits for its first Plan ends with its connection; a new leader may not have heard the others."""
    made = picture(silent_s=6.5, is_lost=True, tries=tries)
    made.nodes[GONE].heard_s, made.leader = None, leader
    (finding,) = judge_gone(made, NOW_S)[0].findings
    assert (finding.node, finding.confidence == "undecided") == (node, leader == 0 or not tries)


def test_who_waits_for_whom_is_looked_at_once_however_many_nodes_are_silent(monkeypatch):
    # Each look goes through all ranks: with one for each silent node, 512 of them took a minute.
    looks = []
    monkeypatch.setattr(presence, "find_waiting", lambda *args, **more: looks.append(args))
    made = scene([beat(i, waiting(i, call(), num=8, for_s=NOW_S)) for i in range(8)])
    judge_gone(made, NOW_S + 100.0)
    assert len(looks) == 1


def test_when_most_of_the_nodes_have_come_back_the_others_get_the_time_to():
    made = picture(silent_s=6.5, is_lost=True)
    silent = made.nodes[1], made.nodes[3]
    for node in silent:
        node.lost_s = NOW_S
    assert judge_gone(made, NOW_S)[0] is not None  # most nodes are lost, one for long
    for node in silent:
        node.lost_s, node.heard_s = None, NOW_S + 0.5
    assert judge_gone(made, NOW_S + 0.5)[0] is None
    for node in silent:
        node.heard_s = NOW_S + 6.0
    assert judge_gone(made, NOW_S + 6.0)[0].nodes == (GONE,)


def test_a_node_that_never_spoke_gets_its_time():
    made = scene([beat(0, away(0, num=2))], num=2, began_s=NOW_S - 10)
    assert find_suspects(made, NOW_S) == []
    assert [node.index for node in find_suspects(made, NOW_S + 6)] == [1]


def test_a_node_whose_ranks_have_all_left_may_be_silent():
    made = picture(silent_s=60.0, tries=NO_ANSWER)
    made.left[GONE] = NOW_S - 60
    assert judge_gone(made, NOW_S)[0] is None


def test_the_leaders_node_and_some_others_try_both_networks():
    made = picture(silent_s=2.0)
    suspects = find_suspects(made, NOW_S)
    assert [node.index for node in suspects] == [2]
    assert sorted(TryOrders(made).wants(NOW_S)) == [0, 1, 3]
    targets = suspects[0].targets()
    assert [(t.network, t.address, t.port) for t in targets] == [
        ("data", "192.168.20.3", 4000),
        ("control", "10.0.0.3", 4001),
    ]


STOPPED = {
    "stopped for long": (ProcessState.STOPPED, 1.6, True),
    "stopped just now": (ProcessState.STOPPED, 1.4, False),
    "in a debugger for long": (ProcessState.TRACED, 1.6, True),
    "sleeping for ever": (ProcessState.SLEEPING, 1e6, False),
    "in the kernel": (ProcessState.BLOCKED, 60.0, False),
    "dead": (ProcessState.GONE, 60.0, False),
}


FIXES = {
    ProcessState.STOPPED: "find what stopped pid 101 on node02: somebody's kill -STOP, or a frozen cgroup, or SLURM "
    "(scontrol show job: SUSPENDED)",
    ProcessState.TRACED: "find the debugger (gdb, strace, py-spy) that held pid 101; on node02: ps -ef | grep -w 101",
}


@pytest.mark.parametrize(
    ("reader", "lost", "stopped"),
    [
        (ANYBODY, "on node02: dmesg -T | grep -i 'killed process', and the end of its SLURM log", "SLURM"),
        (Reader(SchedulerKind.POD), "kubectl describe pod node02 shows how it ended (OOMKilled, Evicted)", "cgroup"),
        (
            Reader(SchedulerKind.NONE),
            "on node02: dmesg -T | grep -i 'killed process', and the end of the agent",
            "cgroup",
        ),
    ],
    ids=["SLURM", "pod", "by hand"],
)
def test_what_to_do_fits_who_runs_the_job(reader: Reader, lost: str, stopped: str) -> None:
    ranks = [away(0, num=2), away(1, num=2, state=ProcessState.STOPPED, state_for_s=60.0)]
    made = scene([beat(i, rank) for i, rank in enumerate(ranks)])
    made.reader = reader
    judged = judge_stopped(made)
    assert judged is not None
    assert ("SLURM" in (judged.findings[0].fix or "")) == (stopped == "SLURM")
    assert (describe_loss("node02", "no word", "killed by SIGKILL", reader=reader).fix or "").startswith(lost)
    assert made.fault("AR407", "it died", 1).fix == find_cause("AR407").fix.tell(reader, {"node": "node02"})


@pytest.mark.parametrize("case", STOPPED)
def test_only_a_process_that_is_stopped_for_long_is_at_fault(case):
    state, for_s, is_fault = STOPPED[case]
    ranks = [away(0, num=2), away(1, num=2, state=state, state_for_s=for_s)]
    judged = judge_stopped(scene([beat(i, rank) for i, rank in enumerate(ranks)]))
    assert (judged is not None) is is_fault
    if judged is not None:
        finding = judged.findings[0]
        assert (finding.cause, finding.node, finding.ranks) == ("AR010 process-stopped", "node02", (1,))
        assert finding.fix == FIXES[state]
        assert (finding.confidence, judged.cures) == (Confidence.CERTAIN, False)
