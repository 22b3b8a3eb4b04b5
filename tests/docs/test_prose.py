"""Do texts that users read keep the mechanical rules of plain English: words, spelling, length of sentences?

Checked are the README, the documentation, the help of all commands, and what causes say of themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.causes.book import all_causes
from allranks.causes.cause import Cause
from allranks.causes.probes import ways_to_find
from allranks.cli.pages import make_pages
from allranks.model.fix import Reader, SchedulerKind, Vendor

ROOT = Path(__file__).parents[2]
OLD_PHRASES = (
    "passes a cause over", "is held against", "held against the", "hands in a card", "has it not set", "So many, of",
    "For programs.", "came and left again", "cannot fail to fail", "its how many-eth", "two words of an agent",
    "may cost it time or its life", "leave it out (--exclude=that node)", "names the one that is not",
    "before anything was mended", "take the import out of the way", "did not find together", "knows nothing of it",
    "that nobody else wanted", "waits forever for an exit status", "With that nccl", "a node counts 2",
    "What nobody wrote down", "it reads from the variables of whoever",
)  # fmt: skip
AVOID = ("please", "simply", "easily", "obviously", "sorry", "betokens", "whosoever", "for ever", "in order to")
BRITISH = (
    "behaviour", "colour", "favour", "honour", "neighbour", "centre", "initialise", "initialised", "recognise",
    "recognised", "organise", "serialise", "serialised", "whilst", "grey", "analyse", "cancelled by", "licence",
)  # fmt: skip
IDIOMS = (
    "knock", "knocks", "knocked", "hand in", "hands in", "mend", "left to itself", "comes through", "come through",
    "nobody says", "whoever", "goes on", "go on", "gone on", "is none", "looked at", "held against", "told apart",
    "leave it away", "without a word", "does not come to its end", "in vain", "broke off", "made to use", "so many",
)  # fmt: skip
"""What causes said before somebody wrote it in the field's terms."""
WORDS_IN_A_SENTENCE = 40
WORDS_OF_A_CAUSE = 35
WORDS_IN_A_LINE = 25
CHARACTERS_IN_A_TITLE = 80


def paragraphs(markdown: str) -> Iterator[str]:
    """The running text of a page: no code, no tables, no headings, no addresses of links."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if not block.lstrip().startswith(("|", "#", "<", ">")):
            yield " ".join(block.split())


def texts() -> dict[str, str]:
    """Everything checked: where it stands -> its running text."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    written = [page for page in pages if "causes" not in page.parts and page.name != "command-line.md"]
    found = {str(page.relative_to(ROOT)): " ".join(paragraphs(page.read_text())) for page in written}
    found["allranks --help"] = make_pages()["command-line.md"]
    return found | {cause.id: " ".join([*lines_of(cause), *sentences_of(cause)]) for cause in all_causes()}


def lines_of(cause: Cause) -> list[str]:
    """The single lines of a cause: its headlines, its fix, and how it is found."""
    return [cause.title, cause.message, cause.told, *fixes_of(cause), cause.no_fault_yet, *ways_to_find(cause).values()]


def fixes_of(cause: Cause) -> list[str]:
    """The fix of a cause as each reader has it."""
    return [cause.fix.template(Reader(kind, vendor)) for kind in SchedulerKind for vendor in Vendor]


def sentences_of(cause: Cause) -> list[str]:
    """The sentences of a cause's sections, without examples and commands; sources are quoted as they are."""
    found = []
    for head, text in cause.sections.items():
        prose = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
        blocks = [] if head == "Source" else paragraphs(prose)
        found += [sentence for block in blocks for sentence in re.split(r"(?<=[.!?:]) ", block)]
    return found


def breaches(line: str) -> list[str]:
    """The rules for a headline or a fix that a line breaks; its first word may be a name, such as NCCL or `{node}`."""
    rules = {
        "too many words": len(line.split()) <= WORDS_IN_A_LINE,
        "ends with a full stop": not re.search(r"[^.]\.$", line),
        "asks a question": "?" not in line,
        "begins with a capital letter": not re.match(r"[A-Z][a-z]+\b", line),
    }
    return [rule for rule, is_kept in rules.items() if not is_kept]


@pytest.mark.parametrize("words", [OLD_PHRASES, AVOID, BRITISH], ids=["old phrases", "words to avoid", "spelling"])
def test_no_text_uses_words_that_plain_english_avoids(words: tuple[str, ...]) -> None:
    pattern = re.compile(r"\b(" + "|".join(re.escape(word) for word in words) + r")(?!\w)")
    found = [f"{where}: {match[0]}" for where, text in texts().items() for match in pattern.finditer(text)]
    assert found == []


def test_sentences_of_readme_tutorials_how_tos_and_concepts_are_short() -> None:
    folders = ("tutorials", "how-to", "concepts")
    pages = [ROOT / "README.md", *(page for name in folders for page in sorted((ROOT / "docs" / name).glob("*.md")))]
    long = [
        f"{page.name}: {sentence}"
        for page in pages
        for block in paragraphs(page.read_text())
        for sentence in re.split(r"(?<=[.!?]) ", block)
        if len(sentence.split()) > WORDS_IN_A_SENTENCE
    ]
    assert long == []


def test_causes_use_the_terms_of_the_field() -> None:
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, IDIOMS)) + r")(?!\w)")
    said = {cause.id: " ".join([*lines_of(cause), *sentences_of(cause)]) for cause in all_causes()}
    assert [f"{where}: {match[0]}" for where, text in said.items() for match in pattern.finditer(text)] == []


def test_sentences_of_causes_are_short() -> None:
    said = [(cause.id, sentence) for cause in all_causes() for sentence in sentences_of(cause)]
    assert [each for each in said if len(each[1].split()) > WORDS_OF_A_CAUSE] == []


def test_titles_of_causes_are_short() -> None:
    assert [cause.title for cause in all_causes() if len(cause.title) > CHARACTERS_IN_A_TITLE] == []


def test_headlines_and_fixes_are_lines_and_no_questions() -> None:
    lines = {line: cause.id for cause in all_causes() for line in (cause.message, cause.told, *fixes_of(cause))}
    assert {(where, line): broken for line, where in lines.items() if (broken := breaches(line))} == {}


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("on {node}: nvidia-smi -L; dmesg -T | grep -i xid", []),
        ("NCCL's watchdog thread hung, and its monitor ended the process", []),
        ("check the path between them: sbatch --nodelist=...", []),
        ("is it up, and can it reach the leader?", ["asks a question"]),
        ("Look at the log.", ["ends with a full stop", "begins with a capital letter"]),
        ("word " * 26, ["too many words"]),
    ],
)
def test_what_a_headline_may_not_be(line: str, broken: list[str]) -> None:
    assert breaches(line) == broken


def test_code_and_tables_are_not_prose() -> None:
    page = "# Head\n\nRead `please` this.\n\n| a | please |\n\n```\nplease\n```\n\n- one [two](please)\n"
    assert [block for block in paragraphs(page) if block] == ["Read X this.", "- one [two]"]
