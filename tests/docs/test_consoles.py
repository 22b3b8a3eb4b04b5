"""Do the commands of README and tutorials print what these pages show?"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from docs.consoles import Typed, find_missing, read_examples, run

ROOT = Path(__file__).parents[2]


def try_examples(text: str, folder: Path) -> None:
    examples = read_examples(text)
    assert any(isinstance(each, Typed) and each.shown for each in examples)
    for example in examples:
        if isinstance(example, Typed):
            output = run(example.command, folder)
            missing = find_missing(example.shown, output)
            assert not missing, f"$ {example.command}\nnot printed: {missing}\nprinted:\n{output}"
        else:
            name, text = example
            (folder / name).write_text(text)


@pytest.mark.torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["first-run", "survive-a-crash"])
def test_a_tutorial_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    try_examples((ROOT / f"docs/tutorials/{name}.md").read_text(), tmp_path)


@pytest.mark.lab
@pytest.mark.torch
@pytest.mark.timeout(900)
def test_the_lab_s_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    name = f"test-docs-{os.getpid()}"
    page = (ROOT / "docs/tutorials/first-slurm-job.md").read_text()
    own = re.sub(r"allranks lab (\w+)", rf"allranks lab \1 --name {name}", page).replace("lab lab:", f"lab {name}:")
    try:
        try_examples(own, tmp_path)
    finally:
        run(f"allranks lab down --name {name}", tmp_path)


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_the_readme_s_quick_start_prints_what_it_shows(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## Quick start")[2].partition("\n## ")[0]
    try_examples(section, tmp_path)


def test_a_line_that_was_not_printed_is_found() -> None:
    typed = "$ cat a.txt  # read it\nhello\n...\n$ true\ngone\n"
    page = f"Save this as `a.txt`:\n```text\nhello\n```\n```console\n{typed}```\n"
    saved, cat, true = read_examples(page)
    assert saved == ("a.txt", "hello\n")
    assert cat == Typed("cat a.txt", ["hello", "..."])
    assert true == Typed("true", ["gone"])
    assert find_missing(["took 1.5 s", "rank 1", "..."], "took 20 s\nrank 2\n") == ["rank 1"]
