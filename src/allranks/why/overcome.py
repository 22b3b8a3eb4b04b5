"""Errors that do no harm:

retries at the start before a training that works, and a store that ends with the job. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from allranks.why.logs.events import Event, Logs

STARTING = frozenset((
    "master-unreachable", "master-dns", "rendezvous-timeout", "missing-rank", "port-in-use", "firewall-port",
    "ip-family-mismatch", "loopback-hostname", "nic-not-found", "spawn-inside-srun",
))  # fmt: skip
"""Causes without which no rank reaches its first step."""
AT_THE_END = frozenset(("store-lost", "peer-connection-lost", "master-unreachable"))
"""Lines that torchrun's agents also print when they are done and the first agent, with the store, has ended already."""
_TRAINS = re.compile(r"(?i)\bloss\b['\":=\s]{1,4}-?\d")


def tell_overcome(logs: Logs) -> Callable[[Event], bool]:
    """Return a function that tells whether a line is such an error."""
    steps: dict[str, int] = {}
    if any(event.cause is not None and event.cause.name in STARTING for event in logs.events):
        for tail in logs.tails:
            for line in tail.lines:
                if _TRAINS.search(line.text):
                    steps[tail.source.shown] = line.number
    done = {event.line.source.shown for event in logs.of("AR599") if "exit barrier" in event.line.text}

    def is_overcome(event: Event) -> bool:
        if event.cause is None:
            return False
        source = event.line.source.shown
        if event.cause.name in AT_THE_END and source in done:
            return True
        return event.cause.name in STARTING and event.line.number < steps.get(source, 0)

    return is_overcome
