"""The traffic of a job as text. Pure.

>>> rate_text(1000), rate_text(499.6), rate_text(25_000)
('1 Gbit/s', '500 Mbit/s', '25 Gbit/s')
"""

from __future__ import annotations

from allranks.model.beat import InterfaceSeen
from allranks.model.traffic import NodeTraffic, Traffic
from allranks.report.text import count_of, one_line


def rate_text(mbit_s: float) -> str:
    """Return a rate with its unit."""
    return f"{mbit_s / 1000:.3g} Gbit/s" if mbit_s >= 999.5 else f"{mbit_s:.3g} Mbit/s"


def use_text(interface: InterfaceSeen) -> str:
    """Return how near an interface comes to its limit while it is busy: `98 % of 1 Gbit/s`; empty if it never is."""
    limit = interface.limit_mbit_s
    if not limit or not interface.busy_share:
        return ""
    percent = min(100.0, 100 * interface.busy_mbit_s / limit)
    of = f"the {rate_text(limit)} that its connections reach" if interface.is_measured else rate_text(limit)
    return f"{percent:.0f} % of {of}"


def describe_traffic(traffic: Traffic, *, at: str = "") -> list[str]:
    """Return the lines of `allranks status`: the job's, and one for each node.

    Args:
        at: when it was so.
    """
    head = []
    if traffic.wait_share is not None and traffic.step_s is not None:
        head.append(f"{100 * traffic.wait_share:.0f} % of the time is spent waiting for communication")
        head.append(f"and a step takes {1e3 * traffic.step_s:.0f} ms (at step {traffic.iteration})")
    elif traffic.nodes:
        head.append("it is not known how long ranks wait")
    lines = [", ".join([*head, *([at] if at else [])])] if head else []
    lines += [_describe_node(node) for node in traffic.nodes]
    if (num_others := traffic.num_nodes - len(traffic.nodes)) > 0 and traffic.nodes:
        lines.append(f"{count_of(num_others, 'node')} with less traffic")
    return lines


def _describe_node(node: NodeTraffic) -> str:
    parts = []
    for interface in node.interfaces:
        rates = f"{rate_text(interface.sent_mbit_s)} out, {rate_text(interface.received_mbit_s)} in"
        use = use_text(interface)
        busy = f", {100 * interface.busy_share:.0f} % of the time at {use}" if use else ""
        parts.append(f"{one_line(interface.name)} {rates}{busy}")
    if node.segments:
        share = f" ({100 * node.retransmits / node.segments:.2g} %)" if node.retransmits else ""
        parts.append(f"{node.retransmits} of {count_of(node.segments, 'segment')} sent again{share}")
    return f"{one_line(node.node)}: {'; '.join(parts)}"
