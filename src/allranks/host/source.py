"""What stands in these lines of the source files of other processes?

read_source_lines({4711: {("/home/ada/train.py", 12)}})[4711]["/home/ada/train.py", 12]     "loss = model(x)"
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Set
from pathlib import Path

from allranks.files.regular import read_regular
from allranks.host.process import path_of
from allranks.host.threads import start_thread

READ_S = 1.0
"""For all lines: they may lie on the very file system that hangs."""
MAX_BYTES = 1 << 20
"""Of a source file."""
MAX_CHARACTERS = 160
"""Of a line."""


def read_source_lines(
    wanted: Mapping[int, Set[tuple[str, int]]], *, root: Path = Path("/")
) -> Mapping[int, Mapping[tuple[str, int], str]]:
    """Return the texts of lines as they are on disk now, by pid; a file system that hangs costs READ_S and no more.

    Args:
        wanted: by pid: files, as the process sees them, with line numbers.
        root: where /proc is.
    """
    texts: dict[int, dict[tuple[str, int], str]] = {}
    files: dict[Path, list[str]] = {}

    def read_all() -> None:
        for pid, places in wanted.items():
            for file, line in places:
                path = path_of(pid, file, root=root)
                if path not in files:
                    with contextlib.suppress(OSError):
                        source = read_regular(path, at_most=MAX_BYTES, follows_links=True)
                        files[path] = source.decode(errors="replace").splitlines()
                if 0 < line <= len(lines := files.setdefault(path, [])):
                    texts.setdefault(pid, {})[file, line] = lines[line - 1].strip()[:MAX_CHARACTERS]

    reader = start_thread(read_all, name="allranks-source")
    if reader is not None:
        reader.join(READ_S)
    return {} if reader is None or reader.is_alive() else texts
