"""Findings as Markdown, for an issue or a chat: what happened first, then evidence in code blocks, then the fix. Pure.

    >>> print(code_block("step 10"))
    ```text
    step 10
    ```

The parts of a finding are those of report/text.py. Text of logs must not become markup: it stands in code blocks, and
in sentences its special characters are escaped, `@name` notifies nobody and `#12` links to no issue.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from allranks.model.finding import Finding, Severity
from allranks.report.mask import mask_finding
from allranks.report.text import (
    Style,
    one_line,
    render_findings,
    tell_confidence,
    tell_culprit,
    tell_message,
    tell_parts,
)

_STYLE = Style(is_unicode=True, has_colour=False, width=100)
_SPECIAL = re.compile(
    r"[\\`*{}\[\]<|~$]|(?<![^\W_])_|_(?![^\W_])"  # an underscore within a word is none, as in all_reduce
    r"|^[#+=>-]|(?<=^[0-9])[.)]|(?<=^[0-9][0-9])[.)]"  # what begins a heading, a list or a quotation
)
_REFERENCE = re.compile(r"([@#])(?=\w)")
_LABELS = {"fix": "**Fix:** ", "next": "**Next:** "}


def findings_as_markdown(findings: Sequence[Finding]) -> str:
    """Return all findings, without a final newline; empty for none. Secrets are hidden."""
    return "\n\n".join("\n\n".join(_blocks(mask_finding(finding))) for finding in findings)


def _blocks(finding: Finding) -> Iterator[str]:
    if finding.severity is Severity.NOTE:
        yield f"**{escape(one_line(finding.cause))}:** {escape(tell_message(finding, _STYLE))}"
        return
    who = tell_culprit(finding, _STYLE)
    head = ": ".join(filter(None, [one_line(finding.cause), who]))
    yield f"### {escape(head)} ({escape(tell_confidence(finding))})"
    yield escape(tell_message(finding, _STYLE))
    for part in tell_parts(finding, _STYLE):
        match part.label:
            case "seen":
                yield code_block("\n".join(part.lines))
            case "log":
                yield f"from {code(part.lines[0])}"
            case "more":
                yield f"Explained by {code(part.lines[0])}"
            case label:
                yield _LABELS.get(label, "") + ("; " if label else "\n\n").join(map(escape, part.lines))


def text_as_markdown(text: str) -> str:
    """Return one line as a sentence, and several as a code block."""
    return code_block(text) if "\n" in text else escape(text)


def escape(text: str) -> str:
    r"""Return text that is shown as it is.

    >>> escape("a *b* [c](d)"), escape("1. all_reduce")
    ('a \\*b\\* \\[c\\](d)', '1\\. all_reduce')
    """
    escaped = _SPECIAL.sub(r"\\\g<0>", text)
    return _REFERENCE.sub("\\1\N{ZERO WIDTH SPACE}", escaped)


def code(text: str) -> str:
    """Return one line as code.

    >>> code("a"), code("`b`")
    ('`a`', '`` `b` ``')
    """
    fence = "`" * (_longest_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def code_block(text: str) -> str:
    """Return lines as a code block, which no line of them can end."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}text\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


class Markup(NamedTuple):
    """How the blocks of an answer are written."""

    findings: Callable[[Sequence[Finding], Style], str]
    block: Callable[[str], str]
    """Of what stands beside the findings: a sentence, or lines."""


PLAIN = Markup(render_findings, str)
MARKDOWN = Markup(lambda findings, style: findings_as_markdown(findings), text_as_markdown)
