"""From what a roll call saw to its findings: one for each reason, culprit first, whatever the cards say."""

from __future__ import annotations

import random

import msgspec
import pytest
from seen import (
    NO_ANSWER,
    PORTS,
    Results,
    around,
    brief,
    card,
    change,
    facts,
    judged,
    mesh,
    nic,
    silence,
    terms,
)

from allranks.causes.outcome import PASSED, Checks, Outcome, failed, warned
from allranks.model.card import Card
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Status
from allranks.model.fix import SchedulerKind, Vendor
from allranks.preflight.judge import MAX_FINDINGS, Observations, Stranger, judge, name_nodes
from cards import make_cause


def with_environment(index: int, **environment: str) -> Card:
    return card(index, with_facts={"environment": environment})


def interface_down(index: int) -> Card:
    return card(index, with_facts={"interfaces": (nic(index, is_up=False, carrier=False),)})


def is_silent(*nodes: int):
    return lambda results: [silence(results, around(node, 6)) for node in nodes]


def without(*nodes: int):
    """The pairs of nodes that never came."""

    def fault(results: Results) -> None:
        for pair in [pair for pair in results if {*pair} & {*nodes}]:
            del results[pair]

    return fault


# ---- two at once


def test_a_partition_and_an_environment_that_differs_are_both_named():
    def cut(results: Results) -> None:
        silence(results, [(a, b) for a in range(6) for b in range(6) if (a < 3) != (b < 3)])

    judgement = judged(6, cut, cards={5: with_environment(5, NCCL_ALGO="Ring")})
    assert brief(judgement) == [
        ("AR211", "node[01-03] | node[04-06]", "fail", "certain"),
        ("AR503", "node06", "fail", "certain"),
    ]
    assert judgement.exit_code == 75


def test_a_missing_node_and_a_silent_link_are_both_named():
    cards = {index: card(index) for index in range(5)}
    results = mesh(6)
    without(5)(results)
    silence(results, [(1, 3), (3, 1)])
    seen = Observations(cards=cards, results=tuple(results.values()), missing=(5,), waited_s=60.2)
    judgement = judge(seen, terms(6))
    assert brief(judgement) == [
        ("AR001", "node06", "fail", "certain"),
        ("AR211", "node02 <-> node04", "fail", "certain"),
    ]
    assert judgement.findings[0].message == "the node's agent did not join within 60 s; 5 of 6 nodes joined"
    assert judgement.exit_code == 75


def test_a_fault_that_leaving_out_cures_beside_one_that_it_does_not_is_no_requeue():
    def filter_ports(results: Results) -> None:
        change(results, [(1, 5), (5, 1)], num_open=2, closed=dict.fromkeys(PORTS[:6], NO_ANSWER))

    judgement = judged(6, filter_ports, is_silent(3))
    assert [row[:2] for row in brief(judgement)] == [("AR206", "node02 <-> node06"), ("AR210", "node04")]
    assert judgement.exit_code == 78


# ---- one reason, one finding


@pytest.mark.parametrize("down", [(2,), (2, 3), (0, 2, 5)])
def test_an_interface_that_is_down_is_not_also_silent(down):
    judgement = judged(6, is_silent(*down), cards={index: interface_down(index) for index in down})
    named = {finding.node for finding in judgement.findings}
    assert {finding.cause_id for finding in judgement.findings} == {"AR210"}
    assert len(judgement.findings) == len(named)
    assert all("is down: no carrier" in finding.message for finding in judgement.findings)


def test_a_node_that_does_not_report_is_not_also_silent_in_the_pairs_of_the_others():
    def only_others_report(results: Results) -> None:
        silence(results, around(2, 6))
        for pair in [pair for pair in results if pair[0] == 2]:
            del results[pair]

    judgement = judged(6, only_others_report, silent=frozenset({2}))
    assert brief(judgement) == [("AR001", "node03", "fail", "certain")]
    assert judgement.findings[0].message == "the node's agent joined, then stopped answering"
    assert judgement.findings[0].waiting == "node[01-02,04-06]"


@pytest.mark.parametrize("seen", [card(2, facts=None), interface_down(2)], ids=["nothing", "the same"])
def test_a_node_whose_agent_says_that_its_interface_is_down_is_not_also_silent(seen):
    own = Finding(
        cause="AR210 link-down",
        severity=Severity.FAIL,
        confidence=Confidence.CERTAIN,
        node="whatever",
        interface="ens1f1",
        message="the data interface is down",
    )
    problem = msgspec.structs.replace(seen, problem="ens1f1 is down", problem_exit=78, problem_finding=own)
    judgement = judged(6, is_silent(2), cards={2: problem})
    assert brief(judgement) == [("AR210", "node03", "fail", "certain")]
    assert judgement.exit_code == 78


def test_the_same_stranger_twice_is_one_finding():
    strangers = tuple(Stranger("AR406", "10.0.0.9", f"10.0.0.9 was rejected: {why}") for why in ("a", "b"))
    judgement = judged(6, strangers=strangers)
    assert brief(judgement) == [("AR406", "10.0.0.9", "warn", "certain")]
    assert judgement.exit_code == 0


# ---- who is here


@pytest.mark.parametrize(
    ("scheduler", "fix"),
    [
        (
            SchedulerKind.SLURM,
            "sinfo -N -n node03 -o '%N %T %E' shows whether it is up; start without it: --exclude=node03",
        ),
        (SchedulerKind.POD, "kubectl describe pod node03 shows whether its pod runs, or why not; "),
        (SchedulerKind.NONE, "see whether it is up (ping node03), and whether allranks was started there; "),
    ],
)
def test_a_fix_is_for_the_scheduler_and_the_gpus_that_the_reports_of_the_nodes_show(scheduler, fix):
    of_amd = {"scheduler": scheduler, "vendor": Vendor.AMD}
    cards = {index: card(index, with_facts=of_amd) for index in (0, 1)}
    (missing,) = judge(Observations(cards=cards, missing=(2,)), terms(3)).findings
    assert missing.fix.startswith(fix)
    assert (cards[0].reader.scheduler, cards[0].reader.vendor) == (scheduler, Vendor.AMD)


def test_who_left_is_named_with_the_reason():
    cards = {index: card(index) for index in range(5)}
    seen = Observations(cards=cards, missing=(5,), left={5: "node06: it closed the connection"}, waited_s=60)
    judgement = judge(seen, terms(6))
    assert brief(judgement) == [("AR012", "node06", "fail", "certain")]
    assert judgement.findings[0].evidence[0].seen == "node06: it closed the connection"
    assert judgement.exit_code == 75


def test_missing_nodes_are_folded_with_names_and_without():
    seen = Observations(cards={0: card(0)}, missing=(1, 2, 4), waited_s=60)
    assert brief(judge(seen, terms(5))) == [("AR001", "node[02-03,05]", "fail", "certain")]
    assert brief(judge(seen, terms(5, node_names=()))) == [
        ("AR001", "node rank 1, node rank 2, node rank 4", "fail", "certain")
    ]


@pytest.mark.parametrize("cause", ["AR404", "AR405", "AR406"])
def test_strangers_stop_nobody(cause):
    judgement = judged(3, strangers=(Stranger(cause, "node09", "it is of attempt 1"),))
    assert brief(judgement) == [(cause, "node09", "warn", "certain")]
    assert judgement.findings[0].waiting is None
    assert judgement.is_go


# ---- what an agent says against its own node


def problem(index: int, text: str = "train.py: no such script", **more: object) -> Card:
    return card(index, problem=text, **({"problem_exit": 2} | more))


def test_a_problem_stops_the_job_with_its_own_exit_code():
    judgement = judged(6, cards={2: problem(2)})
    assert brief(judgement) == [("AR512", "node03", "fail", "certain")]
    assert judgement.findings[0].message == "train.py: no such script"
    assert judgement.findings[0].waiting == "node[01-02,04-06]"
    assert judgement.exit_code == 2


def test_what_the_agents_of_several_nodes_say_alike_is_one_finding():
    judgement = judged(3, cards={index: problem(index) for index in range(3)})
    assert brief(judgement) == [("AR512", "node[01-03]", "fail", "certain")]
    assert (judgement.findings[0].waiting, judgement.exit_code) == (None, 2)


@pytest.mark.parametrize("exit_code", [0, -1, 256, 1 << 40])
def test_an_absurd_exit_code_is_78(exit_code):
    assert judged(3, cards={2: problem(2, problem_exit=exit_code)}).exit_code == 78


HOSTILE_FINDINGS = {
    "unknown cause": {"cause": "AR999 nonsense"},
    "no cause": {"cause": ""},
    "escapes in the cause": {"cause": "\x1b[2J"},
    "an outcome": {"cause": "AR599 healthy"},
    "a mere warning": {"severity": Severity.WARN},
    "many ranks": {"ranks": tuple(range(10_000)), "victims": tuple(range(10_000))},
    "long": {"message": "x" * 20_000, "fix": "y" * 20_000, "evidence": (Evidence(seen="z" * 9_000),) * 40},
    "another node": {"node": "node01", "waiting": "everybody"},
}


@pytest.mark.parametrize("kind", HOSTILE_FINDINGS)
def test_a_problem_with_an_absurd_finding_still_names_its_node(kind):
    own = Finding(
        cause="AR208 nic-not-found", severity=Severity.FAIL, confidence=Confidence.CERTAIN, message="no ens1f1"
    )
    own = msgspec.structs.replace(own, **HOSTILE_FINDINGS[kind])
    judgement = judged(3, cards={2: problem(2, problem_finding=own)})
    (finding,) = judgement.findings
    assert finding.node == "node03"
    assert finding.severity is Severity.FAIL
    assert finding.cause in ("AR208 nic-not-found", "AR512 node-cannot-start")
    assert finding.ranks == ()
    assert finding.waiting == "node[01-02]"
    assert len(msgspec.json.encode(finding)) < 110_000
    assert judgement.exit_code == 2


# ---- causes


BROKEN, HALF_BROKEN, SOUND, COMPARED = (make_cause(f"AR{number}") for number in (998, 997, 996, 995))


def break_down(card: Card) -> Outcome:
    raise ZeroDivisionError(f"on {card.host}\x1b[2J")


MADE_UP = {
    "AR998": Checks(probe=break_down),
    # Its second finding cannot be said.
    "AR997": Checks(probe=lambda card: failed(what="bad") if card.host == "node01" else failed(other="worse")),
    "AR996": Checks(probe=lambda card: warned(what="odd") if card.host == "node02" else PASSED),
    "AR995": Checks(alike=lambda card: None if card.host == "node02" else {"model": "H200"}),
}


def test_a_check_that_breaks_stops_nobody_and_passes_nobody():
    seen = Observations(cards={index: card(index) for index in range(3)})
    judgement = judge(seen, terms(3), causes=[BROKEN, HALF_BROKEN, SOUND], checks=MADE_UP)
    assert [(result.cause_id, result.node, result.status) for result in judgement.results] == [
        *(("AR998", f"node0{number}", Status.CRASH) for number in (1, 2, 3)),
        *(("AR997", f"node0{number}", Status.CRASH) for number in (1, 2, 3)),
        ("AR996", "node01", Status.PASS),
        ("AR996", "node02", Status.WARN),
        ("AR996", "node03", Status.PASS),
    ]
    assert judgement.results[0].note == r"ZeroDivisionError: on node01\x1b[2J"
    assert brief(judgement) == [("AR996", "node02", "warn", "certain")]
    assert judgement.exit_code == 0


def test_a_comparison_passes_only_where_there_is_something_to_compare():
    seen = Observations(cards={index: card(index) for index in range(3)})
    judgement = judge(seen, terms(3), causes=[COMPARED], checks=MADE_UP)
    assert [(result.node, result.status, result.note) for result in judgement.results] == [
        ("node01", Status.PASS, ""),
        ("node02", Status.SKIP, "nothing to compare"),
        ("node03", Status.PASS, ""),
    ]


def test_what_is_ignored_is_left_out():
    judgement = judged(6, is_silent(3), cards={5: with_environment(5, NCCL_ALGO="Ring")}, ignored=frozenset({"AR503"}))
    assert [row[:2] for row in brief(judgement)] == [("AR210", "node04")]
    assert judgement.exit_code == 75
    assert {result.cause_id for result in judgement.results}.isdisjoint({"AR503"})  # not in the table either
    judgement = judged(6, is_silent(3), ignored=frozenset({"AR210"}))
    assert judgement.findings == ()
    assert judgement.exit_code == 0


def test_what_stops_the_job_comes_before_what_does_not():
    def shift(results: Results) -> None:
        change(results, [(a, 1) for a in range(6)], clock_offset_s=5.0)
        change(results, [(1, a) for a in range(6)], clock_offset_s=-5.0)

    judgement = judged(6, shift, is_silent(3), strangers=(Stranger("AR406", "10.0.0.9", "no secret"),))
    assert [row[:3] for row in brief(judgement)] == [
        ("AR210", "node04", "fail"),
        ("AR007", "node02", "warn"),
        ("AR406", "10.0.0.9", "warn"),
    ]


def test_the_order_of_what_was_seen_does_not_matter():
    results = mesh(6)
    is_silent(3)(results)
    silence(results, [(0, 1), (1, 0)])
    cards = {index: card(index) for index in range(6)}
    expected = judge(Observations(cards=cards, results=tuple(results.values())), terms(6)).findings
    for seed in range(5):
        order = list(results.values())
        random.Random(seed).shuffle(order)
        shuffled = dict(random.Random(seed).sample(sorted(cards.items()), 6))
        assert judge(Observations(cards=shuffled, results=tuple(order)), terms(6)).findings == expected


def test_a_node_that_differs_in_everything_does_not_fill_pages():
    odd = {f"NCCL_{number:03d}": "x" * 400 for number in range(900)}
    judgement = judged(6, cards={5: card(5, with_facts={"environment": odd})})
    assert 0 < len(judgement.findings) <= MAX_FINDINGS
    assert len(msgspec.json.encode(judgement.findings)) < 1 << 20


# ---- names


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        (["node01", "node02"], ["node01", "node02"]),
        (["a", "b", "a"], ["a.0", "b", "a.1"]),
        (["a", "a", "a.0"], ["a.1", "a.2", "a.0"]),
        (["a.0", "a", "a", "a.0"], ["a.0.0", "a.0", "a.1", "a.0.1"]),
    ],
)
def test_every_node_has_a_name_of_its_own(hosts, names):
    named = name_nodes({index: card(index, host=host) for index, host in enumerate(hosts)})
    assert list(named.values()) == names


def test_1024_agents_of_one_host_are_named_at_once():
    named = name_nodes({index: card(index, host="login") for index in range(1024)})
    assert len(set(named.values())) == 1024


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("node 02", "node?02"),
        ("node\n02", "node?02"),
        ("n[1-3]", "n?1-3?"),
        ("a,b", "a?b"),
        ("\x1b[2J", "??2J"),
        ("", "?"),
        ("\u202eedon", "?edon"),
        ("n" * 5000, "n" * 253),
        ("n" + "9" * 200, "n" + "9" * 200),
    ],
)
def test_a_host_of_an_odd_name_is_judged_under_a_plain_one(host, shown):
    judgement = judged(6, is_silent(1), cards={1: card(1, host=host), 2: card(2, facts=facts(2, host_name=host))})
    assert ("AR210", shown) in [row[:2] for row in brief(judgement)]
    assert not [result for result in judgement.results if result.status is Status.CRASH]
