"""How does an order reach the members of a step? As the value of an environment variable."""

from __future__ import annotations

import base64
import zlib
from typing import TypeVar

import msgspec

from allranks.model.errors import UsageError

AnyOrder = TypeVar("AnyOrder", bound=msgspec.Struct)


def to_variable(order: msgspec.Struct) -> str:
    """Return an order as the value of an environment variable."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(order))).decode()


def from_variable(text: str, kind: type[AnyOrder], *, name: str) -> AnyOrder:
    """Read what `to_variable` wrote.

    Args:
        text: the variable's value.
        kind: what it must be.
        name: of the variable.
    Raises:
        UsageError: it is something else.
    """
    try:
        return msgspec.json.decode(zlib.decompress(base64.b64decode(text)), type=kind)
    except (ValueError, zlib.error) as exc:
        raise UsageError(f"{name} is not from this version of allranks; unset it") from exc
