"""The contract of the catalogue: what every cause of it promises, and how one is found."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.causes.catalogue import (
    FAMILIES,
    all_causes,
    find_cause,
    known_cause,
    select_causes,
    traits_of,
    ways_to_find,
)
from allranks.causes.cause import SECTIONS, Cause
from allranks.causes.pages import find_differences, main
from allranks.causes.trait import Family
from allranks.model.errors import Exit, UsageError

PAGES = Path(__file__).parents[2] / "docs/reference/causes"
CAUSES = all_causes()
SIGNS = [(cause.id, re.compile(sign.pattern)) for cause in CAUSES for sign in cause.signs if "log" in sign.where]
"""Of lines of logs; compiled once: there are more than `re` keeps."""

BEFORE_A_RUN = {
    "AR001", "AR002", "AR003", "AR004", "AR005", "AR006", "AR007", "AR009", "AR010", "AR011", "AR012",
    "AR101", "AR102", "AR103", "AR104", "AR105", "AR107", "AR108", "AR111",
    "AR201", "AR202", "AR203", "AR204", "AR205", "AR206", "AR207", "AR208", "AR209", "AR210", "AR211", "AR212", "AR213",
    "AR214", "AR215", "AR301", "AR302", "AR303", "AR304", "AR305", "AR306", "AR401", "AR402", "AR404", "AR405", "AR406",
    "AR407", "AR490", "AR501", "AR502", "AR503", "AR504", "AR505", "AR513", "AR590", "AR599",
}  # fmt: skip
"""Of the design's first ids, those that come to light before a run, or that the launcher names."""

COMPARED = {"what", "usual", "odd"}
"""Fields that `preflight.compare` fills."""
JUDGED = {"node", "interface", "job", "rank", "what", "command"}
"""Fields that are there for every cause; `what` is the sentence of the guard, the judge or the launcher."""


def test_ids_have_their_form_and_names_are_words() -> None:
    assert [cause.id for cause in CAUSES if not re.fullmatch(r"AR[0-9]{3}", cause.id)] == []
    assert [cause.name for cause in CAUSES if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", cause.name)] == []


def test_nothing_is_called_as_something_else_is() -> None:
    called = [name.lower() for cause in CAUSES for name in (cause.id, cause.name, *cause.aliases)]
    assert sorted(called) == sorted(set(called))


def test_causes_are_in_the_order_of_their_ids() -> None:
    assert [cause.id for cause in CAUSES] == sorted(cause.id for cause in CAUSES)


def test_what_can_be_found_before_a_run_is_in_it() -> None:
    assert {cause.id for cause in CAUSES} >= BEFORE_A_RUN


def test_texts_are_complete() -> None:
    assert {cause.id: wrong for cause in CAUSES if (wrong := wrong_texts(cause))} == {}


def wrong_texts(cause: type[Cause]) -> list[str]:
    """What the texts of a cause lack."""
    sections = cause.sections()
    holds = {
        "a section": set(SECTIONS) - ({"Fix"} if cause.is_outcome else set()) <= set(sections) <= set(SECTIONS),
        "the order of sections": list(sections) == [head for head in SECTIONS if head in sections],
        "a text in each section": all(sections.values()),
        "a title that is a sentence": cause.title().endswith("."),
        "ASCII": (inspect.getdoc(cause) or "").isascii(),
        "a message": bool(cause.message),
        "a fix, unless it is an outcome": bool(cause.fix) != cause.is_outcome,
        "an exit code": Exit(cause.exit_code) is not Exit.UNKNOWN,
    }
    return [what for what, is_so in holds.items() if not is_so]


def test_an_outcome_is_found_in_logs_only() -> None:
    outcomes = {cause.name: set(ways_to_find(cause)) for cause in CAUSES if cause.is_outcome}
    assert outcomes == OUTCOMES


OUTCOMES: dict[str, set[str]] = {
    "collective-timeout": {"in logs"},
    "silent-hang": set(),
    "user-code-error": {"in logs"},
    "healthy": {"in logs"},
}


def given_values(module: str) -> set[str]:
    """Names of the values that a module hands to outcomes, by keyword or in a dict."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
        elif isinstance(node, ast.Dict):
            names |= {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return names


def test_messages_ask_for_values_that_somebody_gives() -> None:
    assert {cause.id: missing for cause in CAUSES if (missing := missing_values(cause))} == {}


def missing_values(cause: type[Cause]) -> set[str]:
    """Fields of a cause's texts that neither its own module fills, nor who compares nodes or judges their pairs."""
    asked = {field for _, field, _, _ in string.Formatter().parse(cause.message + cause.fix) if field is not None}
    given = JUDGED | given_values(cause.__module__)
    if cause.alike.__func__ is not Cause.alike.__func__:  # type: ignore[attr-defined]
        given |= COMPARED
    if cause.symptoms:
        given |= given_values("allranks.preflight.links")
    return asked - given


def literal_runs(pattern: str) -> Iterator[int]:
    """Lengths of the runs of characters that every match of a pattern has."""
    parser = getattr(re, "_parser")  # noqa: B009  (no public way to see into a pattern)

    def runs(items: object, length: int = 0) -> Iterator[int]:
        for operator, argument in items:  # type: ignore[attr-defined]
            if str(operator) == "LITERAL":
                length += 1
                continue
            if str(operator) == "SUBPATTERN":
                yield from runs(argument[3])
            yield length
            length = 0
        yield length

    yield from runs(parser.parse(pattern))


def test_signs_compile_and_have_a_literal_that_finds_them_fast() -> None:
    patterns = [pattern.pattern for _, pattern in SIGNS]
    for pattern in patterns:
        re.compile(pattern.encode())
    assert [pattern for pattern in patterns if max(literal_runs(pattern)) < 6] == []


def fired_by(line: str) -> set[str]:
    return {identity for identity, pattern in SIGNS if pattern.search(line)}


def test_hits_fire_their_cause_and_nothing_else_but_what_they_may_mean_too() -> None:
    hits = [(cause, hit, fired_by(hit)) for cause in CAUSES for hit in cause.hits]
    lines = [(cause, hit) for cause, hit, fired in hits if cause.id not in fired]
    ends = [(cause, sign) for cause in CAUSES for sign in cause.signs if "log" not in sign.where]
    assert [
        hit for cause, hit in lines if not any(re.search(sign.pattern, hit) for of, sign in ends if of is cause)
    ] == []
    assert [(cause.id, hit, fired) for cause, hit, fired in hits if fired - {cause.id, *cause.also}] == []


def test_misses_do_not_fire() -> None:
    assert [(cause.id, miss) for cause in CAUSES for miss in cause.misses if cause.id in fired_by(miss)] == []


def test_each_sign_has_a_hit_and_a_cause_without_signs_has_none() -> None:
    assert [
        (cause.id, sign.pattern)
        for cause in CAUSES
        for sign in cause.signs
        if not any(re.search(sign.pattern, hit) for hit in cause.hits)
    ] == []
    assert [cause.id for cause in CAUSES if cause.hits and not cause.signs] == []


def test_what_lines_may_mean_too_is_another_cause() -> None:
    known = {cause.id for cause in CAUSES}
    assert [cause.id for cause in CAUSES if not set(cause.also) <= known - {cause.id}] == []


@pytest.mark.parametrize("text", ["AR101", "ar101", "fabric-manager", "MN1", "mn1", " AR101 fabric-manager "])
def test_a_cause_is_found_by_whatever_it_is_called(text: str) -> None:
    assert find_cause(text).id == "AR101"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("fabric-manger", 'did you mean "fabric-manager"?'),
        ("AR1011", "expected an id, a name or an alias"),
        ("shm", 'did you mean "shm-too-small"?'),
        ("MN11", 'did you mean "MN1"?'),
        ("xyzzy", "expected an id, a name or an alias"),
    ],
)
def test_what_is_no_cause_is_refused_with_what_comes_close(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_cause(text)
    assert f'no cause "{text}": ' in str(caught.value)
    assert hint in str(caught.value)


def test_a_cause_of_a_later_version_is_not_known_and_has_no_traits() -> None:
    assert known_cause("AR999 of-a-later-version") is None
    assert traits_of("AR999 of-a-later-version") == frozenset()
    assert traits_of("AR508 cancelled") == find_cause("AR508").traits


def test_each_cause_is_of_a_family() -> None:
    assert {cause.family() for cause in CAUSES} == set(FAMILIES) == set(Family)
    assert find_cause("mtu-blackhole").family() is Family.NETWORK


def test_causes_are_selected_by_beginning_and_left_out_by_name() -> None:
    selected = {cause.id for cause in select_causes(["AR00", "fabric-manager"], ["clock-skew", "AR002"])}
    assert {"AR001", "AR003", "AR101"} <= selected
    assert not {"AR002", "AR007", "AR102", "AR010"} & selected


def test_no_selection_means_all() -> None:
    assert select_causes([], []) == CAUSES
    assert {cause.id for cause in CAUSES} - {cause.id for cause in select_causes([], ["AR1"])} == {
        cause.id for cause in CAUSES if cause.id.startswith("AR1")
    }


@pytest.mark.parametrize(("select", "ignore"), [(["AR9"], []), ([], ["AR9"]), (["AR"], []), ([""], [])])
def test_a_selection_that_fits_nothing_is_refused(select: list[str], ignore: list[str]) -> None:
    with pytest.raises(UsageError, match="no cause"):
        select_causes(select, ignore)


def test_the_catalogue_costs_nothing_until_it_is_asked() -> None:
    code = (
        "import allranks.causes.catalogue, sys; print('allranks.causes.cause' in sys.modules, 'msgspec' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.split()[0] == "False"


# Pages


def test_the_pages_are_up_to_date() -> None:
    assert find_differences(PAGES) == {}, "write them anew: python -m allranks.causes.pages docs/reference/causes"


def test_stale_missing_and_surplus_pages_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0
    (tmp_path / "AR101-fabric-manager.md").write_text("old")
    (tmp_path / "AR002-shm-too-small.md").unlink()
    (tmp_path / "AR999-gone.md").write_text("of a cause that is no more")
    capsys.readouterr()
    assert main([str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().err.splitlines()[:3] == [
        f"{tmp_path}/AR002-shm-too-small.md: missing",
        f"{tmp_path}/AR101-fabric-manager.md: stale",
        f"{tmp_path}/AR999-gone.md: surplus",
    ]
    main([str(tmp_path)])
    assert find_differences(tmp_path) == {}


def test_pages_can_be_checked_from_the_shell(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "allranks.causes.pages", str(tmp_path / "none"), "--check"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 1
    assert "README.md: missing" in said.stderr
