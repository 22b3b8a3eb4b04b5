"""Does `allranks explain` say what a cause is, readably, on any terminal?"""

from __future__ import annotations

import json

from allranks.causes.book import all_causes, find_cause
from allranks.cli.explain import render_cause, render_list
from allranks.report.text import Style
from conftest import Allranks
from fake_slurm import assert_one_line

PLAIN = Style(is_unicode=False, has_colour=False, width=80)


def test_a_cause_is_explained_with_all_its_sections(allranks: Allranks) -> None:
    result = allranks("explain", "MN1")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == [
        "AR101 fabric-manager",
        "The fabric manager does not run, or does not match the driver.",
    ]
    heads = [line for line in lines[2:] if line and not line.startswith(" ")]
    assert heads == [
        "What it means", "Why it breaks the job", "Example", "Fix", "Source", "How it is found", "Also called MN1.",
    ]  # fmt: skip
    assert "      systemctl restart nvidia-fabricmanager" in lines
    assert "  The probe was tested with recorded output only, not on real hardware." in lines


def test_colors_that_are_forced_also_go_into_a_pipe(allranks: Allranks) -> None:
    assert "\x1b[1m" in allranks("explain", "AR204", env={"FORCE_COLOR": "1"}).stdout
    assert "\x1b[" not in allranks("explain", "AR204", env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout


def test_the_list_has_every_cause_on_one_line(allranks: Allranks) -> None:
    lines = allranks("explain").stdout.splitlines()
    assert lines[0] == "node"
    assert "  AR101 fabric-manager" in [line[:22] for line in lines]
    assert [line[2:7] for line in lines if line.startswith("  AR")] == [cause.id for cause in all_causes()]


def test_how_a_pair_fails_is_said_in_words(allranks: Allranks) -> None:
    lines = allranks("explain", "AR204").stdout.splitlines()
    assert "  between pairs of nodes: small packets pass, but large ones are lost." in lines
    for cause in all_causes():
        text = render_cause(cause, PLAIN)
        assert not [symptom for symptom in cause.symptoms if "-" in symptom and symptom in text], cause.id


def test_an_unknown_cause_is_one_line_with_a_guess(allranks: Allranks) -> None:
    result = allranks("explain", "clock-screw")
    assert result.returncode == 2
    assert_one_line(result.stderr)
    assert 'no cause "clock-screw": did you mean "clock-skew"?' in result.stderr


def test_programs_get_json(allranks: Allranks) -> None:
    said = json.loads(allranks("explain", "AR002", "--json").stdout)
    assert (said["id"], said["name"], said["exit_code"], said["is_outcome"]) == ("AR002", "shm-too-small", 75, False)
    assert list(said["sections"]) == ["What it means", "Why it breaks the job", "Example", "Fix", "Source"]
    assert set(said["found"]) == {"on each node", "in logs"}
    assert [each["id"] for each in json.loads(allranks("explain", "--json").stdout)] == [c.id for c in all_causes()]


def test_it_fits_an_ascii_terminal(allranks: Allranks) -> None:
    result = allranks("explain", "AR105", env={"PYTHONIOENCODING": "ascii", "COLUMNS": "60"})
    assert result.returncode == 0
    assert result.stdout.isascii()
    prose = [line for line in result.stdout.splitlines() if not line.startswith("      ") and "http" not in line]
    assert max(map(len, prose)) <= 60


def test_every_cause_can_be_shown_without_a_trace_of_markdown() -> None:
    shown = {cause: render_cause(cause, PLAIN) for cause in all_causes()}
    assert [cause.id for cause, text in shown.items() if not text.startswith(cause.label)] == []
    assert [cause.id for cause, text in shown.items() if "##" in text or "```" in text] == []


def test_heads_are_bold_on_a_terminal() -> None:
    style = Style(is_unicode=True, has_colour=True, width=100)
    assert "\x1b[1mWhat it means\x1b[0m" in render_cause(find_cause("AR002"), style)
    assert render_list(style).startswith("\x1b[1mnode\x1b[0m")


def test_torch_and_the_agent_are_not_imported(allranks: Allranks) -> None:
    result = allranks("explain", "AR002", env={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "allranks.causes.book" in imported
    assert not {"torch", "psutil", "allranks.launch.job"} & imported
