"""Is this checkpoint of the same experiment, and what has changed since? The default directory may hold another's.

In the default directory a checkpoint of another script, or with parameters of other names or shapes, is rejected. In a
directory that somebody named, whatever fits is taken. All other changes are printed, and the training goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from allranks.report.mask import mask_command


def describe() -> dict[str, Any]:
    """Return the script of this process, a checksum of its text, its arguments without secrets, and torch's version."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0]).resolve()
    text = hashlib.blake2b(script.read_bytes(), digest_size=16).hexdigest() if script.is_file() else ""
    arguments = shlex.join(mask_command(sys.argv[1:], os.environ))
    return {"script": str(script), "text": text, "arguments": arguments, "torch": str(torch.__version__)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Who named the directory of the checkpoints, and how another one is named."""

    is_default: bool = False
    """Nobody did, so it may hold another experiment's."""
    is_below_agent: bool = True
    """`allranks run` started this process, else the user's own command did."""

    def how(self, directory: object) -> str:
        """Return what to do at the next start to name this directory."""
        return f"{'pass --checkpoint-dir ' if self.is_below_agent else 'set ALLRANKS_CHECKPOINT_DIR='}{directory}"


def compare(
    directory: Path, before: Mapping[str, Any], now: Mapping[str, Any], *, named: Named, is_partial: bool
) -> tuple[str, list[str]]:
    """Return why this training cannot go on from a checkpoint, "" if it can, and what to print if it does.

    Args:
        before: what it holds: `describe()` of the experiment, and the state of each part.
        now: the state of each part in this process.
        named: how the user named the directory.
        is_partial: it may lack parts and hold others.
    """
    then, here = dict(before["experiment"]), describe()
    with contextlib.suppress(ValueError):  # of a version that kept secrets
        then["arguments"] = shlex.join(mask_command(shlex.split(then["arguments"])))
    changed = {name: f"{name}: {then[name] or 'none'} -> {here[name] or 'none'}" for name in here}
    changed["text"] = f"{Path(here['script']).name} was edited"
    changed = {name: said for name, said in changed.items() if then[name] != here[name]}
    new, gone = (", ".join(sorted(names)) for names in (now.keys() - before["parts"], before["parts"].keys() - now))
    others = [] if is_partial else [f"lacks {new}"] * bool(new) + [f"also holds {gone}"] * bool(gone)
    is_foreign = named.is_default and "script" in changed
    if others and not is_foreign:
        said = " and ".join(others)
        return f"{directory} {said}; track the same parts, or take those that are there with partial=True", []
    differs = [said for name, said in changed.items() if name == "script"] + others + _misfits(before["parts"], now)
    if differs and named.is_default:
        more = f"; {len(differs) - 3} more differences" * (len(differs) > 3)
        advice = f"to begin anew, {named.how('NEW_DIRECTORY')}; to go on from it, {named.how(directory.parent)}"
        return f"{directory} is another experiment's ({'; '.join(differs[:3])}{more}); {advice}", []
    lines = [f"changed since that checkpoint: {', '.join(changed.values())}"] * bool(changed)
    lines += [f"begins anew, since the checkpoint lacks it: {new}"] * bool(new)
    return "", lines + [f"in the checkpoint, but not tracked: {gone}"] * bool(gone)


def _misfits(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return which tensors have other names or shapes, of parts that hold tensors by name: modules do."""
    found = []
    for part in sorted(before.keys() & now.keys()):
        old, new = _shapes(before[part]), _shapes(now[part])
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                shapes = (f"of shape {own[key]}" if key in own else "missing" for own in (old, new))
                found.append("{}.{} is {} there, {} here".format(part, key, *shapes))
    return found


def _shapes(state: Any) -> dict[str, tuple[int, ...]]:
    named = state.items() if isinstance(state, Mapping) else ()
    return {key: tuple(own.shape) for key, own in named if isinstance(own, torch.Tensor)}
