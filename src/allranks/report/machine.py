"""JSON output."""

from __future__ import annotations

import json
from collections.abc import Iterable

from allranks.model.setting import Setting


def settings_to_json(settings: Iterable[Setting]) -> str:
    """Return settings as a JSON list of objects with name, value, reason, source."""
    rows = [
        {"name": setting.name, "value": setting.value, "reason": setting.reason, "source": setting.source}
        for setting in settings
    ]
    return json.dumps(rows, indent=2)
