"""`allranks diff`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from allranks.cli.main import cli
from allranks.model.errors import UsageError
from allranks.state.truth.trace_file import FOLDER, TraceRow, file_name, to_bytes


def write(directory: Path, numbers: dict[int, int], **about: str) -> Path:
    (directory / FOLDER).mkdir(parents=True)
    rows = [TraceRow(step, {"part/model": number}, {"world_size": 1, **about}) for step, number in numbers.items()]
    (directory / FOLDER / file_name(0)).write_bytes(to_bytes(rows))
    return directory


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["diff", *map(str, arguments)], standalone_mode=False)


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    told = ask(write(tmp_path / "a", {0: 1, 8: 2}), write(tmp_path / "b", {0: 1, 4: 9, 8: 2}))
    assert (told.return_value, told.output) == (0, "no difference up to step 8; 2 recorded steps compared\n")


def test_the_steps_between_which_they_part_are_named(tmp_path: Path) -> None:
    told = ask(write(tmp_path / "a", {0: 1, 8: 2}, torch="2.12"), write(tmp_path / "b", {0: 1, 8: 3}, torch="2.13"))
    assert told.return_value == 1
    assert told.output.splitlines() == [
        "also differs  torch: 2.12 -> 2.13",
        "they part between steps 0 and 8: all is equal at step 0; these differ at step 8:",
        "  part model",
    ]


def test_without_common_steps_or_a_record_it_cannot_tell(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", {1: 1}), write(tmp_path / "b", {2: 1})
    told = ask(a, b)
    assert told.return_value == 3
    assert told.output == "cannot tell: no step was recorded by both: steps 1 to 1, and steps 2 to 2\n"
    (tmp_path / "old/step_3").mkdir(parents=True)
    told = ask(a, tmp_path / "old")
    assert (told.return_value, told.output) == (
        3,
        f"cannot tell: no record that can be read beside the checkpoints in {tmp_path}/old\n",
    )


def test_json_has_the_same(tmp_path: Path) -> None:
    told = ask(write(tmp_path / "a", {0: 1, 8: 2}), write(tmp_path / "b", {0: 1, 8: 3}, torch="2.13"), "--json")
    document = json.loads(told.output)
    assert {name: document[name] for name in ("since", "until", "differing", "also_differs", "exit_code")} == {
        "since": 0,
        "until": 8,
        "differing": [{"column": "part/model", "ranks": [0]}],
        "also_differs": [{"name": "torch", "a": "unset", "b": "2.13"}],
        "exit_code": 1,
    }


def test_a_run_is_found_by_its_id_and_a_checkpoint_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "elsewhere", {0: 1})
    node = tmp_path / "runs/4711/attempt_0/n1"
    node.mkdir(parents=True)
    rows = [{"name": "ALLRANKS_CHECKPOINT_DIR", "value": str(tmp_path / "elsewhere"), "reason": "", "source": ""}]
    (node / "env.json").write_text(json.dumps(rows))
    write(tmp_path / "runs/4712/checkpoints", {0: 1})
    (tmp_path / "runs/4712/attempt_0").mkdir()
    (tmp_path / "runs/4712/attempt_0/events.jsonl").touch()
    assert ask("4711", "4712").return_value == ask("runs/4711", "runs/4712/checkpoints").return_value == 0


def test_bad_input_is_one_clear_error(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {0: 1})
    (tmp_path / "empty").mkdir()
    (tmp_path / "b").mkdir()
    for other, why in (
        (tmp_path / "none", "none: no such directory, and no such run in runs/; allranks list --all prints them"),
        (tmp_path / "empty", "no checkpoints and no record"),
        (tmp_path / ("n" * 300), "nnn: file name too long"),
        (tmp_path / "b/../a", f"A and B have one record, in {tmp_path}/a: expected two runs"),
    ):
        found = ask(a, other).exception
        assert isinstance(found, UsageError)
        assert why in str(found)
