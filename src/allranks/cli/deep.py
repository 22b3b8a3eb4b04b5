"""`allranks check --deep`: after a check that found nothing, real collectives between pairs of its nodes."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from allranks.model.finding import Severity
from allranks.report.text import say

if TYPE_CHECKING:
    from allranks.launch.check.deep import Deep
    from allranks.launch.check.member import Held
    from allranks.launch.check.outcome import Outcome
    from allranks.launch.check.where import Place
    from allranks.model.cluster import Cluster


def look_deeper(
    place: Place | None,
    cluster: Cluster,
    held: Held,
    outcome: Outcome,
    *,
    wanted: Collection[type[Any]],
    queue_s: float,
) -> tuple[Outcome, Deep | None]:
    """Return the outcome with what the collectives came to; as it is where the check found something already.

    Args:
        place: where the check was; None: on this machine alone.
        cluster: for the port that the nodes meet at, where no roll call was held.
        held: what the check saw.
        outcome: what it came to.
        wanted: causes to look for.
        queue_s: how long SLURM may take to give the nodes again.
    Raises:
        AllranksError: SLURM does not start a second step.
    """
    from allranks.launch.agent import SignalInbox
    from allranks.launch.check.collective import Told, run_pairs
    from allranks.launch.check.deep import judge_told, plan_pairs
    from allranks.launch.check.outcome import add_more

    if any(finding.severity is Severity.FAIL for finding in outcome.findings):
        say("--deep: no collective was tried, since the check found what would stop a job")
        return outcome, None
    order, skipped = plan_pairs(held, port=cluster.network.port)
    told = Told()
    if place is None or held.num_nodes == 1:
        say("--deep: one node alone has nobody to be paired with")
    elif order is None:
        say("--deep: fewer than two nodes can take part")
    else:
        nodes = tuple(order.ends)
        again = replace(place, num_nodes=len(nodes), names=nodes, pinned=nodes)
        told = run_pairs(again, order, queue_s=queue_s, env=os.environ, say=say, check_signals=SignalInbox().check)
    deep = judge_told(order, told, skipped=skipped, wanted=wanted)
    return add_more(outcome, deep.results, deep.findings), deep
