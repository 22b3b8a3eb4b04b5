"""JSON output."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from allranks.model.setting import Setting
from allranks.report.mask import mask_setting


def settings_to_json(settings: Iterable[Setting]) -> str:
    """Return settings as a JSON list of objects with name, value, reason, source; secrets are hidden."""
    return json.dumps([asdict(mask_setting(setting)) for setting in settings], indent=2)
