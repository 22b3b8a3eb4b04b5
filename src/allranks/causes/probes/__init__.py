"""How causes are looked for on the nodes: pure functions of the cards that the nodes send, one file a subject.

    checks_of(find_cause("AR002")).probe(card)

Each file ends with the table of its causes. Nothing here is imported before cards are judged.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from allranks.causes.cause import Cause
from allranks.causes.outcome import Checks
from allranks.causes.probes import gpu, job, net, nics, node, rdma

CHECKS: Mapping[str, Checks] = node.CHECKS | gpu.CHECKS | net.CHECKS | nics.CHECKS | rdma.CHECKS | job.CHECKS
"""By the cause's id; a cause without an entry shows between nodes, while the job runs, or in logs only."""


def checks_of(cause: Cause) -> Checks:
    """Return the functions that look for a cause; all of them None if no card shows it."""
    return CHECKS.get(cause.id, Checks())


def ways_to_find(cause: Cause) -> dict[str, str]:
    """Return how a cause is looked for: the way -> when it speaks up, in one line (of its function's docstring)."""
    checks = checks_of(cause)
    looks = {
        "on each node": checks.probe,
        "compared on all nodes": checks.alike,
        "over all nodes together": checks.survey,
    }
    ways = {way: (inspect.getdoc(look) or "").partition("\n")[0] for way, look in looks.items() if look is not None}
    if cause.symptoms:
        ways["between pairs of nodes"] = f"{', or '.join(symptom.words for symptom in cause.symptoms)}."
    if cause.roll_call:
        ways["by the roll call"] = f"{cause.roll_call}."
    if cause.deep:
        ways["by --deep"] = f"{cause.deep}."
    if count := sum("log" in sign.where for sign in cause.signs):
        ways["in logs"] = f"{count} pattern{'s' if count > 1 else ''} of lines."
    return ways
