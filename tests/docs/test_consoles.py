"""Do the commands of README, tutorials and how-tos print what these pages show?"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

from allranks.comm.bench_table import to_json
from comm.tables import bench_of
from conftest import is_alive
from docs import picture
from docs.consoles import Terminal, Typed, find_missing, read_examples

ROOT = Path(__file__).parents[2]
HOW_TOS = ROOT / "docs/how-to"
ON_THIS_MACHINE = ("advise", "install", "from-torchrun", "launchers", "slurm")
WITH_TORCH = ("hang", "why", "session", "watch", "scaling")
IN_THE_LAB = ("check", "slow-network", "restarts", "lab")


READERS_OWN = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
import allranks

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 1)

inputs = torch.randn(512, 8)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))

def train_step(model, optimizer, batch):
    inputs, targets = batch
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

"""


def readme_section(title: str) -> str:
    """The section of the README below this heading."""
    text = (ROOT / "README.md").read_text()
    assert f"\n## {title}\n" in text
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def try_examples(text: str, terminal: Terminal, folder: Path) -> None:
    examples = read_examples(text)
    assert any(isinstance(each, Typed) and each.shown for each in examples)
    with contextlib.ExitStack() as running:
        for example in examples:
            if not isinstance(example, Typed):
                name, text = example
                (folder / name).write_text(text)
            elif example.is_kept:
                running.enter_context(terminal.keep(example))
            else:
                output = terminal.type(example)
                missing = find_missing(example.shown, output)
                assert not missing, f"$ {example.command}\nnot printed: {missing}\nprinted:\n{output}"


def test_every_console_of_the_how_tos_is_run() -> None:
    with_consoles = {page.stem for page in HOW_TOS.glob("*.md") if "```console" in page.read_text()}
    assert with_consoles == {*ON_THIS_MACHINE, *WITH_TORCH, *IN_THE_LAB}


@pytest.mark.parametrize(
    "name", [*ON_THIS_MACHINE, *(pytest.param(each, marks=pytest.mark.torch) for each in WITH_TORCH)]
)
@pytest.mark.timeout(600)
def test_a_how_to_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()  # the reader's own script
    if name == "advise":
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "bench.json").write_bytes(to_json(bench_of(100)))  # what `allranks bench` measured
    text = (HOW_TOS / f"{name}.md").read_text()
    if name == "hang":  # its job hangs to the end, and the README shows its stacks
        text += readme_section("Hung, or dead?")
    try_examples(text, Terminal(tmp_path), tmp_path)


@pytest.mark.torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["first-run", "survive-a-crash"])
def test_a_tutorial_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    try_examples((ROOT / f"docs/tutorials/{name}.md").read_text(), Terminal(tmp_path), tmp_path)


@pytest.mark.lab
@pytest.mark.torch
@pytest.mark.timeout(1200)
def test_the_pages_of_the_lab_print_what_they_show(tmp_path: Path) -> None:
    """One test, so that one lab serves all pages."""
    lab = f"test-docs-{os.getpid()}"
    try:
        for page in (ROOT / "docs/tutorials/first-slurm-job.md", *(HOW_TOS / f"{name}.md" for name in IN_THE_LAB)):
            folder = tmp_path / page.stem
            folder.mkdir()
            terminal = Terminal(folder, lab=lab)
            terminal.type(Typed("allranks lab up", [], is_on_host=True))
            try_examples(page.read_text(), terminal, folder)
            terminal.type(Typed("allranks lab heal", [], is_on_host=True))
    finally:
        Terminal(tmp_path, lab=lab).type(Typed("allranks lab down", [], is_on_host=True))


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_the_readme_s_quick_start_prints_what_it_shows(tmp_path: Path) -> None:
    try_examples(readme_section("Quick start"), Terminal(tmp_path), tmp_path)


@pytest.mark.torch
def test_the_picture_shows_what_its_job_prints(tmp_path: Path) -> None:
    """If not: python tests/docs/picture.py."""
    (tmp_path / "train.py").write_text(picture.SCRIPT)
    command, *lines = picture.read_lines(picture.PICTURE.read_text())
    assert command == f"$ {picture.COMMAND}"
    assert find_missing(lines, Terminal(tmp_path).type(Typed(picture.COMMAND, []))) == []


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_the_readme_s_session_trains_and_resumes(tmp_path: Path) -> None:
    """Its block runs as it is, but for the number of steps, below the code that it calls the reader's own."""
    [block] = re.findall(r"```python\n(.*?)```", readme_section("A session in nine lines"), re.DOTALL)
    assert "total=10_000" in block
    for total in (30, 60):
        script = READERS_OWN + block.replace("10_000", str(total)) + "print(f'{state.step} steps are done')\n"
        (tmp_path / "train.py").write_text(script)
        output = Terminal(tmp_path).type(
            Typed("allranks run --nproc-per-node 2 --checkpoint-dir saved train.py; echo code $?", [])
        )
        shown = [f"[vm r{rank}] {total} steps are done" for rank in range(2)]
        resumed = ["[vm r0] allranks: resumed at step 30 from saved/step_30..."] if total == 60 else []
        assert find_missing(["code 0", *shown, *resumed], output) == [], output


def test_a_line_that_was_not_printed_is_found() -> None:
    typed = "$ cat a.txt  # read it\nhello\n...\n# true\ngone\n"
    page = f"Save this as `a.txt`:\n```text\nhello\n```\n```console\n{typed}```\n"
    saved, cat, true = read_examples(page)
    assert saved == ("a.txt", "hello\n")
    assert cat == Typed("cat a.txt", ["hello", "..."])
    assert true == Typed("true", ["gone"], is_on_host=True)
    assert find_missing(["took 1.5 s", "rank 1", "..."], "took 20 s\nrank 2\n") == ["rank 1"]


def test_a_command_with_an_ampersand_goes_on_until_the_page_ends(tmp_path: Path) -> None:
    first = "$ sh -c 'echo $$ >pid; echo here; exec sleep 1000' &\nhere\n"
    try_examples(f"```console\n{first}$ kill -0 $(cat pid) && echo alive\nalive\n```\n", Terminal(tmp_path), tmp_path)
    assert not is_alive(int((tmp_path / "pid").read_text()))
