"""Launch distributed PyTorch training, and find the rank, node or link that breaks it.

with allranks.session() as s: ...      rank, device and process group, in a script of your own
with allranks.saving(): ...            a rank that writes a checkpoint is not ended meanwhile
allranks.load_weights("checkpoints")   weights of the newest checkpoint, without a process group
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allranks.guard.inside.saving import saving as saving
    from allranks.session import Session as Session
    from allranks.session import SessionError as SessionError
    from allranks.session import session as session
    from allranks.state.saved.weights import load_weights as load_weights

__version__ = "0.1.0"

__all__ = ["Session", "SessionError", "__version__", "load_weights", "saving", "session"]
_PLACES = {"load_weights": "allranks.state.saved.weights", "saving": "allranks.guard.inside.saving"} | dict.fromkeys(
    ("Session", "SessionError", "session"), "allranks.session"
)


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the agent starts on every node from a network file system.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value  # the import has put the module session there
    return value
