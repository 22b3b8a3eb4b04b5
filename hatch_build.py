"""Writes the text files of all causes into one file of the wheel: a job's agents open it instead of a hundred."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BookHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs when a wheel is built; an editable install reads the text files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add `allranks/causes/book.json`."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from allranks.causes.book import read_book

        book = Path(self.directory) / "book.json"
        book.parent.mkdir(parents=True, exist_ok=True)
        book.write_bytes(read_book().to_json())
        build_data["force_include"][str(book)] = "allranks/causes/book.json"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Leave nothing beside the wheel."""
        (Path(self.directory) / "book.json").unlink(missing_ok=True)
