"""Are findings that allranks printed into a log read back as they were?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from allranks.model.finding import Confidence, Evidence, Finding, Severity
from allranks.report.text import Style, render_finding
from allranks.why.logs.log_events import Logs

Read = Callable[[str | Mapping[str, str]], Logs]

STUCK = Finding(
    cause="AR408 stuck-rank",
    severity=Severity.FAIL,
    confidence=Confidence.LIKELY,
    node="vm",
    ranks=(2,),
    message="it has been in user code for 16 s: hang.py:3 in <module>",
    evidence=(
        Evidence(seen="ranks 0-1 waited for 16 s in collective 1 of group 0"),
        Evidence(seen="Traceback:\n  File a.py\nValueError: x", source="runs/7/attempt_0/vm/rank_2.err"),
    ),
    fix="find out what the rank waits for",
    ask="allranks stack 7 while it hangs",
    victims=(0, 1, 3),
)
LINK = Finding(
    cause="AR210 link-down",
    severity=Severity.FAIL,
    confidence=Confidence.CERTAIN,
    node="node[03-04]",
    interface="ens1f1",
    message="no carrier",
    waiting="node[01-02]",
)
EITHER = Finding(
    cause="AR409 straggler-rank", severity=Severity.WARN, confidence=Confidence.UNDECIDED, ranks=(3, 5), message="late"
)
CRASHED = Finding(
    cause="AR590 user-code-error",
    severity=Severity.FAIL,
    confidence=Confidence.CERTAIN,
    subject="train.py:6",
    message="ValueError: no label",
)
ALIKE = Finding(
    cause="AR590 user-code-error",
    severity=Severity.FAIL,
    confidence=Confidence.CERTAIN,
    node="vm",
    ranks=(0, 1, 2),
    message="ValueError: no label",
    notes=("3 ranks failed alike", "also by itself: rank 3, SIGSEGV, 0.1 s later"),
    victims=(4, 5),
)
PLAIN = Style(is_unicode=True, has_colour=False, width=100)
ASCII = Style(is_unicode=False, has_colour=False, width=80)
COLORED = Style(is_unicode=True, has_colour=True, width=100)
HEAD = "✗ AR408 stuck-rank   vm · rank 2                 likely"


@pytest.mark.parametrize("style", [PLAIN, ASCII, COLORED], ids=["plain", "ascii", "colored"])
@pytest.mark.parametrize("prefix", ["", "3: ", "[node03 r0] ", "2026-03-25T10:00:00.123456789Z "])
@pytest.mark.parametrize(
    "finding", [STUCK, LINK, EITHER, CRASHED, ALIKE], ids=["stuck", "link", "either", "crashed", "alike"]
)
def test_a_printed_finding_is_read_back_whole(read: Read, finding: Finding, prefix: str, style: Style) -> None:
    text = "\n" + render_finding(finding, style) + "\n\nmain: error\n"
    (found,) = read("".join(f"{prefix}{line}\n" for line in text.splitlines())).printed
    assert found.finding == finding
    assert found.line.number == 2
    assert found.last == len(text.rstrip().splitlines()) - 2


@pytest.mark.parametrize(
    "prefix",
    [
        "Mar 25 10:34:{:02d} n7 sh[9]: ",
        "2026-03-25T10:34:{:02d}.5Z stdout F ",
        "1774434847{:03d}\t2026-03-25T10:34:07.530Z\t",
    ],
)
def test_a_printed_finding_is_read_back_with_the_times_of_a_collector(read: Read, prefix: str) -> None:
    lines = render_finding(STUCK, PLAIN).splitlines()
    (found,) = read("".join(f"{prefix.format(second)}{line}\n" for second, line in enumerate(lines))).printed
    assert found.finding == STUCK


def test_escape_sequences_that_a_program_wrote_out_are_none_of_its_words(read: Read) -> None:
    text = render_finding(STUCK, COLORED)
    for escape in ("^[", "#033"):
        (found,) = read(text.replace("\x1b", escape)).printed
        assert found.finding == STUCK


def test_lines_of_other_tasks_in_between_are_left_out(read: Read) -> None:
    lines = [f"0: {line}" for line in render_finding(STUCK, PLAIN).splitlines()]
    (found,) = read("\n".join(f"{line}\n1:   loss 0.1\n" for line in lines)).printed
    assert found.finding == STUCK


def test_a_log_that_ends_in_a_report_has_the_finding(read: Read) -> None:
    (found,) = read("\n".join(render_finding(STUCK, PLAIN).splitlines()[:3])).printed
    assert (found.finding.message, found.finding.evidence) == (STUCK.message, STUCK.evidence[:1])
    (found,) = read(HEAD).printed
    assert (found.finding.cause, found.finding.ranks) == (STUCK.cause, (2,))
    assert found.finding.message


@pytest.mark.parametrize(
    "text",
    [
        HEAD + "\nloss 0.1\n",
        HEAD.replace("stuck-rank", "stuck-node") + "\n  message\n",
        HEAD.replace("AR408", "AR409") + "\n  message\n",
        HEAD.replace("   likely", "") + "\n  message\n",
        "see " + HEAD + "\n  message\n",
        HEAD.replace("✗ ", "") + "\n  message\n",
        HEAD.replace("   ", " ") + "\n  message\n",
    ],
    ids=["no message", "no such name", "another id", "no confidence", "in a sentence", "no mark", "no gap"],
)
def test_words_of_a_script_are_no_finding(read: Read, text: str) -> None:
    assert read(text).printed == ()


def test_a_report_quotes_lines_that_are_no_events(read: Read) -> None:
    quoted = Evidence(seen="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    text = render_finding(Finding(**{**_fields(STUCK), "evidence": (quoted,)}), PLAIN)
    logs = read(f"{text}\n\nsrun: error: Node failure on node07\n")
    assert [event.kind for event in logs.events if event.cause] == ["node-failure"]


def _fields(finding: Finding) -> dict[str, object]:
    return {name: getattr(finding, name) for name in finding.__struct_fields__}
