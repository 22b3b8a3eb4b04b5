"""`allranks check --deep`: after a check without findings, run real collectives between pairs of its nodes."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from allranks.model.finding import Severity
from allranks.report.text import say

if TYPE_CHECKING:
    from allranks.causes.cause import Cause
    from allranks.launch.check.check_outcome import CheckOutcome
    from allranks.launch.check.check_step import Held
    from allranks.launch.check.where import SrunNodes


def look_deeper(
    place: SrunNodes | None,
    held: Held,
    outcome: CheckOutcome,
    *,
    wanted: Collection[Cause],
    queue_s: float,
) -> CheckOutcome:
    """Return the outcome with the results of the collectives; unchanged if the check found a problem already.

    Args:
        place: the nodes of the check; None: this machine alone.
        held: the measurements of the check.
        outcome: the results of the check.
        wanted: causes to look for.
        queue_s: how long SLURM may take to allocate the nodes again.
    Raises:
        AllranksError: SLURM does not start a second step.
    """
    from allranks.launch.check.deep import judge_reports, plan_pairs
    from allranks.launch.check.pair_collectives import Report, run_pairs

    if any(finding.severity is Severity.FAIL for finding in outcome.findings):
        say("--deep: no collectives were run, because the check found a problem that would stop a job")
        return outcome
    order, skipped = plan_pairs(held)
    reports = list[Report]()
    if place is None or held.num_nodes == 1:
        say("--deep: no collectives were run, because they need at least two nodes")
    elif not order.ends:
        say("--deep: no collectives were run, because fewer than two nodes can take part")
    else:
        again = replace(place, num_nodes=len(order.ends), pinned=tuple(order.ends))
        reports = run_pairs(again, order, queue_s=queue_s, env=os.environ)
    return judge_reports(outcome, order, reports, skipped=skipped, wanted=wanted)
