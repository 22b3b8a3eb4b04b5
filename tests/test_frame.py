"""Does the frame hold: what is imported when, what the command line offers, what docstrings and documents promise?"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import allranks
from allranks.cli.main import VERBS, cli

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def imported_by(code: str) -> set[str]:
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {name.partition(".")[0] for name in result.stdout.split()}


@pytest.mark.parametrize("module", ["allranks.cli.main", "allranks.cli.run", "allranks.launch.job"])
def test_the_agent_never_imports_torch(module: str) -> None:
    assert "torch" not in imported_by(f"import {module}")


def test_help_imports_neither_psutil_nor_the_agent() -> None:
    assert not {"psutil", "torch", "numpy"} & imported_by("import allranks.cli.main")


def test_extras_are_imported_only_where_they_are_used() -> None:
    ours = "import allranks.cli.top, allranks.cli.run, allranks.launch.job, allranks.launch.lead.metrics_writer"
    assert not {"textual", "rich", "prometheus_client", "opentelemetry"} & imported_by(ours)


def test_what_enters_a_worker_imports_the_standard_library_and_torch_only() -> None:
    tops = {
        ((node.module if isinstance(node, ast.ImportFrom) else alias.name) or "").partition(".")[0]
        for path in SOURCES
        if "join" in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert "torch" in tops
    assert tops - {*sys.stdlib_module_names, "torch", "sitecustomize"} == set()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")
def test_the_verbs_are_these() -> None:
    assert list(VERBS) == [
        "run", "horovod", "check", "bench", "advise", "init", "render", "submit", "status", "logs", "cancel", "list",
        "clean", "top", "watch", "stack", "why", "diff", "report", "export", "env", "explain", "config", "lab",
        "completion",
    ]  # fmt: skip


def test_the_flags_of_run_are_these() -> None:
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    shown = {p.opts[0] for p in command.params if isinstance(p, click.Option) and not p.hidden}
    assert shown == {
        "--metrics-dir",
        "--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id", "--master-addr",
        "--master-port", "--local-addr", "--standalone", "--backend", "-m", "--no-python", "--log-dir", "-r", "-t",
        "--local-ranks-filter", "--cluster", "--dry-run", "--container", "--container-runtime", "--ignore",
        "--max-restarts", "--restart-on-error", "--standby", "--capacity-timeout", "--hang-timeout", "--checkpoint-dir",
        "--checkpoint-every", "--shutdown-timeout", "--compress", "--bucket-mb", "--status",
    }  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    commands = command.commands.values() if isinstance(command, click.Group) else [command]
    for each in commands:
        assert each.help
        assert "allranks" in each.help


def test_the_version_is_the_package_s() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "allranks", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == f"allranks {allranks.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "allranks", "completion", shell], capture_output=True, text=True, check=True, timeout=60
    )
    assert "_ALLRANKS_COMPLETE" in result.stdout


def documented_functions() -> list[tuple[str, object]]:
    found = []
    for info in pkgutil.walk_packages(allranks.__path__, "allranks."):
        if info.name.endswith("__main__"):
            continue
        if info.name == "allranks.horovod.state" and importlib.util.find_spec("horovod") is None:
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != info.name or not callable(value):
                continue
            members = [value, *vars(value).values()] if inspect.isclass(value) else [value]
            for member in members:
                text = inspect.getdoc(member) if callable(member) else None
                if text and "\nArgs:\n" in text:
                    found.append((f"{info.name}.{name}.{getattr(member, '__name__', '')}", member))
    return found


def test_documented_arguments_are_the_signature_s() -> None:
    functions = documented_functions()
    assert functions
    for name, function in functions:
        section = (inspect.getdoc(function) or "").partition("\nArgs:\n")[2]
        section = re.split(r"\n\s*\n|\n(?=\S)", section)[0]
        documented = re.findall(r"^ {4}(\w+(?:, \w+)*): ", section, re.MULTILINE)
        names = {part for group in documented for part in group.split(", ")}
        assert names, name
        assert names <= set(inspect.signature(function).parameters), name  # type: ignore[arg-type]


def test_files_stay_short_enough_to_read() -> None:
    """A file that holds one state machine whole may be longer, and its first lines say so."""
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    whole = {name for name in lengths if "One state machine, whole" in (ROOT / name).read_text()[:900]}
    assert len(whole) <= 2
    assert {name: length for name, length in lengths.items() if length > (480 if name in whole else 420)} == {}


def test_no_file_is_a_grab_bag() -> None:
    assert not {p.stem for p in SOURCES} & {"utils", "common", "helpers", "base", "manager", "misc"}


TWICE = {
    "ends.py": "guard/X and why/readings/X answer the same question, for a running job and for a dead one",
    "ledger.py": "model/X has the data of X",
    "judge.py": "preflight/X before the start, watch/X in a running job: the same question",
    "links.py": "preflight/X before the start, guard/X in a running job: the same question",
    "watch.py": "horovod/X watches what guard/X watches, without an agent",
    "node.py": "host/X reads what a machine is, watch/X what the job's processes on it do",
    "room.py": "model/X has the data of X",
    "traffic.py": "model/X has the data of X; each floor has its part of it",
}
"""File names that occur twice although no rule of the test below allows them, with the reason."""


def test_a_public_class_name_occurs_once() -> None:
    classes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}


def test_a_file_name_says_which_file_it_is() -> None:
    """A verb in cli stands beside what does it, a probe or a fault beside what reads the machine."""
    halves = ("cli", "causes/probes", "lab/faults/running", "lab/faults")
    folders: dict[str, list[str]] = {}
    for path in SOURCES:
        folder = str(path.relative_to(ROOT / "src/allranks").parent)
        if path.name not in {"__init__.py", *TWICE} and folder not in halves:
            folders.setdefault(path.name, []).append(folder)
    assert {name: places for name, places in folders.items() if len(places) > 1} == {}
    names = [path.name for path in SOURCES]
    assert {name for name in TWICE if names.count(name) < 2} == set()


def test_no_variable_is_called_each() -> None:
    """It says nothing about what it holds."""
    found = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Name) and node.id == "each") or (isinstance(node, ast.arg) and node.arg == "each")
    }
    assert found == set()


def test_files_named_in_the_architecture_exist() -> None:
    paths = [f"/{path.relative_to(ROOT)}" for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`(\w+/[\w/]+\.py)`", (ROOT / "docs/explanation/architecture.md").read_text()))
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in paths)] == []


def test_pinned_torch_is_the_tested_one() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in pins


def test_direct_dependencies_are_these() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.split(r"[>=<]", name)[0] for name in project["dependencies"]} == {
        "click", "hyperscan", "jinja2", "msgspec", "psutil", "py-spy", "zstandard",
    }  # fmt: skip
