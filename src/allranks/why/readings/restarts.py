"""Did the workers start from the beginning after a restart? Combines lines of launcher and script. Pure.

Neither line alone proves it: torchrun also restarts workers that resume, and the first start finds no checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.causes.book import find_cause
from allranks.causes.cause import Role
from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import Culprit, People

_RESTART = re.compile(r"will restart worker group|restart_count=[1-9]")


def conclude_restarts(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Conclude that the workers started from the beginning, if a log has both lines in this order."""
    restarts: dict[str, Line] = {}
    for event in logs.of("elastic-no-resume"):
        source = event.line.source.shown
        if _RESTART.search(event.line.text):
            restarts.setdefault(source, event.line)
        elif event.sign is not None and event.sign.role is Role.CONTEXT and source in restarts:
            yield Conclusion(
                cause=find_cause("elastic-no-resume"),
                role=Role.LIKELY,
                confidence=Confidence.LIKELY,
                culprit=Culprit(),
                message="the workers were restarted, but found no checkpoint to resume from",
                evidence=(event.line, restarts[source]),
                ask="which checkpoint the script loads at its start, and from where",
            )
            return
