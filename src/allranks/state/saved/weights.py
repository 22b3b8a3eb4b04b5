"""Reads the weights of a checkpoint in a program that has no process group.

    model.load_state_dict(allranks.load_weights("runs/17/checkpoints"))

`allranks export` writes the same to one file.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from allranks.model.errors import UsageError
from allranks.report.text import say
from allranks.state.saved.checkpoint import CheckpointError
from allranks.state.saved.manifest import MANIFEST, Damaged
from allranks.state.saved.pack import CODES, name_of
from allranks.state.saved.parts import list_checkpoints
from allranks.state.saved.reader import CheckpointReader

_COMPILED = "_orig_mod."


def load_weights(checkpoint: Path | str, *, part: str = "model") -> dict[str, Any]:
    """Return the state of one tracked part, whole and on the CPU, by the names that the module itself has.

    Args:
        checkpoint: `step_300`, or a directory of checkpoints: then the newest whole one is taken.
        part: the name that it has in `track(model=...)`.
    Raises:
        UsageError: there is no checkpoint, or no such part in it.
        CheckpointError: the checkpoint is damaged, or all of them are.
    """
    root = Path(checkpoint)
    found = [root] if (root / MANIFEST).exists() else list_checkpoints(root)
    if not found:
        raise UsageError(f"{root} is no checkpoint, and has none in it")
    why = ""
    for directory in found:
        if why:
            say(f"checkpoint {why}; trying {directory.name}")
        try:
            return _read(directory, part)
        except (Damaged, OSError) as exc:
            why = f"{directory} is passed over: {exc}"
    raise CheckpointError(f"checkpoint {why}; there is no other")


def export(checkpoint: Path, out: Path, *, part: str, as_safetensors: bool) -> int:
    """Write what `load_weights` returns to a file, and return the number of its tensors.

    Args:
        out: replaced if it is there; a link stays one.
        as_safetensors: else as `torch.save` does.
    Raises:
        UsageError: also if safetensors cannot hold it, or out is no regular file.
        OSError: the file cannot be written.
    """
    if out.exists() and not out.is_file():
        raise UsageError(f"export: {out} is no regular file; name another one")
    out = Path(os.path.realpath(out))
    state = load_weights(checkpoint, part=part)
    for name, value in state.items() if as_safetensors else ():
        if not isinstance(value, torch.Tensor) or name_of(value.dtype) not in CODES:
            what = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise UsageError(f"{part}[{name!r}] is a {what}, which safetensors cannot hold: use --torch")
    draft = out.with_name(f".{out.name}.{secrets.token_hex(8)}")  # in a shared directory, nobody can guess it
    draft.touch(exist_ok=False)  # both libraries have errors of their own for what the file system refuses
    try:
        if as_safetensors:
            from safetensors.torch import save_file

            # It refuses tensors in the same memory, and who loads the file expects every name.
            save_file({name: value.clone() for name, value in state.items()}, draft, {"format": "pt"})
        else:
            torch.save(state, draft)
        draft.rename(out)
    except Exception:
        with draft.open("ab") as file:  # on a full disk, this has the system's own words
            file.write(bytes(1 << 20))
        raise
    finally:
        draft.unlink(missing_ok=True)
    return sum(isinstance(value, torch.Tensor) for value in state.values())


def _read(directory: Path, part: str) -> dict[str, Any]:
    with CheckpointReader(directory.absolute()) as checkpoint:
        common = checkpoint.part(0).tree["common"]
        parts = common.get("parts", common) if isinstance(common, dict) else {}
        node = parts.get(part)
        if not isinstance(node, dict) and not (isinstance(node, list) and node[0] == "ordered"):
            raise UsageError(f"{directory} has no part {part!r} with weights, but {', '.join(sorted(parts)) or 'none'}")
        path = f"common['parts'][{part!r}]" if parts is not common else f"common[{part!r}]"
        checkpoint.load_sharded(path)
        state: dict[str, Any] = checkpoint.part(0).unpack(node)
    return {str(name).replace(_COMPILED, ""): value for name, value in state.items()}
