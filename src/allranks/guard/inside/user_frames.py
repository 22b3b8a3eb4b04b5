"""Where in the user's own code is a thread? Library frames are passed over.

>>> place_of(sys._getframe())  # doctest: +SKIP
'train.py:12 in step'
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from types import FrameType
from typing import Any

_LIBRARIES = ("/site-packages/", "/dist-packages/")
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


def place_of(frame: FrameType | None) -> str:
    """Return the innermost line of the user's that this frame stands on; empty where there is none."""
    while frame is not None:
        code = frame.f_code
        if not _is_library(code.co_filename):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def place_of_main() -> str:
    """Return where the main thread is; at its end, which threads the interpreter waits for."""
    main = threading.main_thread()
    if main.is_alive():
        return place_of(sys._current_frames().get(main.ident or 0))
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    return f"the end of the script, which waits for thread {', '.join(names)}"[:200] if names else ""


def drop_frame(exc: BaseException) -> None:
    """Take the frame of the caller, which has just caught it, out of a traceback: the user did not write it.

    A bare `raise` then adds no other one (Python 3.11 and later).
    """
    exc.__traceback__ = exc.__traceback__ and exc.__traceback__.tb_next


def hide_from_dynamo(function: Any, *, with_calls: bool = False) -> None:
    """Have torch.compile run this function as it is, where a compiled function calls it between two graphs.

    It would trace what we do there, warn of it, and raise where it meets a process group.

    Args:
        with_calls: and all that it calls.
    """
    with contextlib.suppress(Exception):  # a torch whose inside we do not know
        from torch._C._dynamo import eval_frame

        if skip := getattr(eval_frame, "skip_code", None):  # torch before 2.7
            skip(function.__code__)
            return
        kind, action = eval_frame._FrameExecStrategy, eval_frame._FrameAction
        rest = action.SKIP if with_calls else action.DEFAULT
        eval_frame.set_code_exec_strategy(function.__code__, kind(action.SKIP, rest))


@functools.cache  # a thread's stack is looked at five times a second
def _is_library(file: str) -> bool:
    return file.startswith(("<", _STDLIB, _OWN)) or any(part in file for part in _LIBRARIES)
