"""Which code would this node run: the script that the job starts, and the modules beside it, as hashes.

Nodes without a shared file system have a copy each, and a copy may be old. Modules elsewhere on the path are not looked
at. May lie on a network file system that hangs: host.node calls this from a thread.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from allranks.host.software import cut
from allranks.model.card import MAX_CODE_FILES, Code

MAX_CODE_BYTES = 4 << 20
"""Of all files together; of a larger script its beginning counts."""
_DIGITS = 16


def find_main_script() -> Path | None:
    """Return the file that this Python was started with; None for `python -c` and a terminal."""
    name = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(name) if name else None


def read_code(script: Path) -> Code:
    """Hash a script and the other .py files of its directory, in the order of their names, within bounds.

    Args:
        script: relative to this directory, or absolute.
    Raises:
        OSError: the script cannot be read; the files beside it may be unreadable.
    """
    content = _read(script, MAX_CODE_BYTES)
    return Code(
        script=cut(str(script)), digest=_hash(content), beside=_hash_beside(script, MAX_CODE_BYTES - len(content))
    )


def _hash_beside(script: Path, left_bytes: int) -> dict[str, str | None] | None:
    try:
        paths = sorted(path for path in script.parent.iterdir() if path.suffix == ".py" and path.name != script.name)
    except OSError:
        return None
    found: dict[str, str | None] = {}
    for path in paths:
        if len(found) == MAX_CODE_FILES:
            break
        try:
            if not path.is_file():  # a pipe would block
                continue
            content = _read(path, left_bytes + 1)
        except OSError:
            found[cut(path.name)] = None
            continue
        is_within = len(content) <= left_bytes
        found[cut(path.name)] = _hash(content) if is_within else None
        left_bytes -= len(content) if is_within else 0
    return found


def _read(path: Path, most_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most_bytes)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
