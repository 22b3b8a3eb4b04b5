"""Trouble at the start that the job got over: retries, warnings about names, and then it trains. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from allranks.why.events import Event, Logs

STARTING = frozenset((
    "master-unreachable", "master-dns", "rendezvous-timeout", "missing-rank", "port-in-use", "firewall-port",
    "ip-family-mismatch", "loopback-hostname", "nic-not-found",
))  # fmt: skip
"""Causes without which no rank comes as far as its first step."""
_TRAINS = re.compile(r"(?i)\bloss\b['\":=\s]{1,4}-?\d")


def tell_overcome(logs: Logs) -> Callable[[Event], bool]:
    """Return whether a line is such trouble: one of the same source tells of a step of training later on."""
    steps: dict[str, int] = {}
    for tail in logs.tails:
        for line in tail.lines():
            if _TRAINS.search(line.text):
                steps[tail.source.shown] = line.number
    return lambda event: (
        event.cause is not None
        and event.cause.name in STARTING
        and event.line.number < steps.get(event.line.source.shown, 0)
    )
