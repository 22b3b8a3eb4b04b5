"""The solver: cases as prose (cases/*.txt), and what holds for any facts."""

from __future__ import annotations

from pathlib import Path
from random import Random
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from allranks.facts.fact import NEVER_SAID, NOBODY, Fact, FactKind, Place, Said, When, Who
from allranks.facts.solve import solve
from allranks.facts.story import RootPart
from allranks.model.finding import Confidence

from .script import Case, read_cases, tell, tell_chain

CASES = [case for path in sorted((Path(__file__).parent / "cases").glob("*.txt")) for case in read_cases(path)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_the_story_of_these_facts(case: Case):
    story = case.story()
    told = tell(story)
    if any(line.startswith("=> chain: ") for line in case.told):
        told = (*told, tell_chain(story))
    assert "\n".join(told) == "\n".join(case.told)


def test_no_two_cases_have_one_title():
    titles = [case.title for case in CASES]
    assert len(titles) == len(set(titles)) >= 80


RANKS = st.sampled_from((*(Who(rank=rank) for rank in range(4)), Who(rank=0, node="n1"), Who(node="n1"), Who(node="n2"),
                         Who(local_rank=1), Who(local_rank=1, node="n1"), Who(pid=7, node="n2"), NOBODY))  # fmt: skip
TIMES = st.sampled_from((NEVER_SAID, *(When(at, at + wide, clock) for at in (0.0, 10.0, 90.0) for wide in (0.0, 20.0)
                                       for clock in ("utc", "another"))))  # fmt: skip
PLACES = st.sampled_from(((), *((Place(source, line, ""),) for source in ("a", "b") for line in (1, 2, 3))))
FACTS = st.lists(
    st.builds(
        Fact,
        kind=st.sampled_from(FactKind),
        who=RANKS,
        when=TIMES,
        said=st.sampled_from(Said),
        places=PLACES,
        cause=st.sampled_from(("", "x", "y")),
        confidence=st.sampled_from(Confidence),
        peer=RANKS,
        group=st.sampled_from((None, "dp")),
        seq=st.sampled_from((None, 1, 2)),
        code=st.sampled_from((None, 0, 1, -6, -9, -11, -15)),
        is_generic=st.booleans(),
        is_first_observed=st.booleans(),
    ),
    max_size=12,
)


@given(facts=FACTS, random=st.randoms())
@settings(max_examples=60)
def test_the_order_of_the_facts_and_the_names_of_their_files_change_nothing(facts: list[Fact], random: Random):
    def summary(found: list[Fact]) -> list[object]:
        story = solve(found, world=4)
        told = [(root.part, root.confidence, set(root.blamed), len(root.facts), root.fact.kind) for root in story.roots]
        return [story.outcome, story.victims, *sorted(told, key=str)]

    shuffled = facts.copy()
    random.shuffle(shuffled)
    assert solve(shuffled, world=4) == solve(facts, world=4)
    names = {"a": "z", "b": "c"}
    moved = [[replace(place, source=names[place.source]) for place in fact.places] for fact in facts]
    renamed = [replace(fact, places=tuple(places)) for fact, places in zip(facts, moved, strict=True)]
    assert summary(renamed) == summary(facts)


@given(facts=FACTS)
@settings(max_examples=60)
def test_roots_are_no_surer_than_their_lines_and_nothing_is_explained_by_what_came_later(facts: list[Fact]):
    story = solve(facts, world=4)
    surer = list(Confidence)
    explained = {edge.effect for edge in story.edges}
    for root in story.roots:
        assert surer.index(root.confidence) >= surer.index(root.fact.confidence)
        assert root.confidence is Confidence.UNDECIDED or root.fact not in explained or root.part is RootPart.WARNING
    assert not any(edge.effect.when.is_before(edge.cause.when) for edge in story.edges)


def test_twenty_thousand_facts_of_4096_ranks_take_less_than_a_second():
    facts = [
        Fact(
            kind=kind,
            who=Who(rank=rank, node=f"n{rank // 8}", local_rank=rank % 8),
            when=When(rank / 1000, rank / 1000, "utc"),
            peer=Who(rank=(rank + 1) % 4096),
            group="dp",
            seq=7,
            signal=6 if kind is FactKind.ENDED else None,
            places=(Place(f"rank_{rank}.err", 1, ""),),
        )
        for rank in range(4096)
        for kind in (FactKind.STEP, FactKind.WAITED, FactKind.PEER_LOST, FactKind.ENDED, FactKind.STORE_GONE)
    ]
    began_s = process_time()
    story = solve([*facts, Fact(kind=FactKind.RAISED, who=Who(rank=72), cause="cuda-oom")])
    took_s = process_time() - began_s
    assert tell(story) == ("=> culprit: rank 72 [cuda-oom] certain", "=> victims: 0-71,73-4095")
    assert took_s < 3  # 0.4 s on an idle core
