"""Which figures of benchmarks/slow_network.py belong to a complete set, and what is left to measure?

A set has all rounds with one number of nodes and one rate. Each round is kept in a file of its own kind as soon as it
has been measured, so a benchmark that is interrupted goes on there, if it is started again with the same options and
the same code. Only a complete set takes the place of an older one in docs/evidence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Network = tuple[int, int]
"""Number of nodes, and Mbit/s of a link."""


class Sets:
    """What has been measured, by nodes, rate and round."""

    def __init__(self, path: Path | None, key: str, num_rounds: int) -> None:
        """Take what an interrupted benchmark left.

        Args:
            path: of the file; None: nothing is kept.
            key: what must be equal for its figures to go on: options, code.
        """
        self._path, self._key, self._num_rounds = path, key, num_rounds
        found = json.loads(path.read_text()) if path is not None and path.exists() else {}
        if found.get("key") != key:
            found = {}
        self.records: list[Record] = found.get("records", [])
        self.tables: dict[Network, Any] = {
            (entry["nodes"], entry["rate"]): entry["table"] for entry in found.get("tables", [])
        }
        """What `allranks bench` measured."""

    def has(self, nodes: int, rate: int, number: int) -> bool:
        """Return whether a round needs no more measuring."""
        return any(
            (record["nodes"], record["rate"], record["round"]) == (nodes, rate, number) for record in self.records
        )

    def add(self, fresh: Sequence[Record]) -> None:
        """Keep one round."""
        self.records += fresh
        self._keep()

    def complete(self, nodes: int, rate: int) -> list[Record]:
        """Return the records of a set; none while a round is missing."""
        own = [record for record in self.records if (record["nodes"], record["rate"]) == (nodes, rate)]
        return own if {record["round"] for record in own} >= {*range(self._num_rounds)} else []

    def finish(self) -> None:
        """Forget what was kept: nothing is left to measure."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _keep(self) -> None:
        if self._path is not None:
            tables = [*list_tables(self.tables)]
            write_whole(self._path, json.dumps({"key": self._key, "records": self.records, "tables": tables}))


def list_tables(tables: dict[Network, Any]) -> Iterator[Record]:
    """Return the tables as docs/evidence has them."""
    for (nodes, rate), table in tables.items():
        yield {"nodes": nodes, "rate": rate, "table": table}


def replace_set(path: Path, fresh: Sequence[Record], *names: str) -> None:
    """Put records into a file, in place of those that are equal to one of them in these fields."""
    measured = {tuple(record[name] for name in names) for record in fresh}
    known = json.loads(path.read_text()) if path.exists() else []
    kept = [record for record in known if tuple(record[name] for name in names) not in measured]
    write_whole(path, "[\n" + ",\n".join(map(json.dumps, [*kept, *fresh])) + "\n]\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
