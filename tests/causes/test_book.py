"""The book of causes: what every text promises, how a wrong one is refused, and how a cause is found."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import string
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from allranks.causes import probes
from allranks.causes.book import (
    FAMILIES,
    TEXT,
    Book,
    BookError,
    all_causes,
    find_cause,
    known_cause,
    read_book,
    read_cause,
    select_causes,
    traits_of,
)
from allranks.causes.cause import SECTIONS, Cause, Family
from allranks.causes.pages import make_pages, write_site
from allranks.causes.probes import checks_of, ways_to_find
from allranks.guard import waits
from allranks.guard.faults import STUCK_RANK
from allranks.model.errors import Exit, UsageError
from allranks.model.fix import ANYBODY, Fix
from allranks.preflight import links

CAUSES = all_causes()


@functools.cache
def signs() -> list[tuple[str, re.Pattern[str]]]:
    """Ids and patterns of lines of logs; compiled once: there are more than `re` keeps."""
    return [(cause.id, re.compile(sign.pattern)) for cause in CAUSES for sign in cause.signs if "log" in sign.where]


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
    assert [cause.id for cause in CAUSES if not re.fullmatch(r"AR[0-6][0-9]{2}", cause.id)] == []
    assert [cause.name for cause in CAUSES if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", cause.name)] == []


def test_nothing_is_called_as_something_else_is() -> None:
    called = Counter(name.lower() for cause in CAUSES for name in (cause.id, cause.name, *cause.aliases))
    assert [name for name, times in called.items() if times > 1] == []


def test_causes_are_in_the_order_of_their_ids_and_every_file_is_read() -> None:
    assert [cause.id for cause in CAUSES] == sorted(cause.id for cause in CAUSES)
    files = {path.name for path in TEXT.iterdir()} - {"README.md", "patterns.toml", "marks.toml"}
    assert files - {f"{cause.id}-{cause.name}.md" for cause in CAUSES} == set()


def test_what_can_be_found_before_a_run_is_in_it() -> None:
    assert {cause.id for cause in CAUSES} >= BEFORE_A_RUN


def test_texts_are_complete() -> None:
    assert {cause.id: wrong for cause in CAUSES if (wrong := wrong_texts(cause))} == {}


def wrong_texts(cause: Cause) -> list[str]:
    """What the texts of a cause lack."""
    text = (TEXT / f"{cause.id}-{cause.name}.md").read_bytes().decode()
    needed = [head for head in SECTIONS if head != "Fix" or not cause.is_outcome or "Fix" in cause.sections]
    sections = [*needed, *(["Lines"] if cause.signs else [])]
    seen = re.findall(r"^## (.+)$", text, re.MULTILINE)
    holds = {
        f"{', '.join(sections)}, each once, in this order": seen == sections,
        "a section right below the head": f"\n```\n\n## {SECTIONS[0]}\n" in text,
        "a text in each section": all(cause.sections.values()),
        "a title that is a sentence": cause.title.endswith("."),
        "line ends without a carriage return": "\r" not in text,
        "a message": bool(cause.message),
        "a message, told and fix of one line": "\n" not in cause.message + cause.told + texts_of(cause.fix),
        "a fix, unless it is an outcome": bool(cause.fix.template(ANYBODY)) != cause.is_outcome,
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


def given_values(module: object) -> set[str]:
    """Names of the values that a module hands to outcomes, by keyword or in a dict."""
    tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
        elif isinstance(node, ast.Dict):
            names |= {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return names


def test_messages_ask_for_values_that_somebody_gives() -> None:
    assert {cause.id: missing for cause in CAUSES if (missing := missing_values(cause))} == {}


def texts_of(fix: Fix) -> str:
    """All texts of a fix, for whomever they are."""
    return "".join(filter(None, msgspec.structs.astuple(fix)))


def missing_values(cause: Cause) -> set[str]:
    """Fields of a cause's texts that neither its probes, nor every sign, nor who compares or judges nodes fills."""
    asked = fields_of(cause.message) | fields_of(texts_of(cause.fix))
    checks, given = checks_of(cause), set(JUDGED)
    for look in (checks.probe, checks.survey):
        given |= given_values(inspect.getmodule(look)) if look else set()
    if checks.alike:
        given |= COMPARED
    if cause.symptoms:
        given |= given_values(links)
    if cause.id == STUCK_RANK:
        given |= given_values(waits)
    read = [set(re.compile(sign.pattern).groupindex) for sign in cause.signs]
    return asked - given | (fields_of(cause.told) - {"of"} - (set.intersection(*read) if read else set()))


def fields_of(text: str) -> set[str]:
    """Names of the values that a text asks for; a brace without its other half is one, too."""
    try:
        return {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
    except ValueError as exc:
        return {str(exc)}


PARSER = getattr(re, "_parser")  # noqa: B009  (no public way to see into a pattern)
NOT_IN_HYPERSCAN = {"ASSERT", "ASSERT_NOT", "GROUPREF", "GROUPREF_EXISTS", "ATOMIC_GROUP", "POSSESSIVE_REPEAT"}


def operators(parsed: object) -> Iterator[str]:
    """Names of all that a parsed pattern is made of."""
    if isinstance(parsed, PARSER.SubPattern | list | tuple):
        for part in parsed:
            yield from operators(part)
    else:
        yield str(parsed)


def literal_runs(pattern: str) -> Iterator[int]:
    """Lengths of the runs of characters that every match of a pattern has."""

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

    yield from runs(PARSER.parse(pattern))


def wrong_pattern(pattern: str) -> str | None:
    """What is wrong with a pattern: hyperscan does not know all that `re` does, and is fast with a literal only."""
    try:
        re.compile(pattern.encode())
    except re.error as exc:
        return f"{exc}: {pattern}"
    if unknown := NOT_IN_HYPERSCAN & set(operators(PARSER.parse(pattern))):
        return f"hyperscan has no {min(unknown)}: {pattern}"
    return None if max(literal_runs(pattern)) >= 6 else f"no literal of six bytes: {pattern}"


def test_patterns_are_of_a_kind_that_hyperscan_finds_fast() -> None:
    patterns = [(cause.id, sign.pattern) for cause in CAUSES for sign in cause.signs if "log" in sign.where]
    assert [(identity, wrong) for identity, pattern in patterns if (wrong := wrong_pattern(pattern))] == []


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        (r"ended \+ [0-9]{1,9}", None),
        (r"rank ([0-9]", "missing ), unterminated subpattern at position 5: "),
        (r"[a-z]+ended[0-9]", "no literal of six bytes: "),
        (r"ended (?=by)", "hyperscan has no ASSERT: "),
        (r"(?<!not )ended by", "hyperscan has no ASSERT_NOT: "),
        (r"ended (by|with) \1", "hyperscan has no GROUPREF: "),
        (r"ended by [0-9]++", "hyperscan has no POSSESSIVE_REPEAT: "),
    ],
)
def test_what_a_pattern_may_not_be(pattern: str, wrong: str | None) -> None:
    assert wrong_pattern(pattern) == (wrong and wrong + pattern)


def fired_by(line: str) -> set[str]:
    return {identity for identity, pattern in signs() if pattern.search(line)}


def test_hits_fire_their_cause_and_nothing_else_but_what_they_may_mean_too() -> None:
    hits = [(cause, hit, fired_by(hit)) for cause in CAUSES for hit in cause.hits]
    lines = [(cause, hit) for cause, hit, fired in hits if cause.id not in fired]
    ends = [(cause, sign) for cause in CAUSES for sign in cause.signs if "log" not in sign.where]
    assert [
        hit for cause, hit in lines if not any(re.search(sign.pattern, hit) for of, sign in ends if of == cause)
    ] == []
    assert [(cause.id, hit, fired) for cause, hit, fired in hits if fired - {cause.id, *cause.also}] == []


def test_a_hit_stands_at_the_first_sign_that_it_fires() -> None:
    hits = [(cause, sign, hit) for cause in CAUSES for sign in cause.signs for hit in sign.hits]
    firsts = [next((sign for sign in cause.signs if re.search(sign.pattern, hit)), None) for cause, _, hit in hits]
    assert [(cause.id, hit) for (cause, sign, hit), first in zip(hits, firsts, strict=True) if first is not sign] == []


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


def test_a_cause_of_a_later_version_is_not_known_and_has_no_traits() -> None:
    assert known_cause("AR999 of-a-later-version") is None
    assert find_cause("204") is find_cause("AR204")
    assert traits_of("AR999 of-a-later-version") == frozenset()
    assert traits_of("AR508 cancelled") == find_cause("AR508").traits


def test_each_cause_is_of_a_family() -> None:
    assert {cause.family for cause in CAUSES} == set(FAMILIES) == set(Family)
    assert find_cause("mtu-blackhole").family is Family.NETWORK


def test_every_table_of_probes_is_of_causes() -> None:
    files = (probes.node, probes.gpu, probes.net, probes.nics, probes.rdma, probes.job)
    assert {identity for file in files for identity in file.CHECKS} <= {cause.id for cause in CAUSES}
    assert sum(len(file.CHECKS) for file in files) == len(probes.CHECKS)
    assert [file.__name__ for file in files if list(file.CHECKS) != sorted(file.CHECKS)] == []


# A text that is wrong

GOOD = """# Nodes are too blue.

```toml
id = "AR999"
message = "{what}"
exit = "setup"
traits = []
```

## What it means

They are blue.

## Lines

```toml
[[sign]]
match = '(?&color) node (?P<node>[a-z0-9]+)'
source = "colors 1.0, nodes.c"
said = "kernel"
hits = ['a blue node node07']
```
"""


def test_a_text_is_read() -> None:
    cause = read_cause(GOOD, Path("AR999-too-blue.md"), {"color": "b(?&rest)", "rest": "lue"})
    assert (cause.label, cause.title, cause.sections) == (
        "AR999 too-blue", "Nodes are too blue.", {"What it means": "They are blue."},
    )  # fmt: skip
    assert [(sign.pattern, sign.said.name) for sign in cause.signs] == [("blue node (?P<node>[a-z0-9]+)", "KERNEL")]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("# Nodes", "Nodes", "AR999-too-blue.md:1: expected `# Title.`"),
        ("```\n\n## What", "\n\n## What", "AR999-too-blue.md:12: Expected '=' after a key"),
        ('message = "{what}"\n', "", "Object missing required field `message`"),
        ('message = "{what}"', 'mesage = "{what}"', ":5: Object contains unknown field `mesage`"),
        ('message = "{what}"', 'message = "{what}', ":5: "),
        ("traits = []\n", "", "Object missing required field `traits`"),
        ("traits = []", 'traits = ["blue"]', ":7: Invalid enum value 'blue'"),
        ('exit = "setup"', 'exit = "soon"', ":6: 'soon': expected ok, user-code, usage, unknown, node-fault, setup"),
        ('exit = "setup"\n', "", ":1: Object missing required field `exit`"),
        ("AR999", "AR998", ":4: id = 'AR998', expected 'AR999' as in the file's name"),
        ("(?&color)", "(?&colour)", ":18: no part `colour` in patterns.toml"),
        (
            'said = "kernel"',
            'said = "kernle"',
            ":20: 'kernle': expected self, kernel, scheduler, launcher, observer, inferred",
        ),
        ('said = "kernel"', 'fact = "end"', ":20: Invalid enum value 'end'"),
        ('id = "AR999"\n', "", ":1: Object missing required field `id`"),
        ('id = "AR999"', 'name = "too-blue"', ":4: Object contains unknown field `name`"),
        ("[[sign]]", "[[sgin]]", ":17: Object contains unknown field `sgin`"),
        ("hits =", "hit =", ":21: Object contains unknown field `hit`"),
        ("hits = ['a blue node node07']", "hits = 'a blue node node07'", ":21: Expected `array`, got `str`"),
        ("match = '", "match = ", ":18: "),
        ("(?&color)", "(?&shade)", ": maximum recursion depth exceeded"),
        ("match = '(?&color) node (?P<node>[a-z0-9]+)'\n", "", ":17: Object missing required field `match`"),
        ("match = '(?&color) node (?P<node>[a-z0-9]+)'", "match = ['blue']", ":18: Expected `str`, got `array`"),
        ("node07']\n```\n", "node07']\n", ":14: `## Lines`: expected an empty line and the signs at the end"),
        ("node07']\n```\n", "node07']\n```", ":14: `## Lines`: expected an empty line and the signs at the end"),
        ("## Lines\n", "## Lines\n\nThey are:\n", ":14: `## Lines`: expected an empty line and the signs at the end"),
    ],
)
def test_a_wrong_text_is_refused_with_file_and_line(before: str, after: str, said: str) -> None:
    assert GOOD.count(before) == 1
    with pytest.raises(BookError) as caught:
        read_cause(GOOD.replace(before, after), Path("AR999-too-blue.md"), {"color": "blue", "shade": "(?&shade)"})
    assert said in str(caught.value)
    assert str(caught.value).startswith("AR999-too-blue.md:")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("patterns.toml", b"[part]\n", "patterns.toml:1: Object contains unknown field `part`"),
        ("patterns.toml", b"[parts]\n\n[xids]\n13 = {}\n", "patterns.toml:3: Object missing required field `what`"),
        ("AR999-too-blue.md", b"# Nodes are too blue.\n\nThey\x92re blue.\n", "AR999-too-blue.md:3: expected ASCII"),
    ],
)
def test_a_wrong_file_ends_a_command_with_one_line(tmp_path: Path, name: str, text: bytes, said: str) -> None:
    (tmp_path / "patterns.toml").write_text("[parts]\n\n[xids]\n")
    (tmp_path / name).write_bytes(text)
    with pytest.raises(UsageError) as caught:
        read_book(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/{said}")


def test_parts_of_patterns_are_used_and_stand_for_themselves() -> None:
    """A part is put in as text, so one with an alternative must stand within parentheses wherever it is used."""
    texts = "".join(path.read_text() for path in sorted(TEXT.iterdir()))
    names = re.findall(r"^([a-z0-9_]+) = '", (TEXT / "patterns.toml").read_text(), re.MULTILINE)
    assert [name for name in names if f"(?&{name})" not in texts] == []
    assert re.findall(r"^.*(?:^match = ['\"]+|[^(|])\(\?&masked\).*$", texts, re.MULTILINE) == []


def test_a_wheel_has_the_same_book_in_one_file() -> None:
    read = read_book()
    again = msgspec.json.decode(read.to_json(), type=Book, strict=False)
    assert [msgspec.structs.asdict(cause) for cause in again.causes] == [
        msgspec.structs.asdict(cause) for cause in read.causes
    ]
    assert again.xids == read.xids


def test_the_book_costs_nothing_until_it_is_asked() -> None:
    code = "import allranks.causes.book, sys; print({'tomllib', 'allranks.causes.probes'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == "set()"


# Pages of the site


def test_the_site_has_a_page_of_each_cause_with_its_lines() -> None:
    pages = make_pages("kernel: NVRM: Xid (PCI:0000:44:00): 79, pid=812")
    assert {f"{cause.id}-{cause.name}.md" for cause in CAUSES} | {"README.md"} == set(pages)
    assert [cause.id for cause in CAUSES if cause.label not in pages["README.md"]] == []
    assert "seen in real logs" in pages["AR105-gpu-hardware.md"]
    assert "seen in real logs" not in pages["AR204-mtu-blackhole.md"]
    assert "it says that a device failed:" in pages["AR105-gpu-hardware.md"]
    assert "it proves nothing alone:" in pages["AR105-gpu-hardware.md"]
    hits = [(cause, hit) for cause in CAUSES for hit in cause.hits if "\n" not in hit]
    assert [hit for cause, hit in hits if f"    {hit}\n" not in pages[f"{cause.id}-{cause.name}.md"]] == []


def test_links_to_texts_lead_to_pages_on_the_site(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "how-to").mkdir(parents=True)
    (docs / "how-to/check.md").write_text("[MTU](../../src/allranks/causes/text/AR204-mtu-blackhole.md), [x](slurm.md)")
    (docs / "index.md").write_text("[all](../src/allranks/causes/text/README.md)")
    for _ in range(2):  # the second time over what the first one left
        write_site(docs, tmp_path / "site", TEXT.parents[3] / "tests/why")
    assert (tmp_path / "site/how-to/check.md").read_text() == (
        "[MTU](../reference/causes/AR204-mtu-blackhole.md), [x](slurm.md)"
    )
    assert (tmp_path / "site/index.md").read_text() == "[all](reference/causes/README.md)"
    assert (tmp_path / "site/reference/causes/AR204-mtu-blackhole.md").is_file()
