"""What does `allranks` say before a verb is found: without words, to `help`, to a misspelled verb?"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from allranks.model.errors import Exit
from conftest import Allranks, allranks_command, clean_env

ROOT = Path(__file__).parents[2]


@pytest.fixture
def allranks(allranks_here: Allranks) -> Allranks:
    return allranks_here


@pytest.mark.parametrize(
    ("words", "same_as"),
    [
        ((), ("--help",)),
        (("lab",), ("lab", "--help")),
        (("config",), ("config", "--help")),
        (("help",), ("--help",)),
        (("help", "why"), ("why", "--help")),
        (("help", "lab", "inject"), ("lab", "inject", "--help")),
        (("lab", "help", "inject"), ("lab", "inject", "--help")),
    ],
    ids=" ".join,
)
def test_help_is_printed_and_is_no_error(words: tuple[str, ...], same_as: tuple[str, ...], allranks: Allranks) -> None:
    result = allranks(*words)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == allranks(*same_as).stdout
    assert result.stdout.startswith(f"Usage: {' '.join(('allranks', *same_as[:-1]))} [OPTIONS]")


@pytest.mark.parametrize("words", [(), ("lab",), ("config",)], ids=" ".join)
def test_no_summary_of_a_verb_is_cut(words: tuple[str, ...], allranks: Allranks) -> None:
    assert "..." not in allranks(*words, "--help").stdout.partition("Commands:")[2]


def test_the_list_of_faults_explains_its_columns(allranks: Allranks) -> None:
    head, _, rows = allranks("lab", "inject", "--list").stdout.partition("\n\n")
    assert head.startswith("Columns: name, cause that allranks must report")
    outcomes = {line.split()[0] for line in head.splitlines()[1:]}
    used = {
        re.split(r" (?:-|AR\d{3}(?:\|AR\d{3})*) +", line)[1].split()[0] for line in rows.splitlines() if " AR" in line
    }
    assert used == outcomes


def test_the_help_of_submit_speaks_of_the_job_not_of_this_node(allranks: Allranks) -> None:
    text = " ".join(allranks("submit", "--help").stdout.split())
    assert "Number of ranks per node. [default: one per GPU that the job gets on a node, else 1]" in text
    assert "Number of nodes to allocate. [default: as --nnodes, else 1]" in text
    assert "this node" not in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("rnu",), "no such command 'rnu' (did you mean 'run'?); see allranks --help"),
        (("chek",), "no such command 'chek' (did you mean 'check'?); see allranks --help"),
        (("stop", "latest"), "no such command 'stop' (did you mean 'cancel'?); see allranks --help"),
        (("runs",), "no such command 'runs' (did you mean 'list'?); see allranks --help"),
        (("lab", "injekt"), "no such command 'injekt' (did you mean 'inject'?); see allranks lab --help"),
        (("config", "shw"), "no such command 'shw' (did you mean 'show'?); see allranks config --help"),
        (("help", "submti"), "no such command 'submti' (did you mean 'submit'?); see allranks --help"),
        (("xyzzy",), "no such command 'xyzzy'; see allranks --help"),
        (("",), "no such command ''; see allranks --help"),
    ],
)
def test_a_misspelled_verb_gets_the_nearest_one(words: tuple[str, ...], line: str, allranks: Allranks) -> None:
    result = allranks(*words)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"error: {line}\n")


def test_help_imports_no_verb() -> None:
    env = clean_env(os.environ, PYTHONPROFILEIMPORTTIME="1")
    result = subprocess.run(allranks_command("--help"), env=env, capture_output=True, text=True, check=True, timeout=60)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    own = {name for name in imported if name.startswith("allranks.cli.")}
    assert own == {"allranks.cli.main", "allranks.cli.verb_groups", "allranks.cli.std_streams"}
    assert not {"difflib", "psutil", "jinja2", "torch"} & imported


def test_both_tables_of_exit_codes_have_every_code(allranks: Allranks) -> None:
    table = (ROOT / "docs/reference/exit-codes.md").read_text()
    listed = " ".join(allranks("--help").stdout.partition("Exit codes:")[2].split())
    for code in Exit:
        assert re.search(rf"\| {int(code)} \|", table), code
        assert re.search(rf"(^|,)\s*{int(code)} ", listed), code


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--nproc", " (did you mean '--nproc-per-node'?)"),
        ("--max-restart", " (did you mean '--max-restarts'?)"),
        ("--wombat", ""),
    ],
)
def test_an_unknown_option_gets_the_nearest_one(option: str, hint: str, allranks: Allranks) -> None:
    result = allranks("run", option, "2", "train.py")
    assert (result.returncode, result.stderr) == (
        2,
        f"error: no such option {option!r}{hint}; see allranks run --help\n",
    )
