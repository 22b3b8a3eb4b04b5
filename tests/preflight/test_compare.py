from __future__ import annotations

from collections.abc import Mapping

import pytest

from allranks.causes.outcome import Checks, Outcome
from allranks.model.card import Card, Facts
from allranks.model.finding import Confidence, Severity, Status
from allranks.model.majority import Majority, majority
from allranks.preflight.compare import compare
from cards import make_card, make_cause


def versions(card: Card) -> Mapping[str, str | None] | None:
    facts = card.facts
    assert facts is not None
    return {"torch": facts.python_version or None, **facts.environment} if facts.host_name != "blank" else None


def severity(key: str) -> Severity:
    return Severity.WARN if key == "NCCL_DEBUG" else Severity.FAIL


VERSIONS_DIFFER = Checks(alike=versions, severity_of=severity)


def card(host: str, version: str = "2.13.0", *, facts: Facts | None = None, **environment: str) -> Card:
    facts = facts or Facts(python_version=version, environment=environment)
    return make_card(host=host, facts=facts)


def cards(*versions: str) -> list[Card]:
    return [card(f"node{i:02}", version) for i, version in enumerate(versions, start=1)]


def texts(found: tuple[tuple[str, ...], Outcome]) -> tuple[object, ...]:
    hosts, outcome = found
    return hosts, outcome.values["usual"], outcome.values["odd"], outcome.evidence


def test_the_odd_node_is_the_culprit() -> None:
    ((hosts, outcome),) = compare(VERSIONS_DIFFER, cards("2.13.0", "2.13.0", "2.13.0", "2.4.0", "2.13.0", "2.13.0"))
    assert hosts == ("node04",)
    assert outcome == Outcome(
        Status.FAIL,
        note="torch: node04 has 2.4.0",
        values={"what": "torch", "usual": "5 of 6 nodes have 2.13.0", "odd": "node04 has 2.4.0"},
        evidence=("node[01-03,05-06]: 2.13.0", "node04: 2.4.0"),
        confidence=Confidence.CERTAIN,
    )
    finding = outcome.to_finding(make_cause("AR999", message="{what} differs: {usual}, {odd}"), node="node04")
    assert finding.message == "torch differs: 5 of 6 nodes have 2.13.0, node04 has 2.4.0"


DIFFERENT = {
    "two odd nodes alike": (
        ["A", "B", "B", "A", "A"],
        (("node02", "node03"), "3 of 5 nodes have A", "node[02-03] have B", ("node[01,04-05]: A", "node[02-03]: B")),
    ),
    "two odd nodes unlike": (
        ["A", "B", "A", "C", "A"],
        (
            ("node02", "node04"), "3 of 5 nodes have A", "node02 has B, node04 has C",
            ("node[01,03,05]: A", "node02: B", "node04: C"),
        ),
    ),
    "the more common odd value goes first": (
        ["B", "A", "A", "A", "A", "A", "C", "C"],
        (
            ("node01", "node07", "node08"), "5 of 8 nodes have A", "node[07-08] have C, node01 has B",
            ("node[02-06]: A", "node[07-08]: C", "node01: B"),
        ),
    ),
    "one that could not be read is noted": (
        ["A", "A", "", "B"],
        (
            ("node04",), "2 of 3 nodes have A", "node04 has B",
            ("node[01-02]: A", "node04: B", "node03: could not be read"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("versions", "expected"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_a_majority_is_right(versions: list[str], expected: tuple[object, ...]) -> None:
    (found,) = compare(VERSIONS_DIFFER, cards(*versions))
    assert texts(found) == expected
    assert found[1].confidence is Confidence.CERTAIN


UNDECIDED = {
    "one against one": (["A", "B"], (("node01", "node02"), "node01 has A", "node02 has B", ("node01: A", "node02: B"))),
    "two against two": (
        ["A", "B", "B", "A"],
        (
            ("node01", "node02", "node03", "node04"), "node[01,04] have A", "node[02-03] have B",
            ("node[01,04]: A", "node[02-03]: B"),
        ),
    ),
    "all different": (
        ["A", "B", "C"],
        (
            ("node01", "node02", "node03"), "node01 has A", "node02 has B, node03 has C",
            ("node01: A", "node02: B", "node03: C"),
        ),
    ),
    "most common, but not more than half": (
        ["B", "A", "A", "C"],
        (
            ("node01", "node02", "node03", "node04"), "node[02-03] have A", "node01 has B, node04 has C",
            ("node[02-03]: A", "node01: B", "node04: C"),
        ),
    ),
    "who could not be read is no culprit": (
        ["", "A", "B"],
        (("node02", "node03"), "node02 has A", "node03 has B", ("node02: A", "node03: B", "node01: could not be read")),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("versions", "expected"), UNDECIDED.values(), ids=UNDECIDED.keys())
def test_without_a_majority_nobody_can_say(versions: list[str], expected: tuple[object, ...]) -> None:
    (found,) = compare(VERSIONS_DIFFER, cards(*versions))
    assert texts(found) == expected
    assert found[1].confidence is Confidence.UNDECIDED
    assert found[1].note == f"torch: {expected[1]}, {expected[2]}"


@pytest.mark.parametrize("versions", [[], ["A"], ["A", "A", "A"], ["A", ""], ["", ""], ["A", "", "A"]])
def test_what_is_alike_or_could_not_be_read_is_no_difference(versions: list[str]) -> None:
    assert compare(VERSIONS_DIFFER, cards(*versions)) == []


def test_cards_without_facts_and_cards_that_are_not_looked_at_take_no_part() -> None:
    blank = card("node03", facts=Facts(host_name="blank", python_version="3"))
    silent = Card(host="node04", pid=1, node_index=None, num_workers=1, num_gpus=0)
    assert compare(VERSIONS_DIFFER, [*cards("A", "A"), blank, silent]) == []


def test_a_cause_that_compares_nothing_finds_nothing() -> None:
    assert compare(Checks(), cards("A", "B")) == []


def test_a_variable_that_one_node_lacks_is_not_set_there() -> None:
    nodes = [card(f"node{i:02}", NCCL_ALGO="Ring") for i in (1, 2, 3)]
    (found,) = compare(VERSIONS_DIFFER, [*nodes, card("node04")])
    assert texts(found)[:3] == (("node04",), "3 of 4 nodes have Ring", "node04 does not set it")
    assert found[1].evidence == ("node[01-03]: Ring", "node04: not set")


def test_a_variable_that_only_one_node_has_is_odd_there_and_as_bad_as_the_cause_says() -> None:
    (found,) = compare(VERSIONS_DIFFER, [card("node01"), card("node02", NCCL_DEBUG="INFO"), card("node03")])
    assert texts(found)[:3] == (("node02",), "2 of 3 nodes do not set it", "node02 has INFO")
    assert found[1].status is Status.WARN


def test_every_difference_is_an_outcome_of_its_own() -> None:
    nodes = [card("node01"), card("node02"), card("node03", "2.4.0", NCCL_ALGO="Tree")]
    assert [outcome.values["what"] for _, outcome in compare(VERSIONS_DIFFER, nodes)] == ["torch", "NCCL_ALGO"]


def test_a_long_value_is_cut_to_where_it_differs() -> None:
    path = "/opt/software/modules/2024a/compilers/gcc-13.2/lib64:/opt/software/modules/2024a/cuda"
    odd = path + "-12.1/lib64:/home/alice/lib"
    nodes = [card(f"node{i:02}", LD_LIBRARY_PATH=odd if i == 2 else path + "-13.0/lib64") for i in (1, 2, 3)]
    ((_, outcome),) = compare(VERSIONS_DIFFER, nodes)
    assert outcome.values["usual"] == "2 of 3 nodes have ...2024a/cuda-13.0/lib64"
    assert outcome.values["odd"] == "node02 has ...2024a/cuda-12.1/lib64:/home/alice/lib"


def test_a_long_value_that_others_lack_is_cut_at_its_end() -> None:
    ((_, outcome),) = compare(VERSIONS_DIFFER, [card("a"), card("b"), card("c", NCCL_TOPO_FILE="/x" * 100)])
    assert outcome.values["odd"] == "c has " + "/x" * 28 + "/..."


def test_a_value_that_is_no_line_of_text_is_escaped() -> None:
    nodes = [card("a", NCCL_X="1"), card("b", NCCL_X="1"), card("c", NCCL_X="1\n\x1b[2J"), card("d", NCCL_X="")]
    nodes.append(card("e", NCCL_X="1"))
    ((_, outcome),) = compare(VERSIONS_DIFFER, nodes)
    assert outcome.values["odd"] == "c has 1\\n\\x1b[2J, d has nothing in it"


def test_many_odd_values_are_cut() -> None:
    versions = ["A"] * 20 + [f"v{i}" for i in range(10)]
    ((hosts, outcome),) = compare(VERSIONS_DIFFER, cards(*versions))
    assert len(hosts) == 10
    assert outcome.values["odd"] == "node21 has v0, node22 has v1, node23 has v2, node24 has v3, and 6 more values"
    assert outcome.evidence[0] == "node[01-20]: A"
    assert outcome.evidence[-2:] == ("node24: v3", "and 6 more values")


def test_majority_names_the_value_who_has_it_and_who_has_not() -> None:
    assert majority({"a": 1, "b": 2, "c": 1, "d": 1}) == Majority(1, ("a", "c", "d"), {2: ("b",)})
    assert majority({"a": 1}) == Majority(1, ("a",), {})
    assert majority({"a": 1, "b": 2}) is None
    assert majority({"a": 1, "b": 1, "c": 2, "d": 3}) is None
    assert majority({}) is None
