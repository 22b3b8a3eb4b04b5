"""JSON output: ASCII, so that no name in it reaches a terminal as a control sequence, and without secrets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import msgspec

from allranks.model.setting import Setting
from allranks.report.mask import mask_fields, mask_setting


def to_json(document: Any, *, indent: int | None = 2) -> str:
    """Return a document of structs, dataclasses, lists and values as JSON for people and programs.

    Args:
        indent: None: the document is one line.
    """
    return json.dumps(mask_fields(msgspec.json.decode(msgspec.json.encode(document))), indent=indent)


def settings_to_json(settings: Iterable[Setting]) -> str:
    """Return settings as a JSON list of objects with name, value, reason, source; secrets are hidden."""
    return json.dumps([asdict(mask_setting(setting)) for setting in settings], indent=2)
