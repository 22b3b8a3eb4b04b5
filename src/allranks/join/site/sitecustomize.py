"""The way into an unmodified worker: Python imports this at start because its directory is first on PYTHONPATH.

It takes itself off `sys.path`, arms the hook beside it (`ALLRANKS_HOOK=0` leaves it out), and then lets the user's own
`sitecustomize` run as if this one had never been there. Whatever fails here must not fail the worker. A standby
(ALLRANKS_STANDBY) waits here for its orders.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType


def _enter() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    if os.environ.get("ALLRANKS_HOOK") != "0":
        try:
            _load("_allranks_hook", os.path.join(os.path.dirname(here), "hook.py")).arm()
        except Exception as exc:  # a worker without the hook is better than none
            print(f"allranks: the hook could not be loaded in this process: {exc!r}", file=sys.stderr)
    if "ALLRANKS_STANDBY" in os.environ:
        try:
            _load("_allranks_standby", os.path.join(os.path.dirname(here), "standby.py")).stand_by()
            sys.modules["_allranks_hook"].become_worker()
            del sys.modules["_allranks_standby"]
        except BaseException:  # it must not run the script without its orders
            os._exit(70)
    # The next sitecustomize on the path. importlib expects some module of this name to be there afterwards.
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as exc:
        if exc.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


def _load(name: str, path: str) -> ModuleType:
    # By path, not by name: the worker's Python may be another one, without allranks installed.
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_enter()
