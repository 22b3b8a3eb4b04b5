"""What is said of a restart, and in one line of the end?"""

from __future__ import annotations

import msgspec

from allranks.guard.guard_verdict import GuardVerdict
from allranks.launch.lead.summary import describe_restart, loop_of, summarize
from allranks.model.finding import Confidence, Finding, Severity, Verdict
from allranks.model.past import Crash

KILLED = Finding(
    cause="AR407 dead-rank",
    severity=Severity.FAIL,
    confidence=Confidence.CERTAIN,
    node="n2",
    ranks=(2,),
    message="killed",
)


def test_a_restart_says_where_it_goes_on():
    nodes = ["node01", "node02"]
    assert (
        describe_restart(1, nodes, ["node03"], 120, num_left=2)
        == "restart 1 on 2 nodes without node03, from the checkpoint of step 120; 2 more restarts left"
    )
    assert describe_restart(1, nodes, [], None, num_left=0) == (
        "restart 1 on 2 nodes, from the beginning; 0 more restarts left"
    )


def test_of_a_script_that_tells_nothing_allranks_does_not_know_where_it_goes_on():
    assert describe_restart(2, ["node01"], [], None, num_left=1, is_tracked=False) == (
        "restart 2 on 1 node, from what the script itself saved; 1 more restart left"
    )


def test_of_several_crashes_the_one_that_came_back_is_named():
    other = msgspec.structs.replace(KILLED, node="n3", ranks=(3,), message="killed by SIGSEGV")
    crash = Crash(cause=other.cause, ranks=(3,), step=40, what=other.message)
    first, *others = loop_of(GuardVerdict(findings=(KILLED, other), exit_code=137, ranks=(2,)), crash).findings
    assert (first.cause_id, first.node, first.ranks, others) == ("AR509", "n3", (3,), [KILLED, other])
    assert first.message.endswith("at step 40 after a restart: AR407 dead-rank: killed by SIGSEGV")


def test_one_line_tells_all_that_broke():
    finding = msgspec.structs.replace(KILLED, notes=("also by itself: rank 3, SIGSEGV, 0.1 s later",))
    assert summarize(Verdict(job="j", attempt=0, exit_code=137, findings=(finding,))) == (
        "AR407 dead-rank: rank 2 on n2: killed; also by itself: rank 3, SIGSEGV, 0.1 s later"
    )
