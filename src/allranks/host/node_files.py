"""Which hosts do the files list whose paths PBS and LSF put into the environment? A line has one host, a slot each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

MOST_BYTES = 4 << 20
"""100,000 slots; longer files are cut."""


def read_node_files(env: Mapping[str, str], variables: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the hosts of each readable file, in its order, by variable; PBS keeps it on the first node only.

    Args:
        env: the environment.
        variables: that may have the path of such a file.
    """
    found = {}
    for variable in variables:
        try:
            with Path(env[variable]).open("rb") as file:
                text = file.read(MOST_BYTES).decode("utf-8", "replace")
        except (KeyError, OSError, ValueError):  # ValueError: a null byte in the path
            continue
        if hosts := tuple(line.split()[0] for line in text.splitlines() if line.strip()):
            found[variable] = hosts
    return found
