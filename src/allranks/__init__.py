"""Launch distributed PyTorch training, and find the rank, node or link that breaks it.

with allranks.session() as s: ...      rank, device and process group, in a script of your own
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allranks.session import Session as Session
    from allranks.session import SessionError as SessionError
    from allranks.session import session as session

__version__ = "0.1.0"

__all__ = ["Session", "SessionError", "__version__", "session"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the agent starts on every node from a network file system.
    if name not in ("Session", "SessionError", "session"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module("allranks.session"), name)
    globals()[name] = value  # the import has put the module session there
    return value
