"""Does the table of mutations still fit the source? `make mutations` runs it; this only holds it against the files."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from mutations.table import ROOT, Mutation, read_table


@cache
def functions_of(path: Path) -> set[str]:
    return {each.name for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)}


def problems_of(mutation: Mutation) -> list[str]:
    """What no longer fits, one line each."""
    path = ROOT / "src/allranks" / mutation.file
    if not path.is_file():
        return [f"{mutation.name}: {mutation.file} is not there"]
    try:
        mutated = mutation.apply(path.read_text())
        ast.parse(mutated if path.suffix == ".py" else "")
    except (ValueError, SyntaxError) as exc:
        return [f"{mutation.name}: {exc}"]
    problems = [] if mutation.before != mutation.after and mutation.tests else [f"{mutation.name}: tests nothing"]
    for test in mutation.tests:
        file, _, function = test.partition("::")
        if not (ROOT / file).is_file() or (function and function not in functions_of(ROOT / file)):
            problems.append(f"{mutation.name}: {test} is not there")
    return problems


def test_the_mutated_lines_and_the_tests_that_guard_them_are_there() -> None:
    """Where a rule has moved, its entry moves along: `before` is the line as it stands now."""
    assert [problem for mutation in read_table() for problem in problems_of(mutation)] == []


def test_a_line_that_is_not_there_is_a_problem() -> None:
    made = Mutation(name="x", rule="", file="model/errors.py", before="no such line", after="", tests=("tests/x.py",))
    assert problems_of(made) == ["x: expected 'no such line' 1 times in model/errors.py, found 0"]
    found = Mutation(name="x", rule="", file="model/errors.py", before="OK = 0", after="OK = 1", tests=("tests/x.py",))
    assert problems_of(found) == ["x: tests/x.py is not there"]


def test_the_table_has_the_ten_that_were_missed_and_one_for_each_important_rule() -> None:
    table = read_table()
    assert len({each.name for each in table}) == len(table)
    assert sum(each.was_missed for each in table) == 10
    assert sum(not each.was_missed for each in table) >= 40
