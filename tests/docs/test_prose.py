"""Do texts that users read keep the mechanical rules of plain English: words, spelling, length of sentences?

Checked are the README, the documentation, the help of all commands, and what causes say of themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.causes.catalogue import all_causes
from allranks.cli.pages import make_pages

ROOT = Path(__file__).parents[2]
OLD_PHRASES = (
    "passes a cause over", "is held against", "held against the", "hands in a card", "has it not set", "So many, of",
    "For programs.", "came and left again", "cannot fail to fail", "its how many-eth", "two words of an agent",
    "may cost it time or its life", "leave it out (--exclude=that node)", "names the one that is not",
    "before anything was mended", "take the import out of the way", "did not find together", "knows nothing of it",
)  # fmt: skip
AVOID = ("please", "simply", "easily", "obviously", "sorry", "betokens", "whosoever", "for ever", "in order to")
BRITISH = (
    "behaviour", "colour", "favour", "honour", "neighbour", "centre", "initialise", "initialised", "recognise",
    "recognised", "organise", "serialise", "serialised", "whilst", "grey", "analyse", "cancelled by", "licence",
)  # fmt: skip
WORDS_IN_A_SENTENCE = 40


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
    return found | {f"cause {cause.id}": f"{cause.title()} {cause.told or ''}" for cause in all_causes()}


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


def test_code_and_tables_are_not_prose() -> None:
    page = "# Head\n\nRead `please` this.\n\n| a | please |\n\n```\nplease\n```\n\n- one [two](please)\n"
    assert [block for block in paragraphs(page) if block] == ["Read X this.", "- one [two]"]
