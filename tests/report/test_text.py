"""Verdicts as people read them."""

from __future__ import annotations

import io
import json

import msgspec
import pytest

from allranks.model.finding import Confidence, Evidence, Finding, Severity, Verdict
from allranks.model.setting import Setting
from allranks.report.machine import settings_to_json
from allranks.report.refusal import print_findings
from allranks.report.rundir import RunDir
from allranks.report.text import (
    MAX_CELL,
    Style,
    describe_size,
    render_finding,
    render_findings,
    render_rows,
    render_settings,
    say,
)

UTF8 = Style(is_unicode=True, has_colour=False, width=100)
ASCII = Style(is_unicode=False, has_colour=False, width=100)
COLOUR = Style(is_unicode=True, has_colour=True, width=100)

TRACEBACK = """Traceback (most recent call last):
  File "/home/u/train.py", line 41, in load_batch
    raise ValueError("batch 17 has no label")
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: batch 17 has no label"""
FINDING = Finding(
    cause="AR590 user-code-error",
    severity=Severity.FAIL,
    confidence=Confidence.CERTAIN,
    node="node02",
    ranks=(3,),
    message="ValueError: batch 17 has no label (train.py:41 in load_batch)",
    evidence=(Evidence(seen=TRACEBACK, source="runs/4711/attempt_0/node02/rank_3.err"),),
    fix="look at batch 17",
    victims=(0, 1, 2, 4, 5, 7),
)


def test_a_finding_in_utf8():
    assert render_finding(FINDING, UTF8) == (
        "\u2717 AR590 user-code-error   node02 \u00b7 rank 3"
        "                                                    certain\n"
        "  ValueError: batch 17 has no label (train.py:41 in load_batch)\n"
        "  seen Traceback (most recent call last):\n"
        '         File "/home/u/train.py", line 41, in load_batch\n'
        '           raise ValueError("batch 17 has no label")\n'
        "       ValueError: batch 17 has no label\n"
        "  log  runs/4711/attempt_0/node02/rank_3.err\n"
        "  fix  look at batch 17\n"
        "  more allranks explain AR590\n"
        "  others waited for it or were ended: ranks 0-2,4-5,7"
    )


def test_a_finding_in_ascii():
    text = render_finding(FINDING, ASCII)
    assert text.isascii()
    assert text.splitlines()[0] == (
        "x AR590 user-code-error   node02 - rank 3                                                    certain"
    )


def test_the_confidence_stands_at_the_right_edge():
    assert [len(render_finding(FINDING, style).splitlines()[0]) for style in (UTF8, ASCII)] == [100, 100]
    narrow = Style(is_unicode=True, has_colour=False, width=60)
    wide = Style(is_unicode=True, has_colour=False, width=250)
    tiny = Style(is_unicode=True, has_colour=False, width=10)
    assert len(render_finding(FINDING, narrow).splitlines()[0]) == 60
    assert len(render_finding(FINDING, wide).splitlines()[0]) == 100
    assert render_finding(FINDING, tiny).splitlines()[0].endswith("rank 3   certain")


@pytest.mark.parametrize(
    ("ranks", "who"),
    [
        ((0,), "rank 0"),
        ((5, 4, 6), "ranks 4-6"),
        ((0, 2), "ranks 0,2"),
        ((0, 1, 2, 7, 9, 10), "ranks 0-2,7,9-10"),
        (tuple(range(1024)), "ranks 0-1023"),
    ],
)
def test_ranks_are_folded(ranks, who):
    finding = Finding(
        cause="AR407 dead-rank",
        severity=Severity.FAIL,
        confidence=Confidence.LIKELY,
        node="n1",
        ranks=ranks,
        message="it left",
    )
    assert f"n1 \u00b7 {who} " in render_finding(finding, UTF8).splitlines()[0]


def test_a_finding_with_nothing_but_a_message_is_three_lines():
    finding = Finding(
        cause="AR490 collective-timeout", severity=Severity.FAIL, confidence=Confidence.UNDECIDED, message="who knows"
    )
    lines = render_finding(finding, UTF8).splitlines()
    assert [line.split() for line in lines] == [
        ["\u2717", "AR490", "collective-timeout", "undecided"],
        ["who", "knows"],
        ["more", "allranks", "explain", "AR490"],
    ]


@pytest.mark.parametrize(
    ("seen", "shown"),
    [
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\rb", r"a\rb"),
        ("a\x00b\x7f", r"a\x00b\x7f"),
        ("a\u202eb\u2028c", r"a\u202eb\u2028c"),
        ("caf\udce9", r"caf\udce9"),
        ("tab\there", "tab\there"),
        ("\u65e5\u672c\u8a9e", "\u65e5\u672c\u8a9e"),
    ],
)
def test_a_log_cannot_speak_to_the_terminal(seen, shown):
    finding = Finding(
        cause="AR590 user-code-error",
        severity=Severity.FAIL,
        confidence=Confidence.CERTAIN,
        node="n1",
        message=f"it said {seen}",
        evidence=(Evidence(seen=seen),),
    )
    on_one_line = shown.replace("\t", " ")
    assert render_finding(finding, UTF8).splitlines()[1:3] == [f"  it said {on_one_line}", f"  seen {shown}"]


def with_lines(count: int) -> list[str]:
    evidence = Evidence(seen="\n".join(f"line {number}" for number in range(1, count + 1)))
    finding = Finding(
        cause="X", severity=Severity.FAIL, confidence=Confidence.CERTAIN, message="m", evidence=(evidence,)
    )
    return [line[7:] for line in render_finding(finding, UTF8).splitlines()[2:-1]]


def test_a_traceback_of_24_lines_is_whole():
    assert with_lines(24) == [f"line {number}" for number in range(1, 25)]


def test_a_long_traceback_is_cut_in_the_middle():
    lines = with_lines(1000)
    assert lines[:5] == ["line 1", "line 2", "line 3", "line 4", "\u2026 977 lines"]
    assert lines[5:] == [f"line {number}" for number in range(982, 1001)]


def test_a_traceback_of_25_lines_loses_two_to_the_cut():
    assert with_lines(25)[3:6] == ["line 4", "\u2026 2 lines", "line 7"]


def test_colours_are_around_the_text_not_in_it():
    text = render_finding(FINDING, COLOUR)
    assert text.splitlines()[0].startswith("\x1b[31;1m\u2717 AR590 user-code-error   node02 \u00b7 rank 3\x1b[0m ")
    undecided = Finding(cause="X", severity=Severity.FAIL, confidence=Confidence.UNDECIDED, message="m")
    assert render_finding(undecided, COLOUR).startswith("\x1b[33;1m")


def test_a_verdict_has_its_findings_apart_and_none_when_all_is_well():
    two = Verdict(job="4711", attempt=0, exit_code=1, findings=(FINDING, FINDING))
    assert render_findings(two.findings, UTF8) == f"{render_finding(FINDING, UTF8)}\n\n{render_finding(FINDING, UTF8)}"
    assert render_findings((), UTF8) == ""


class Tty(io.TextIOWrapper):
    def __init__(self, encoding: str, *, is_tty: bool) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self._is_tty = is_tty

    def isatty(self) -> bool:
        return self._is_tty


@pytest.mark.parametrize(
    ("encoding", "is_tty", "env", "is_unicode", "has_colour"),
    [
        ("utf-8", True, {}, True, True),
        ("UTF8", True, {}, True, True),
        ("utf-8", False, {}, True, False),
        ("utf-8", True, {"NO_COLOR": "1"}, True, False),
        ("utf-8", True, {"TERM": "dumb"}, True, False),
        ("ascii", True, {}, False, True),
        ("latin-1", True, {}, False, True),
        ("utf-8", False, {"FORCE_COLOR": "1"}, True, True),
        ("utf-8", False, {"CLICOLOR_FORCE": "1", "CLICOLOR": "0", "TERM": "dumb"}, True, True),
        ("utf-8", False, {"FORCE_COLOR": "0", "CLICOLOR_FORCE": ""}, True, False),
        ("utf-8", False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ("utf-8", True, {"CLICOLOR": "0"}, True, False),
        ("utf-8", True, {"CLICOLOR": "1", "NO_COLOR": ""}, True, True),
    ],
)
def test_the_style_is_what_the_stream_can_show(monkeypatch, encoding, is_tty, env, is_unicode, has_colour):
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "77")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with Tty(encoding, is_tty=is_tty) as stream:
        assert Style.of(stream) == Style(is_unicode=is_unicode, has_colour=has_colour, width=77)


def test_a_stream_without_encoding_gets_ascii(monkeypatch):
    monkeypatch.setenv("COLUMNS", "77")
    assert Style.of(io.StringIO()) == Style(is_unicode=False, has_colour=False, width=77)


def test_settings_are_a_table():
    settings = [
        Setting("RANK", "5", reason="first rank plus local rank", source="allranks"),
        Setting("NCCL_SOCKET_IFNAME", "=ens1f1", reason="exactly this name", source="data_interface"),
        Setting("NASTY", "a\x1bb", reason="r", source="environment"),
    ]
    assert render_settings(settings, UTF8) == (
        "RANK                5        first rank plus local rank  (allranks)\n"
        "NCCL_SOCKET_IFNAME  =ens1f1  exactly this name           (data_interface)\n"
        "NASTY               a\\x1bb   r                           (environment)"
    )
    assert render_settings([], UTF8) == ""


SECRET = "swordfish"


def test_settings_are_shown_without_secrets():
    settings = [
        Setting("HF_TOKEN", SECRET, reason="kept", source="environment"),
        Setting("HTTPS_PROXY", f"http://me:{SECRET}@proxy:3128", reason="kept", source="environment"),
        Setting("ARGS", f"--api-key {SECRET} --num-tokens 512", reason="kept", source="environment"),
    ]
    assert SECRET not in render_settings(settings, UTF8) + settings_to_json(settings)
    assert [row["value"] for row in json.loads(settings_to_json(settings))] == [
        "(hidden)", "http://me:(hidden)@proxy:3128", "--api-key (hidden) --num-tokens 512",
    ]  # fmt: skip


def test_findings_are_shown_without_secrets(capsys):
    words = f"CalledProcessError: Command 'sync --api-key {SECRET}' died"
    finding = msgspec.structs.replace(
        FINDING,
        message=words,
        evidence=(Evidence(seen=words, source="rank_3.err"),),
        fix=f"run sync --api-key={SECRET}",
        notes=(f"also PASSWORD={SECRET}",),
    )
    shown = render_finding(finding, UTF8)
    say(words)
    assert SECRET not in shown + capsys.readouterr().err
    assert shown.count("(hidden)") == 4


def test_a_verdict_is_written_and_read_back_without_secrets(tmp_path):
    run_dir = RunDir(tmp_path, "7")
    run_dir.create()
    run_dir.create_attempt(0)
    finding = msgspec.structs.replace(FINDING, message=f"cannot log in with password={SECRET}")
    for is_of_all in (True, False):
        verdict = Verdict(job="7", attempt=0, exit_code=1, findings=(finding,))
        run_dir.write_verdict(verdict, node="node02", is_of_all=is_of_all)
        for path in run_dir.path.glob("**/verdict.json"):
            assert SECRET not in path.read_text()
            path.unlink()


def test_a_table_has_a_line_for_each_row_whatever_its_names_are():
    rows = [("JOB", "NAME"), ("7", "a\nb\x1b[31m\u202e"), ("8", "n" * 10_000)]
    lines = render_rows(rows).splitlines()
    assert lines[:2] == ["JOB  NAME", "7    a\\nb\\x1b[31m\\u202e"]
    assert len(lines) == 3
    assert len(lines[2]) == 5 + MAX_CELL


def test_our_own_lines_are_on_standard_error(capsys):
    say("all 6 ranks are up")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "allranks: all 6 ranks are up\n")


def _full() -> io.TextIOBase:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    return Full()


@pytest.mark.parametrize("make_stream", [lambda: None, _full])
def test_a_line_that_cannot_be_printed_ends_nothing(monkeypatch, make_stream):
    monkeypatch.setattr("sys.stderr", make_stream())
    say("32 ranks are up")
    print_findings((FINDING,))


@pytest.mark.parametrize(
    ("size", "text"), [(1, "1 byte"), (812, "812 bytes"), (1_440_000, "1.4 MB"), (2_300_000_000, "2.3 GB")]
)
def test_a_size_is_short_and_has_its_unit(size, text):
    assert describe_size(size) == text


def test_a_note_is_one_calm_line():
    finding = Finding(
        cause="AR599 healthy",
        severity=Severity.NOTE,
        confidence=Confidence.LIKELY,
        message="nothing speaks of a failure",
        evidence=(Evidence(seen="step 9", source="a.log:1"),),
    )
    assert render_finding(finding, ASCII).split() == [
        "+",
        "AR599",
        "healthy",
        "nothing",
        "speaks",
        "of",
        "a",
        "failure",
        "likely",
    ]
    assert render_finding(finding, COLOUR).startswith("\x1b[32;1m\u2713 AR599 healthy")


@pytest.mark.parametrize(
    ("node", "ranks", "confidence"),
    [
        ("n1 or n2", (), "undecided between n1 and n2"),
        (None, (3, 5), "undecided between rank 3 and rank 5"),
        ("n1 or n2 or n3", (), "undecided"),
        ("n1", (3,), "undecided"),
    ],
)
def test_of_two_culprits_both_are_named(node, ranks, confidence):
    finding = Finding(
        cause="X", severity=Severity.FAIL, confidence=Confidence.UNDECIDED, node=node, ranks=ranks, message="m"
    )
    assert render_finding(finding, UTF8).splitlines()[0].endswith(f"   {confidence}")


def test_what_would_tell_more_comes_after_the_fix():
    finding = Finding(
        cause="X", severity=Severity.WARN, confidence=Confidence.LIKELY, message="m", fix="this", ask="dmesg of n1"
    )
    assert render_finding(finding, UTF8).splitlines()[2:4] == ["  fix  this", "  next dmesg of n1"]
