"""Findings as Markdown: what happened first, and nothing that a log says becomes markup."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.model.finding import Confidence, Evidence, Finding, Severity
from allranks.report.markdown import code, code_block, escape, findings_as_markdown, text_as_markdown

FINDING = Finding(
    cause="AR109 cuda-oom",
    severity=Severity.FAIL,
    confidence=Confidence.CERTAIN,
    node="node17",
    ranks=(3,),
    message="a rank ran out of GPU memory",
    evidence=(Evidence(seen="OutOfMemoryError: CUDA out of memory", source="logs/rank_3.err:41"),),
    fix="on node17: nvidia-smi shows other processes",
    ask="allranks stack 12",
    victims=(0, 1, 2),
)


def test_a_finding_begins_with_its_cause_and_culprit_and_ends_with_its_victims() -> None:
    assert findings_as_markdown([FINDING]) == (
        "### AR109 cuda-oom: node17 \u00b7 rank 3 (certain)\n\n"
        "a rank ran out of GPU memory\n\n"
        "```text\nOutOfMemoryError: CUDA out of memory\n```\n\n"
        "from `logs/rank_3.err:41`\n\n"
        "**Fix:** on node17: nvidia-smi shows other processes\n\n"
        "**Next:** allranks stack 12\n\n"
        "Explained by `allranks explain AR109`\n\n"
        "others waited for it or were ended: ranks 0-2"
    )


def test_a_note_is_one_line() -> None:
    note = Finding(
        cause="AR599 healthy",
        severity=Severity.NOTE,
        confidence=Confidence.LIKELY,
        message="these logs show no failure",
    )
    assert findings_as_markdown([note]) == "**AR599 healthy:** these logs show no failure"


def test_secrets_are_hidden() -> None:
    assert "hf_abc" not in findings_as_markdown(
        [
            Finding(
                cause="AR590 user-code-error",
                severity=Severity.FAIL,
                confidence=Confidence.CERTAIN,
                message="HF_TOKEN=hf_abcdefghijklmnopqrst",
                evidence=(Evidence(seen="token hf_abcdefghijklmnopqrst"),),
            )
        ]
    )


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("a *b* _c_ `d` <e> [f](g) ~h~ |i| $j$", r"a \*b\* \_c\_ \`d\` \<e> \[f\](g) \~h\~ \|i\| \$j\$"),
        ("> no quotation", r"\> no quotation"),
        ("# no heading", r"\# no heading"),
        ("- no list", r"\- no list"),
        ("12. no list", r"12\. no list"),
        ("a - b, all_reduce", "a - b, all_reduce"),
        ("__init__ _x", r"\_\_init\_\_ \_x"),
        ("thanks @ada, see #12", "thanks @\u200bada, see #\u200b12"),
    ],
)
def test_text_of_a_log_is_no_markup(said: str, shown: str) -> None:
    assert escape(said) == shown


@given(st.text(alphabet="`~ab\n ", max_size=40))
def test_no_line_ends_the_code_block_that_it_is_in(text: str) -> None:
    fence, *inner, last = code_block(text).split("\n")
    assert fence == f"{last}text"
    assert "\n".join(inner) == text
    assert not any(re.fullmatch(rf" {{0,3}}`{{{len(last)},}} *", line) for line in inner)


@pytest.mark.parametrize(("text", "shown"), [("a", "`a`"), ("a`b", "``a`b``"), ("`", "`` ` ``")])
def test_code_in_a_line_may_have_backticks(text: str, shown: str) -> None:
    assert code(text) == shown


def test_one_line_is_a_sentence_and_several_are_code() -> None:
    assert text_as_markdown("1 more finding: *.err") == r"1 more finding: \*.err"
    assert text_as_markdown("a\nb") == "```text\na\nb\n```"
