"""The chain in words: true of each process, and each step once."""

from __future__ import annotations

import pytest
from tests.facts.script import parse

from allranks.facts.solve import solve
from allranks.why.chain import tell_chain


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (  # its own exit code is no step, those of its victims have another
            "rank 1 ended with 3\nrank 0 lost somebody\nrank 0 ended with 1",
            "rank 1 ended with exit code 3 -> rank 0 lost a peer -> rank 0 ended with exit code 1",
        ),
        (
            "rank 1 raised line 4 of a.err\nrank 1 ended with 1 says the launcher\nrank 0 lost rank 1",
            "rank 1 failed -> rank 0 lost a peer",
        ),
        (
            "world 3\nranks 0,2 waited in 0#7\nrank 0 ended with 1",
            "rank 1 did not come -> ranks 0,2 waited in vain -> rank 0 ended with exit code 1",
        ),
        (
            "somebody was ended by the scheduler says the launcher\nrank 2 lost somebody",
            "the job was told to end -> rank 2 lost a peer",
        ),
        ("rank 1 raised\nrank 1 ended with 1", ""),
    ],
)
def test_the_chain_says_each_step_once(facts: str, words: str) -> None:
    world = next((int(line[6:]) for line in facts.splitlines() if line.startswith("world ")), None)
    known = [fact for line in facts.splitlines() if not line.startswith("world ") for fact in parse(line)]
    assert tell_chain(solve(known, world=world)) == words
