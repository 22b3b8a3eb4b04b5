"""Is `allranks run` what torchrun is to a script and a command line, and one line where the command line is wrong?"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from conftest import Allranks, allranks_command, clean_env, write

PRINT_ENVIRONMENT = "import json, os\nprint(json.dumps(dict(os.environ)))\n"
PRINT_ARGUMENTS = "import json, sys\nprint(json.dumps(sys.argv))\n"
SPEAK = "import os, sys\nrank = os.environ['RANK']\nprint('out', rank)\nprint('err', rank, file=sys.stderr)\n"

NASTY = [
    "",
    " ",
    "two words",
    "it's",
    'say "no"',
    "line\nbreak",
    "--epochs",
    "-m",
    "--",
    "$HOME",
    "a\\b",
    "*",
    "ünïcode",
    "${rank}",
]
"""What shells, optparse and templates stumble over."""


# What a script sees


@pytest.mark.torch
def test_the_environment_is_a_superset_of_torchruns(allranks: Allranks, tmp_path: Path):
    script = "import json, os\nopen(os.environ['OUT'] + os.environ['RANK'], 'w').write(json.dumps(dict(os.environ)))\n"
    write(tmp_path / "show.py", script)
    flags = ["--nproc-per-node", "2", "--role", "trainer", "--rdzv-id", "job7", "--master-port", "0", "show.py"]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *flags],
        cwd=tmp_path,
        env=clean_env(os.environ, OUT="torchrun"),
        timeout=60,
        check=True,
    )
    assert allranks("run", *flags, env={"OUT": "allranks"}).returncode == 0

    for rank in (0, 1):
        theirs: dict[str, str] = json.loads((tmp_path / f"torchrun{rank}").read_text())
        ours: dict[str, str] = json.loads((tmp_path / f"allranks{rank}").read_text())
        assert set(theirs) - set(ours) == set()
        equal = {name: ours[name] for name in EQUAL}
        assert equal == EQUAL | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
        assert equal == {name: theirs[name] for name in EQUAL}


EQUAL = {
    "RANK": "",
    "LOCAL_RANK": "",
    "ROLE_RANK": "",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_NAME": "trainer",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
"""Variables whose value a script may rely on; the three empty ones are the rank's."""


def test_what_the_user_set_is_kept(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "show.py", PRINT_ENVIRONMENT)
    own = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9", "PYTHONUNBUFFERED": "x", "NASTY": "a\nb 'c'"}
    seen: dict[str, str] = json.loads(allranks("run", "show.py", env=own).stdout)
    assert {name: seen[name] for name in own} == own


def test_arguments_arrive_unchanged(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "show.py", PRINT_ARGUMENTS)
    result = allranks("run", "show.py", *NASTY)
    assert json.loads(result.stdout) == ["show.py", *NASTY]


@pytest.mark.parametrize("name", ['it\'s my "own" * of\ntwo lines, größe 2.py', "train"])
def test_a_script_may_have_any_name(allranks: Allranks, tmp_path: Path, name: str):
    script = write(tmp_path / "in a dir" / name, PRINT_ARGUMENTS)
    result = allranks("run", script, "--x")
    assert json.loads(result.stdout) == [str(script), "--x"]


def test_a_script_whose_name_begins_with_a_dash_is_no_option_of_python(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "-x.py", PRINT_ARGUMENTS)
    assert json.loads(allranks("run", "--", "-x.py", "-v").stdout) == ["./-x.py", "-v"]


def test_a_run_directory_may_have_any_name(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "show.py", PRINT_ARGUMENTS)
    directory = tmp_path / "logs of 'me'\nhere"
    assert allranks("run", "--log-dir", directory, "show.py").returncode == 0
    assert json.loads((directory / "latest/attempt_0/verdict.json").read_text())["exit_code"] == 0
    assert not (tmp_path / "runs").exists()


def test_a_module_is_run_as_python_does(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "package/__init__.py", "")
    write(tmp_path / "package/train.py", PRINT_ARGUMENTS + "print(__name__, __package__)\n")
    result = allranks("run", "-m", "package.train", "-x")
    arguments, names = result.stdout.splitlines()
    assert json.loads(arguments) == [str(tmp_path / "package/train.py"), "-x"]
    assert names == "__main__ package"


def test_a_program_is_run_as_it_is(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.sh", '#!/bin/sh\necho "$RANK of $WORLD_SIZE: $1"\n').chmod(0o755)
    result = allranks("run", "--no-python", "./train.sh", "a b")
    assert result.stdout == "0 of 1: a b\n"
    assert allranks("run", "--no-python", "echo", "found on PATH").stdout == "found on PATH\n"


def test_local_rank_in_arguments_is_replaced(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "show.py", PRINT_ARGUMENTS)
    result = allranks("run", "--nproc-per-node", "2", "show.py", "--gpu=${local_rank}", "${local_rank}")
    lines = sorted(line.partition("] ")[2] for line in result.stdout.splitlines())
    assert [json.loads(line) for line in lines] == [["show.py", "--gpu=0", "0"], ["show.py", "--gpu=1", "1"]]


def test_standard_input_reaches_the_worker(tmp_path: Path):
    write(tmp_path / "read.py", "import sys\nprint(sys.stdin.read().upper())\n")
    result = subprocess.run(
        allranks_command("run", "read.py"),
        cwd=tmp_path,
        env=clean_env(os.environ),
        input="three\nlines\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "THREE\nLINES\n\n"


# Flags


def test_an_error_about_an_option_that_nobody_typed_names_the_variable(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "")
    wrong = {"PET_NPROC_PER_NODE": "x"}
    text = "error: --nproc-per-node 'x': expected a number from 1 to 65536, auto, gpu or cpu"
    assert allranks("run", "train.py", env=wrong).stderr == f"{text} (--nproc-per-node is from PET_NPROC_PER_NODE)\n"
    assert allranks("run", "--nproc_per_node=x", "train.py", env=wrong).stderr == f"{text}\n"
    result = allranks("run", "train.py", env={"PET_MAX_RESTARTS": "x"})
    assert result.stderr.endswith(" (--max-restarts is from PET_MAX_RESTARTS); see allranks run --help\n")


def test_both_spellings_and_pet_variables_mean_the_same(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "show.py", "import os\nprint(os.environ['WORLD_SIZE'], os.environ['ROLE_NAME'])\n")
    results = [
        allranks("run", "--nproc-per-node=2", "--role=x", "show.py"),
        allranks("run", "--nproc_per_node", "2", "--role", "x", "show.py"),
        allranks("run", "show.py", env={"PET_NPROC_PER_NODE": "2", "PET_ROLE": "x"}),
        allranks(
            "run", "--nproc-per-node=2", "show.py", env={"PET_NPROC_PER_NODE": "3", "PET_ROLE": "x"}, timeout_s=20
        ),
    ]
    for result in results:
        assert sorted(line.partition("] ")[2] for line in result.stdout.splitlines()) == ["2 x", "2 x"]


def test_standalone_ignores_what_the_environment_says(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "show.py", "import os\nprint(os.environ['WORLD_SIZE'])\n")
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    result = allranks("run", "--standalone", "--nproc-per-node", "1", "show.py", env=step)
    assert (result.returncode, result.stdout) == (0, "1\n")


def test_unused_flags_are_accepted_and_said_to_be_unused(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "print('ran')\n")
    flags = [
        "--max-restarts=3",
        "--rdzv_backend",
        "c10d",
        "--monitor-interval=1",
        "--start-method",
        "spawn",
        "--run-path",
    ]
    result = allranks("run", *flags, "train.py")
    assert (result.returncode, result.stdout) == (0, "ran\n")
    assert result.stderr.splitlines()[:4] == [
        "allranks: --rdzv-backend has no effect: the leader's roll call replaces the rendezvous",
        "allranks: --monitor-interval has no effect: workers are watched without polling",
        "allranks: --start-method has no effect: workers are started as new processes",
        "allranks: --run-path has no effect: the script is always started directly",
    ]


# The terminal and the files


def test_several_ranks_have_a_prefix_and_one_has_none(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "speak.py", SPEAK)
    name = {"SLURMD_NODENAME": "node07"}
    one = allranks("run", "speak.py", env=name)
    assert one.stdout == "out 0\n"
    assert "\nerr 0\n" in one.stderr
    two = allranks("run", "--nproc-per-node", "2", "speak.py", env=name)
    assert sorted(two.stdout.splitlines()) == ["[node07 r0] out 0", "[node07 r1] out 1"]
    assert {"[node07 r0] err 0", "[node07 r1] err 1"} <= set(two.stderr.splitlines())


def test_output_of_one_rank_is_shown_byte_by_byte(tmp_path: Path):
    write(tmp_path / "speak.py", "import os\nos.write(1, b'a\\r50%\\r100%\\x00\\xff no newline')\n")
    result = subprocess.run(
        allranks_command("run", "speak.py"), cwd=tmp_path, env=clean_env(os.environ), capture_output=True, timeout=60
    )
    assert result.stdout == b"a\r50%\r100%\x00\xff no newline"


@pytest.mark.parametrize(
    ("flags", "out", "err"),
    [
        ([], {0, 1, 2}, {0, 1, 2}),
        (["--redirects", "1"], set(), {0, 1, 2}),
        (["-r", "3"], set(), set()),
        (["--redirects", "0:1,2:3"], {1}, {0, 1}),
        (["--redirects", "3", "--tee", "1:3"], {1}, {1}),
        (["--tee", "3"], {0, 1, 2}, {0, 1, 2}),
        (["--local-ranks-filter", "0,2"], {0, 2}, {0, 2}),
        (["--local_ranks_filter=1", "-r", "2"], {1}, set()),
    ],
)
def test_flags_choose_what_the_terminal_shows_and_files_have_everything(
    allranks: Allranks, tmp_path: Path, flags: list[str], out: set[int], err: set[int]
):
    write(tmp_path / "speak.py", SPEAK)
    node = {"SLURMD_NODENAME": "node07"}
    result = allranks("run", "--nproc-per-node", "3", *flags, "speak.py", env=node)
    assert {int(rank) for rank in re.findall(r"^\[node07 r\d\] out (\d)$", result.stdout, re.MULTILINE)} == out
    assert {int(rank) for rank in re.findall(r"^\[node07 r\d\] err (\d)$", result.stderr, re.MULTILINE)} == err
    for rank in range(3):
        stem = tmp_path / f"runs/latest/attempt_0/node07/rank_{rank}"
        assert stem.with_suffix(".out").read_text() == f"out {rank}\n"
        assert stem.with_suffix(".err").read_text() == f"err {rank}\n"


def test_secrets_are_in_no_file_of_the_run_directory(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "")
    token = {"MY_TOKEN": "hunter2-hunter2", "ALLRANKS_SECRET": "sesame-sesame"}
    assert allranks("run", "train.py", "--token=hunter2-hunter2", env=token).returncode == 0
    text = "".join(path.read_text(errors="replace") for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert "--token=(hidden)" in text
    assert "hunter2" not in text
    assert "sesame" not in text


# Ports


def test_a_port_in_use_is_left_to_its_holder_who_is_named(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "show.py", "import os\nprint(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])\n")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        result = allranks("run", "--master-port", str(port), "show.py")
    address, taken = result.stdout.split()
    assert address == "127.0.0.1"
    assert port < int(taken) < port + 16
    said = rf"allranks: port {port} is in use by [\w.-]+ \(pid {os.getpid()}, \w+\); taking {taken}"
    assert re.fullmatch(said, result.stderr.splitlines()[0])


def test_port_0_is_any_free_one(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "show.py", "import os\nprint(os.environ['MASTER_PORT'])\n")
    result = allranks("run", "--master-port", "0", "show.py")
    assert int(result.stdout) > 1023
    assert "in use" not in result.stderr


# Wrong command lines: exit 2, one line, no run directory


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["gone.py"],
            "gone.py: no such script; expected a Python file (for a module add -m, for another program --no-python)",
        ),
        (
            ["accelerate", "launch", "train.py"],
            "accelerate: allranks starts the ranks itself, in place of it: allranks run train.py",
        ),
        (["-m", "gone.train"], f"-m gone.train: no such module in this directory or for {sys.executable}"),
        (
            ["--no-python", "./gone"],
            "./gone: no such program; --no-python expects a path, or a name on PATH",
        ),
        (["train.sh"], "train.sh: a shell script, not a Python file; add --no-python"),
        (
            ["--nproc-per-node", "0", "train.py"],
            "--nproc-per-node '0': expected a number from 1 to 65536, auto, gpu or cpu",
        ),
        (
            ["--nproc-per-node", "x", "train.py"],
            "--nproc-per-node 'x': expected a number from 1 to 65536, auto, gpu or cpu",
        ),
        (
            ["--nproc-per-node=-1", "train.py"],
            "--nproc-per-node '-1': expected a number from 1 to 65536, auto, gpu or cpu",
        ),
        (
            ["--nnodes", "0", "train.py"],
            "--nnodes '0': expected a number of at least 1, or MIN:MAX, for example 6 or 4:6",
        ),
        (
            ["--nnodes", "4:2", "train.py"],
            "--nnodes '4:2': expected a number of at least 1, or MIN:MAX, for example 6 or 4:6",
        ),
        (
            ["--nnodes", "2", "train.py"],
            "--nnodes 2: the address of the first node is missing; add the same --rdzv-endpoint HOST:PORT on all nodes",
        ),
        (
            ["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a", "train.py"],
            "--node-rank 2: expected 0 to 1 for --nnodes 2",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "a:b:c", "train.py"],
            "--rdzv-endpoint 'a:b:c': expected HOST or HOST:PORT, for example node01:29500",
        ),
        (
            ["--rdzv-endpoint", "a:1", "--master-addr", "b", "train.py"],
            "--rdzv-endpoint a:1 and --master-addr b contradict each other",
        ),
        (["-m", "--no-python", "x"], "-m and --no-python contradict each other: a module is run by Python"),
        (
            ["--redirects", "4", "train.py"],
            "--redirects '4': expected 0, 1, 2 or 3, for all local ranks or for each, for example 0:3,1:2",
        ),
        (
            ["--local-ranks-filter", "a", "train.py"],
            "--local-ranks-filter 'a': expected local ranks, for example 0,1",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_one_line(allranks: Allranks, tmp_path: Path, arguments: list[str], message: str):
    write(tmp_path / "train.py", "")
    write(tmp_path / "train.sh", "python train.py\n")
    result = allranks("run", *arguments)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"error: {message}\n")
    assert not (tmp_path / "runs").exists()


def test_an_unknown_flag_is_one_line_with_the_flag_that_was_meant(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "")
    result = allranks("run", "--nproc-per-nod", "2", "train.py")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: no such option ")
    assert "--nproc-per-nod" in result.stderr
    assert "did you mean" in result.stderr.lower()
    assert "--nproc-per-node" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_no_script_is_one_line(allranks: Allranks, tmp_path: Path):
    result = allranks("run")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr == "error: missing argument 'SCRIPT'; see allranks run --help\n"
    result = allranks("run", "--standalone", "--bucket-mb", "train.py")
    took = "--bucket-mb took 'train.py' as its value"
    assert result.stderr == f"error: missing argument 'SCRIPT': {took}; see allranks run --help\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[network]\nport = "29k"\n', '[network] port = "29k": expected an integer from 1 to 65535, for example 29500'),
        ("[network]\nprot = 29500\n", '[network] prot = 29500: unknown key, did you mean "port"?'),
        ("", "is empty: expected at least one table, for example [cluster] with a name"),
        (
            '[network]\ndata = "10.0.0.0/24"\n[[node]]\nname = "a"\naddress = "10.0.0.1"\n'
            '[[node]]\nname = "a"\naddress = "10.0.0.2"\n',
            '[[node]] 2 name = "a": [[node]] 1 has the same name: expected each name once',
        ),
        (
            '[[node]]\nname = "node\\u001b01"\naddress = "10.0.0.1"\n',
            r'[[node]] 1 name = "node\x1b01": expected a host name, for example "node01"',
        ),
    ],
    ids=["bad type", "unknown key", "empty file", "node twice", "control characters"],
)
def test_a_wrong_cluster_toml_is_one_line(allranks: Allranks, tmp_path: Path, text: str, message: str):
    write(tmp_path / "train.py", "")
    write(tmp_path / "cluster.toml", text)
    result = allranks("run", "--cluster", "cluster.toml", "train.py")
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"error: cluster.toml: {message}\n")
    assert not (tmp_path / "runs").exists()


def test_a_data_subnet_that_no_interface_is_in_is_one_line(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "")
    write(tmp_path / "cluster.toml", '[network]\ndata = "203.0.113.0/24"\n')
    result = allranks("run", "train.py", env={"SLURMD_NODENAME": "node07"})
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert (
        "[network] data = 203.0.113.0/24: no interface of node07 is in that subnet; it has lo 127.0.0.1"
        in result.stderr
    )
    assert not (tmp_path / "runs").exists()


def test_a_cluster_file_that_is_not_there_is_one_line(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", "")
    result = allranks("run", "--cluster", "gone.toml", "train.py")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: gone.toml: cannot be read: no such file or directory: expected ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("source", ["flag", "file"])
def test_nccl_without_gpus_is_refused_with_node_and_numbers(allranks: Allranks, tmp_path: Path, source: str):
    write(tmp_path / "train.py", "")
    flags = ["--backend", "nccl"] if source == "flag" else []
    if source == "file":
        write(tmp_path / "cluster.toml", '[train]\nbackend = "nccl"\n')
    without: dict[str, Any] = {"SLURMD_NODENAME": "node07", "CUDA_VISIBLE_DEVICES": ""}
    result = allranks("run", *flags, "--nproc-per-node", "2", "train.py", env=without)
    said = "error: backend nccl needs a GPU for each rank, but node07 has 0 GPUs for 2 ranks; use --backend gloo\n"
    assert (result.returncode, result.stdout) == (78, "")
    assert result.stderr.endswith(said)
    assert "Traceback" not in result.stderr


def test_plan_starts_nothing(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", textwrap.dedent("open('ran', 'w')"))
    result = allranks("run", "--plan", "train.py")
    assert result.returncode == 0
    assert "one rank by default" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
