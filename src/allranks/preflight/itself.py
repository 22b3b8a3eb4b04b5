"""Does this node reach its own address, where its ranks meet? Tried before the roll call: torch retries for 11 minutes.

problem = find_problem(plan)      None: its kernel answers
"""

from __future__ import annotations

import os

from allranks.causes.book import find_cause
from allranks.causes.outcome import failed
from allranks.host.net import fail_to_reach_self, find_interface_of
from allranks.host.node import NodeFacts
from allranks.model.errors import NodeFaultError
from allranks.preflight.applicant import NodePlan
from allranks.preflight.datapath import LOOPBACK

WITHIN_S = 2.0


def find_problem(plan: NodePlan) -> NodeFaultError | None:
    """Return why the ranks of this node could not meet; None: they can, or it is not known where they would."""
    is_down = any(nic.kind == "loopback" and not nic.is_up for nic in plan.facts.interfaces)
    address = plan.data_path.address if plan.data_path else LOOPBACK if plan.is_alone or is_down else None
    error = fail_to_reach_self(address, within_s=WITHIN_S) if address else None
    if isinstance(error, TimeoutError) and not plan.is_alone:
        return None  # a filter: the tests with other nodes tell more
    found = explain(address, plan.facts, error) if address and error else None
    is_ignored = found is not None and found.finding is not None and found.finding.cause_id in plan.ignored
    return None if is_ignored else found


def explain(address: str, facts: NodeFacts, error: OSError) -> NodeFaultError:
    """Return the verdict on a machine that cannot connect to its own address.

    Packets to any address of the machine itself go through its loopback interface.
    """
    own = find_interface_of(address, facts.interfaces)
    passed = [nic for nic in facts.interfaces if nic is own or nic.kind == "loopback"]
    down = next((nic.name for nic in passed if not nic.is_up), None)
    seen = os.strerror(error.errno) if error.errno else str(error)
    what = f"{facts.host} cannot connect to its own address {address}: {seen.lower()}"
    if down is not None:
        cause, outcome = "AR210", failed(what=f"{down} is down, and {what}", interface=down)
    else:
        add, look = f"ip addr add {address}/8 dev lo", f"ip route get {address}; nft list ruleset"
        cause, outcome = "AR217", failed(what=what, command=look if own else add)
    finding = outcome.to_finding(find_cause(cause), node=facts.host, reader=facts.reader)
    return NodeFaultError(finding.message, finding=finding)
