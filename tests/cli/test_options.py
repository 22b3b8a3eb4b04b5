"""Options that several verbs have are called the same, take the same values and say so in the same words."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from allranks.cli.main import VERBS
from allranks.cli.options import Duration
from conftest import Allranks

# torchrun's own: accepted by run, and unused.
OF_TORCHRUN = {"monitor_interval"}


def all_options() -> Iterator[tuple[str, click.Option]]:
    """Every option of every verb, hidden ones too."""
    left = [(verb, getattr(importlib.import_module(module), name)) for verb, (module, name, _) in VERBS.items()]
    while left:
        path, command = left.pop()
        if isinstance(command, click.Group):
            left += [(f"{path} {name}", each) for name, each in command.commands.items()]
        else:
            yield from ((path, each) for each in command.params if isinstance(each, click.Option))


def test_every_waiting_time_is_called_timeout_and_read_and_explained_alike() -> None:
    durations = [(path, each) for path, each in all_options() if isinstance(each.type, Duration)]
    ages = {("clean", "older_s"), ("why", "within")}
    waits = [(path, each) for path, each in durations if (path, each.name) not in ages]
    assert {(path, each.opts[0]) for path, each in waits} == {
        ("run", "--capacity-timeout"), ("run", "--hang-timeout"), ("render", "--capacity-timeout"),
        ("render", "--hang-timeout"), ("submit", "--capacity-timeout"), ("submit", "--hang-timeout"),
        ("check", "--timeout"), ("check", "--queue-timeout"), ("bench", "--timeout"), ("bench", "--queue-timeout"),
        ("init", "--timeout"), ("init", "--queue-timeout"),
        ("stack", "--timeout"), ("horovod", "--elastic-timeout"), ("run", "--shutdown-timeout"),
        ("render", "--shutdown-timeout"), ("submit", "--shutdown-timeout"), ("lab up", "--kill-wait"),
        ("lab up", "--grace-time"), ("advise", "--timeout"), ("bench", "--timeout"),
        ("bench", "--queue-timeout"),
    }  # fmt: skip
    for _, each in waits:
        assert (each.help or "").startswith("How long to wait for ")
        assert ": 90, 90s, 5m or 1h. [default: " in (each.help or "")


def test_no_option_counts_seconds_in_a_way_of_its_own() -> None:
    others = [
        (path, each.opts)
        for path, each in all_options()
        if not isinstance(each.type, Duration) and each.name not in OF_TORCHRUN
        if each.metavar == "SECONDS" or any(opt.endswith(("timeout", "deadline")) for opt in each.opts)
    ]
    assert others == []


def test_a_preview_is_called_dry_run_in_every_verb_that_has_one() -> None:
    shown = [
        (path, opt)
        for path, each in all_options()
        for opt in each.opts
        if opt in ("--dry-run", "--plan", "--print", "--preview") and opt not in getattr(each, "aliases", ())
    ]
    assert sorted(shown) == [("run", "--dry-run"), ("submit", "--dry-run")]


@pytest.mark.parametrize(("verb", "alias"), [("run", "--plan"), ("stack", "--deadline")])
def test_older_names_are_taken_and_not_shown(verb: str, alias: str) -> None:
    [option] = [each for path, each in all_options() if path == verb and alias in each.opts]
    record = option.get_help_record(click.Context(click.Command(verb)))
    assert record is not None
    assert alias not in record[0]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("1.5h", 5400.0), ("2d", 172800.0)]
)
def test_a_waiting_time_is_seconds_or_has_a_unit(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "5x", "-1", "1:30", "m", "5 m", "1e3", "nan", "inf"])
def test_what_is_no_waiting_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected seconds, or a number with s, m, h or d"):
        Duration().convert(text, None, None)


WRONG = {
    ("run", "--max-restarts", "many", "a.py"): "invalid value for '--max-restarts' / '--max_restarts': 'many' is not a "
    "whole number; see allranks run --help",
    ("submit", "--dry-run", "--json", "a.py"): "submit: --dry-run prints the script, and --json what was submitted; "
    "expected one of them",
    ("why", ""): "'': no such file or directory; expected logs, a directory, a pattern, '-' or a job id",
    ("why", "--history", "a.py"): "a.py: no line of it is one that `allranks why --epilog --to` writes",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_words_are_one_line(words: tuple[str, ...], allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    result = allranks(*words)
    assert (result.returncode, result.stderr) == (2, f"error: {WRONG[words]}\n")
