"""Do workers in a container know who they are? The runtime is a fake on PATH that forgets what a real one may forget.

It obeys the flags that it gets (--pwd, APPTAINERENV_*), drops every other variable and inherited socket, and runs the
command on this machine. No real runtime was tried here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from allranks.launch.container import enter, find_runtime
from allranks.model.errors import SetupError
from conftest import Allranks

APPTAINER = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
assert words.pop(0) == "exec"
binds = []
while words[0].startswith("--"):
    flag = words.pop(0)
    if flag == "--pwd":
        os.chdir(words.pop(0))
    elif flag == "--bind":
        binds.append(words.pop(0))
image = words.pop(0)
assert image == "my image.sif", image
prefix = "APPTAINERENV_"
env = {{name[len(prefix):]: value for name, value in os.environ.items() if name.startswith(prefix)}}
env["PATH"] = os.environ["PATH"]
env["BINDS"] = " ".join(binds)
os.closerange(3, 64)
os.execvpe(words[0], words, env)
"""


@pytest.fixture
def fake_path(tmp_path: Path) -> str:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "apptainer").write_text(APPTAINER)
    (folder / "apptainer").chmod(0o755)
    (folder / "python3").symlink_to(sys.executable)  # the image's own Python
    return f"{folder}:{os.environ['PATH']}"


def test_identity_is_handed_in_by_name(allranks: Allranks, tmp_path: Path, fake_path: str) -> None:
    (tmp_path / "show.py").write_text(
        "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['ALLRANKS_MEMBERS'], os.getcwd())"
    )
    env = {"PATH": fake_path, "SLURMD_NODENAME": "node01"}
    result = allranks("run", "--container", "my image.sif", "--nproc-per-node", "2", "show.py", env=env)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"[node01 r0] 0 2 node01=0+2 {tmp_path}",
        f"[node01 r1] 1 2 node01=0+2 {tmp_path}",
    ]


def test_the_hook_is_mounted_and_enters(allranks: Allranks, tmp_path: Path, fake_path: str) -> None:
    (tmp_path / "show.py").write_text("import os, sys; print('_allranks_hook' in sys.modules, os.environ['BINDS'])")
    result = allranks("run", "--container", "my image.sif", "show.py", env={"PATH": fake_path})
    assert result.stdout.startswith("True "), result.stderr
    assert "/allranks/join:" in result.stdout
    assert "/allranks/comm:" in result.stdout


@pytest.mark.torch
def test_a_group_forms_although_the_runtime_closes_sockets(allranks: Allranks, tmp_path: Path, fake_path: str) -> None:
    (tmp_path / "train.py").write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total); print('sum', int(total))\n"
        "dist.destroy_process_group()\n"
    )
    # A port of its own: between the two that hold it, it is free for anybody, also for another test's job.
    flags = ["--container", "my image.sif", "--master-port", "0", "--nproc-per-node", "2"]
    result = allranks("run", *flags, "train.py", env={"PATH": fake_path})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 2") == 2


def test_enroot_gets_names_not_values_on_its_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["RANK", "NCCL_SOCKET_IFNAME"]
    before = {"RANK": "3", "NCCL_SOCKET_IFNAME": "eth0"}
    command, env = enter("enroot", "pytorch.sqsh", ["python3", "train.py"], before, names=names, has_gpus=True)
    assert command[:6] == ["enroot", "start", "--env", "RANK", "--env", "NCCL_SOCKET_IFNAME"]
    assert command[-4:] == ['cd "$0" && exec "$@"', str(tmp_path), "python3", "train.py"]
    assert env == before


def test_a_missing_runtime_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SetupError, match="apptainer, singularity, enroot not found on PATH; load its module"):
        find_runtime(None)
