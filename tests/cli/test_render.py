"""What `submit` and `render` write is what `run` reads: every option of run comes out as it went in."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allranks.cli.jobs import RUN_FLAGS, nodes_of, render, submit, words_of
from allranks.cli.options import Duration
from allranks.cli.run import run
from allranks.model.errors import UsageError

TEXTS = st.sampled_from(["x", "a b", "it's", "--foo", "-m", "False", "$HOME", "\N{SNOWMAN}", "a\nb", "#", '"'])
OWN = {
    "nnodes": st.sampled_from(["1", "2", "2:4"]),
    "bucket_mb": st.sampled_from(["auto", "1", "25"]),
    "ignore": st.lists(st.sampled_from(["AR213", "AR2", "disk-full"]), max_size=3).map(tuple),
}
OPTIONS = {
    each.name: each
    for each in run.params
    if isinstance(each, click.Option) and each.name in RUN_FLAGS and each.name != "cluster_file"
}


def values_of(option: click.Option) -> st.SearchStrategy[Any]:
    """Values that this option takes."""
    assert option.name is not None
    if option.name in OWN:
        return OWN[option.name]
    if option.is_flag:
        return st.booleans()
    match option.type:
        case click.Choice():
            return st.sampled_from(list(option.type.choices))
        case click.IntRange():
            return st.integers(int(option.type.min or 0), int(option.type.max or 1000))
        case Duration():
            return st.floats(min_value=0.001, max_value=1e6)
        case click.Path():
            return TEXTS.map(Path)
        case _:
            return TEXTS


def is_refused(chosen: dict[str, Any]) -> bool:
    """Whether flags contradict each other: `render` refuses them as `run` does."""
    is_no_restart = chosen.get("restart_on_error") and chosen.get("max_restarts") == 0
    return bool(is_no_restart or (chosen.get("module") and chosen.get("no_python")))


CHOSEN = st.fixed_dictionaries({}, optional={name: values_of(option) for name, option in OPTIONS.items()}).filter(
    lambda chosen: not is_refused(chosen)
)


def spelled(chosen: dict[str, Any]) -> list[str]:
    """As a user writes these values: written out here, so that the code under test is not asked."""
    words = []
    for name, value in chosen.items():
        flag = OPTIONS[name].opts[-1].replace("_", "-")
        flag = flag if flag.startswith("--") else next(opt for opt in OPTIONS[name].opts if opt.startswith("--"))
        if value is False:
            words += [f"--no-{flag[2:]}"] if name == "standby" else []
        elif value is True:
            words.append(flag)
        else:
            words += [word for each in (value if isinstance(value, tuple) else (value,)) for word in (flag, str(each))]
    return words


def rendered(*words: str, env: dict[str, str] | None = None) -> list[str]:
    """The words of `run` in the script that `render` prints, from `run` on."""
    result = CliRunner().invoke(render, list(words), env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = re.search(r"-m allranks (run .*) &\nranks=\$!\n", result.output, re.DOTALL)
    assert found, result.output
    return shlex.split(found[1])


def read_by_run(words: list[str]) -> dict[str, Any]:
    return run.make_context("run", words[1:]).params


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=CHOSEN)
def test_what_render_writes_run_reads_as_it_was_asked_for(
    chosen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read = read_by_run(rendered(*spelled(chosen), "train.py", "--epochs", "3", "--standby"))
    assert (read["script"], read["arguments"]) == ("train.py", ("--epochs", "3", "--standby"))
    defaults = {name: read_by_run(["run", "x"])[name] for name in OPTIONS} | {"max_restarts": 3}
    assert {name: read[name] for name in OPTIONS} == defaults | chosen


@pytest.mark.parametrize("option", [each for each in OPTIONS.values() if each.is_flag], ids=lambda each: each.name)
@pytest.mark.parametrize("value", [True, False])
def test_a_switch_is_one_word_and_never_a_value(option: click.Option, value: bool) -> None:
    words = words_of(option, value)
    assert len(words) <= 1
    assert read_by_run(["run", *words, "train.py"])[str(option.name)] is value


def test_no_standby_is_written_as_it_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rendered("--no-standby", "train.py") == ["run", "--max-restarts", "3", "--no-standby", "train.py"]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PET_NO_PYTHON", "0", []),
        ("PET_NO_PYTHON", "1", ["--no-python"]),
        ("PET_MODULE", "0", []),
        ("PET_MAX_RESTARTS", "7", []),
        ("PET_NPROC_PER_NODE", "4", ["--nproc-per-node", "4"]),
    ],
)
def test_torchrun_s_variables_are_read_as_run_reads_them(
    variable: str, value: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = rendered("train", env={variable: value})
    restarts = value if variable == "PET_MAX_RESTARTS" else "3"
    assert sorted(written) == sorted(["run", *words, "--max-restarts", restarts, "train"])


def test_a_script_that_looks_like_an_option_stays_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_by_run(rendered("--", "-train.py", "--lr", "1"))["script"] == "-train.py"


@pytest.mark.parametrize("command", [submit, render])
def test_help_and_script_say_the_same_default_of_restarts(
    command: click.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [option] = [each for each in command.params if each.name == "max_restarts"]
    record = option.get_help_record(click.Context(command))
    assert record is not None
    assert re.findall(r"\[default: (\d+)\]", record[1]) == ["3"]
    assert read_by_run(rendered("train.py"))["max_restarts"] == 3
    assert "[default: 0]" in CliRunner().invoke(run, ["--help"]).output  # torchrun's own stays with run


SHORT = {
    "-N 2": "--nodes=2", "-t 1:30": "--time=1:30", "-p main": "--partition=main", "-J try": "--job-name=try",
    "-A lab": "--account=lab", "-q high": "--qos=high", "-w node[01-02]": "--nodelist=node[01-02]",
    "-x node03": "--exclude=node03", "-c 8": "--cpus-per-task=8", "-G 4": "--gpus=4",
}  # fmt: skip


@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("is_joined", [False, True])
def test_sbatch_s_letters_mean_what_they_mean_to_sbatch(
    short: str, is_joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [short.replace(" ", "")] if is_joined else short.split()
    output = CliRunner().invoke(render, [*words, "train.py"]).output
    assert f"#SBATCH {SHORT[short]}\n" in output


@pytest.mark.parametrize(
    ("nodes", "nnodes", "expected"),
    [
        (None, None, None),
        ("2", None, "2"),
        (None, "2", "2"),
        (None, "2:4", "2-4"),
        (None, "3:3", "3"),
        ("3", "3", "3"),
        ("3", "2:4", "3"),
        ("2-4", "2:4", "2-4"),
        ("1,3,5", "3", "1,3,5"),
    ],
)
def test_nodes_follow_from_nnodes(nodes: str | None, nnodes: str | None, expected: str | None) -> None:
    assert nodes_of(nodes, nnodes) == expected


@pytest.mark.parametrize(("nodes", "nnodes"), [("2", "3"), ("3", "2"), ("2-4", "3"), ("2-4", "3:8"), ("5", "2:4")])
def test_nodes_and_nnodes_that_contradict_each_other_are_refused(nodes: str, nnodes: str) -> None:
    with pytest.raises(UsageError) as refused:
        nodes_of(nodes, nnodes)
    assert str(refused.value) == f"--nodes {nodes} and --nnodes {nnodes} contradict each other; give one of them"
