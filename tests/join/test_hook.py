"""Does an unmodified script under `allranks run` see what it would see without us, but for a group that names ranks?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conftest import Allranks, clean_env, free_port, write

NODE = {"SLURMD_NODENAME": "node07", "PYTHONIOENCODING": "utf-8"}
SUM_RANKS = Path(__file__).parents[1] / "scripts" / "sum_ranks.py"


def run_python(tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The script without us."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=clean_env(os.environ, **env),
        capture_output=True,
        text=True,
        timeout=60,
    )


def words_of(tmp_path: Path, rank: int) -> str:
    """What a rank wrote to stderr; the terminal leaves out what the verdict says better."""
    return (tmp_path / f"runs/latest/attempt_0/node07/rank_{rank}.err").read_text()


def only_message(tmp_path: Path) -> tuple[list[int], str]:
    """Ranks and message of the only finding that stopped the job; a busy machine may bring warnings."""
    verdict = json.loads((tmp_path / "runs/latest/attempt_0/verdict.json").read_text())
    (finding,) = (each for each in verdict["findings"] if each["severity"] == "fail")
    return finding["ranks"], finding["message"]


# What the script sees


@pytest.mark.parametrize("python_path", ["", "{tmp}/extra", "relative:{tmp}/with space:{tmp}/gone"])
def test_sys_path_is_as_without_us(allranks: Allranks, tmp_path: Path, python_path: str):
    write(tmp_path / "show.py", "import json, sys\nprint(json.dumps(sys.path))\n")
    env = {"PYTHONPATH": python_path.format(tmp=tmp_path)} if python_path else {}
    with_us: list[str] = json.loads(allranks("run", "show.py", env=env).stdout)
    without: list[str] = json.loads(run_python(tmp_path, "show.py", **env).stdout)
    assert not [entry for entry in with_us if "allranks/join" in entry]
    assert with_us == without


def test_children_of_the_script_find_the_hook_and_the_users_path(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "show.py", "import os\nprint(os.environ['PYTHONPATH'])\n")
    result = allranks("run", "show.py", env={"PYTHONPATH": f"{tmp_path}/a:{tmp_path}/b"})
    first, *rest = result.stdout.rstrip("\n").split(":")
    assert first.endswith("/allranks/join/site")
    assert rest == [f"{tmp_path}/a", f"{tmp_path}/b"]


def test_a_script_without_torch_loads_none_of_it_and_little_else(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "show.py", "import json, sys\nprint(json.dumps(sorted(sys.modules)))\n")
    with_us = set(json.loads(allranks("run", "show.py").stdout))
    without = set(json.loads(run_python(tmp_path, "show.py").stdout))
    assert not [
        name for name in with_us if name.partition(".")[0] in ("torch", "numpy", "allranks", "msgspec", "click")
    ]
    assert {name for name in with_us - without if "allranks" in name} == {
        "_allranks_hook",
        "_allranks_inside",
        "_allranks_inside.handlers",
        "_allranks_inside.lost_output",
    }
    assert len(with_us - without) < 60


def test_the_users_sitecustomize_still_runs(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "site/sitecustomize.py", "import sys\nsys.marked_by_user = __file__\n")
    write(tmp_path / "show.py", "import sys, sitecustomize\nprint(sys.marked_by_user, sitecustomize.__file__)\n")
    result = allranks("run", "show.py", env={"PYTHONPATH": str(tmp_path / "site")})
    assert result.stdout == f"{tmp_path}/site/sitecustomize.py {tmp_path}/site/sitecustomize.py\n"


@pytest.mark.parametrize("fault", ["1 / 0\n", "import no_such_module\n", "raise SystemExit(7)\n", "x = (\n"])
def test_a_broken_sitecustomize_of_the_user_breaks_as_without_us(allranks: Allranks, tmp_path: Path, fault: str):
    write(tmp_path / "site/sitecustomize.py", fault)
    write(tmp_path / "train.py", "print('ran')\n")
    env = {"PYTHONPATH": str(tmp_path / "site")}
    without = run_python(tmp_path, "train.py", **env)
    with_us = allranks("run", "train.py", env=env)
    assert with_us.stdout == without.stdout
    assert (with_us.returncode == 0) == (without.returncode == 0)
    last = without.stderr.rstrip().splitlines()[-1:]
    assert not last or last[0] in with_us.stderr


def test_a_module_is_hooked_as_well(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "package/train.py", "import os\nif os.environ['RANK'] == '0':\n    raise ValueError('in a module')\n"
    )
    result = allranks("run", "-m", "package.train")
    assert result.returncode == 1
    assert only_message(tmp_path) == ([0], "ValueError: in a module (train.py:3 in <module>)")


def test_the_users_excepthook_is_called_and_the_exception_recorded(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import sys

        previous = sys.excepthook

        def mine(kind, value, trace):
            print("mine:", value)
            previous(kind, value, trace)

        sys.excepthook = mine
        raise ValueError("seen by both")
        """,
    )
    result = allranks("run", "train.py")
    assert result.stdout == "mine: seen by both\n"
    assert only_message(tmp_path) == ([0], "ValueError: seen by both (train.py:10 in <module>)")


def test_an_excepthook_that_does_not_call_ours_loses_the_record_only(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import sys
        sys.excepthook = lambda kind, value, trace: print("mine alone:", value, file=sys.stderr)
        raise ValueError("bad batch")
        """,
    )
    result = allranks("run", "train.py")
    assert result.returncode == 1
    assert only_message(tmp_path) == ([0], "ended with exit code 1")
    assert "\n  seen mine alone: bad batch\n" in result.stderr


def test_spawned_processes_work_and_record_nothing(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import multiprocessing, sys

        def square(x):
            return x * x

        def fail():
            raise ValueError("in the child")

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            with context.Pool(2) as pool:
                print(pool.map(square, [1, 2, 3]))
            child = context.Process(target=fail)
            child.start()
            child.join()
            print(child.exitcode)
        """,
    )
    result = allranks("run", "train.py", env=NODE)
    assert (result.returncode, result.stdout) == (0, "[1, 4, 9]\n1\n")
    assert not (tmp_path / "runs/latest/attempt_0/node07/rank_0.error.json").exists()


def test_each_line_is_written_when_it_is_printed_also_by_children(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "child.py", "import os\nprint('of a child')\nos._exit(0)\n")
    write(
        tmp_path / "show.py",
        "import os, subprocess, sys\nprint('own', flush=False)\nsubprocess.run([sys.executable, 'child.py'])\n"
        "os._exit(0)  # what is in a buffer is lost\n",
    )
    assert allranks("run", "show.py", env={"PYTHONUNBUFFERED": ""}).stdout == "own\nof a child\n"


def test_the_hook_can_be_left_out(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "show.py", "import os, sys\nprint('_allranks_hook' in sys.modules, os.environ.get('PYTHONPATH'))\n"
    )
    assert allranks("run", "show.py").stdout.startswith("True ")
    assert allranks("run", "show.py", env={"ALLRANKS_HOOK": "0"}).stdout == "False None\n"


def test_an_isolated_python_is_not_hooked_and_runs_all_the_same(allranks: Allranks, tmp_path: Path):
    write(tmp_path / "show.py", "import sys\nprint('_allranks_hook' in sys.modules)\n")
    result = allranks("run", "--no-python", sys.executable, "-I", "show.py")
    assert (result.returncode, result.stdout) == (0, "False\n")


def test_a_python_without_allranks_is_hooked(allranks: Allranks, tmp_path: Path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    write(
        tmp_path / "train.py",
        """
        import importlib.util, sys
        print(importlib.util.find_spec("allranks"), importlib.util.find_spec("torch"), "_allranks_hook" in sys.modules)
        raise ValueError("from another Python")
        """,
    )
    result = allranks("run", "--no-python", "venv/bin/python", "train.py")
    assert result.stdout == "None None True\n"
    assert only_message(tmp_path) == ([0], "ValueError: from another Python (train.py:3 in <module>)")


# The group


@pytest.mark.torch
def test_a_group_of_two_says_that_all_are_up(allranks: Allranks):
    result = allranks("run", "--nproc-per-node", "2", SUM_RANKS, env=NODE)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[node07 r0] rank 0 of 2 sum 3", "[node07 r1] rank 1 of 2 sum 3"]
    assert "[node07 r0] allranks: all 2 ranks are up (gloo), " in result.stderr


@pytest.mark.torch
def test_without_the_hook_a_group_forms_as_torch_does_it(allranks: Allranks):
    # Nobody holds the port while the workers start: it must be no other test's.
    ranks = ("--master-port", str(free_port()), "--nproc-per-node", "2", SUM_RANKS)
    result = allranks("run", *ranks, env=NODE | {"ALLRANKS_HOOK": "0"})
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[node07 r0] rank 0 of 2 sum 3", "[node07 r1] rank 1 of 2 sum 3"]
    assert "ranks are up" not in result.stderr


@pytest.mark.torch
def test_a_rank_that_never_comes_is_named(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import datetime, os, pathlib, time

        if os.environ["RANK"] == "1":
            time.sleep(90)
        import torch.distributed as dist
        pathlib.Path(f"rank {os.environ['RANK']} has torch").touch()  # whoever waits does so for rank 1 alone
        while len([*pathlib.Path().glob("rank * has torch")]) < 2:
            time.sleep(0.01)
        try:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
        except dist.DistStoreError as exc:
            print("caught", type(exc).__name__)
            raise
        """,
    )
    result = allranks("run", "--nproc-per-node", "3", "train.py", env=NODE)
    assert result.returncode == 1
    assert "[node07 r0] caught DistStoreError\n" in result.stdout
    told = "rank 1 (node07); 2 of 3 ranks have joined"
    said = f"DistStoreError: allranks: init_process_group waited 4 s for {told}; look at "
    assert said in words_of(tmp_path, 0)
    assert only_message(tmp_path) == ([1], "it never reached init_process_group, although its process ran")
    assert "AR401 missing-rank   node07 · rank 1" in result.stderr
    assert f"[node07 r0] allranks: still waiting in init_process_group after 3 s for {told}\n" in result.stderr


@pytest.mark.torch
def test_a_missing_rank_0_is_named_though_it_holds_the_store(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import datetime, os, time

        if os.environ["RANK"] == "0":
            time.sleep(90)
        import torch.distributed as dist
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
        """,
    )
    result = allranks("run", "--nproc-per-node", "2", "train.py", env=NODE)
    assert result.returncode == 1
    said = "allranks: init_process_group waited 2 s for rank 0 (node07) to open the store; look at "
    assert said in words_of(tmp_path, 1)
    assert only_message(tmp_path) == ([0], "it never reached init_process_group, although its process ran")


@pytest.mark.torch
def test_a_rank_that_ends_with_0_before_the_group_is_named_long_before_the_timeout(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import os, sys
        import torch.distributed as dist

        if os.environ["RANK"] == "1":
            sys.exit(0)
        dist.init_process_group("gloo")  # 600 s
        """,
    )
    result = allranks("run", "--nproc-per-node", "2", "train.py", env=NODE, timeout_s=120)
    assert result.returncode == 1
    said = "exited with code 0 before it reached init_process_group, where rank 0 waited for it"
    assert only_message(tmp_path) == ([1], f"it {said}")
    assert "AR401 missing-rank   node07 · rank 1" in result.stderr


@pytest.mark.torch
def test_a_group_can_be_made_again_by_name_default_and_address(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import os
        import torch, torch.distributed as dist

        def check():
            total = torch.tensor([float(os.environ["RANK"]) + 1])
            dist.all_reduce(total)
            assert total.item() == 3, total

        dist.init_process_group("gloo")
        check()
        dist.destroy_process_group()

        dist.init_process_group()  # backend left open
        check()
        dist.destroy_process_group()

        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        dist.init_process_group("gloo", init_method=address, rank=int(os.environ["RANK"]), world_size=2)
        check()
        dist.destroy_process_group()

        torch.distributed.init_process_group(backend="cpu:gloo")
        check()
        dist.destroy_process_group()
        print("four groups")
        """,
    )
    result = allranks("run", "--nproc-per-node", "2", "train.py", env=NODE)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[node07 r0] four groups", "[node07 r1] four groups"]
    assert result.stderr.count("ranks are up") == 1


FORMS_SLOWLY = """
import os, time, allranks
import torch.distributed as dist
from torch.distributed import distributed_c10d

class Slow(distributed_c10d.ProcessGroupGloo):
    def __init__(self, store, *args, **kwargs):
        super().__init__(store, *args, **kwargs)
        if os.environ["RANK"] == "1":
            time.sleep(1)
        store.set("a key of rank " + os.environ["RANK"], "")

distributed_c10d.ProcessGroupGloo = Slow
"""


@pytest.mark.torch
@pytest.mark.parametrize("form", ["dist.init_process_group('gloo')", "with allranks.session() as s:"])
def test_a_rank_that_fails_at_once_lets_the_others_form_the_group(allranks: Allranks, tmp_path: Path, form: str):
    write(tmp_path / "train.py", f"{FORMS_SLOWLY}{form}\n{'    ' * form.endswith(':')}raise ValueError('no data')")
    result = allranks("run", "--nproc-per-node", "2", "train.py", env=NODE)
    assert result.returncode == 1
    assert "all 2 ranks failed alike" in result.stderr, result.stderr


REFUSED = {
    "dist.init_process_group('nccl')": "asks for nccl, but node07 has no GPU; use gloo",
    "dist.init_process_group('gloo', rank=int(os.environ['RANK']), world_size=4)": "asks for 4 ranks, but this "
    "job has 2",
}


@pytest.mark.torch
@pytest.mark.parametrize("call", REFUSED)
def test_a_group_that_cannot_form_is_refused_at_once(call: str, allranks: Allranks, tmp_path: Path):
    write(tmp_path / "train.py", f"import os, torch.distributed as dist\n{call}\n")
    result = allranks("run", "--nproc-per-node", "2", "train.py", env=NODE | {"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 1
    _, message = only_message(tmp_path)
    said = f"RuntimeError: allranks: init_process_group {REFUSED[call]}"
    assert message.startswith(said)
    assert f"\n  {said}" in result.stderr


@pytest.mark.torch
def test_a_data_loader_with_spawned_workers_works(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        if __name__ == "__main__":
            data = TensorDataset(torch.arange(8))
            batches = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="spawn")
            print([batch.tolist() for (batch,) in batches])
        """,
    )
    result = allranks("run", "train.py", env=NODE)
    assert (result.returncode, result.stdout) == (0, "[[0, 1, 2, 3], [4, 5, 6, 7]]\n")


@pytest.mark.parametrize("python_path", [":{tmp}/extra", "{tmp}/extra:"])
def test_an_empty_entry_of_pythonpath_stays_the_working_directory(allranks, tmp_path, python_path):
    write(tmp_path / "tools/show.py", "import json, sys\nprint(json.dumps(sys.path))\n")
    env = {"PYTHONPATH": python_path.format(tmp=tmp_path)}
    with_us = json.loads(allranks("run", "tools/show.py", env=env).stdout)
    without = json.loads(run_python(tmp_path, "tools/show.py", **env).stdout)
    assert with_us == without


@pytest.mark.torch
def test_a_group_can_be_made_again_although_a_subgroup_of_the_old_one_lives(allranks: Allranks, tmp_path: Path):
    script = """
        import torch, torch.distributed as dist
        for _ in range(3):
            dist.init_process_group("gloo")
            subgroup = dist.new_group([0, 1])
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 2, total
            dist.destroy_process_group()
    """
    write(tmp_path / "train.py", script)
    result = allranks("run", "--nproc-per-node", "2", "train.py")
    assert result.returncode == 0, result.stderr


# Processes that a worker starts

SPAWNED = """
    import os
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def train(rank, world_size):
        {setting}
        dist.init_process_group("gloo", {arguments})
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(train, args=(2,), nprocs={num_children})
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("setting", "arguments"),
    [
        pytest.param("pass", "rank=1 - int(os.environ['RANK']), world_size=world_size", id="arguments"),
        pytest.param("os.environ['RANK'] = str(1 - int(os.environ['RANK']))", "", id="environment"),
        pytest.param(
            "os.environ['MASTER_PORT'] = '{port}'",
            "rank=1 - int(os.environ['RANK']), world_size=world_size",
            id="own-port",
        ),
    ],
)
def test_a_launcher_within_the_workers_is_refused_at_once(
    allranks: Allranks, tmp_path: Path, setting: str, arguments: str
):
    setting = setting.format(port=free_port())
    write(tmp_path / "train.py", textwrap.dedent(SPAWNED).format(setting=setting, arguments=arguments, num_children=1))
    result = allranks("run", "--nproc-per-node", "2", "train.py", env=NODE)
    assert result.returncode == 2
    said = "allranks: AR502 spawn-inside-srun: multiprocessing (mp.spawn) started this process in a worker; it calls "
    assert said in result.stderr
    _, message = only_message(tmp_path)
    assert message.startswith("multiprocessing (mp.spawn) started this process in a worker; it calls "), message
    assert re.search(r"as rank (\d) of 2, but the worker is RANK=(?!\1)\d of WORLD_SIZE=2, set by allranks", message)


@pytest.mark.torch
def test_the_only_worker_of_a_job_may_start_the_ranks_itself(allranks: Allranks, tmp_path: Path):
    setting, arguments = f"os.environ['MASTER_PORT'] = '{free_port()}'", "rank=rank, world_size=world_size"
    write(tmp_path / "train.py", textwrap.dedent(SPAWNED).format(setting=setting, arguments=arguments, num_children=2))
    result = allranks("run", "train.py", env=NODE)
    assert result.returncode == 0, result.stderr


@pytest.mark.torch
def test_children_may_form_a_group_of_their_own_beside_the_job_s(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import os
        import multiprocessing
        import torch.distributed as dist

        def serve(path):
            dist.init_process_group("gloo", init_method="file://" + path, rank=0, world_size=1)
            dist.destroy_process_group()

        if __name__ == "__main__":
            dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
            code = 0
            if os.environ["RANK"] == "1":
                child = multiprocessing.get_context("spawn").Process(target=serve, args=(os.path.abspath("store"),))
                child.start()
                child.join()
                code = child.exitcode
            dist.barrier()
            dist.destroy_process_group()
            raise SystemExit(code)
        """,
    )
    result = allranks("run", "--nproc-per-node", "2", "train.py", env=NODE)
    assert result.returncode == 0, result.stderr


@pytest.mark.torch
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_session_in_a_child_of_a_worker_is_refused(allranks: Allranks, tmp_path: Path, context: str):
    write(
        tmp_path / "train.py",
        f"""
        import multiprocessing
        import allranks

        def train():
            with allranks.session():
                pass

        if __name__ == "__main__":
            child = multiprocessing.get_context("{context}").Process(target=train)
            child.start()
            child.join()
            raise SystemExit(child.exitcode)
        """,
    )
    result = allranks("run", "--nproc-per-node", "2", "train.py", env=NODE)
    assert result.returncode == 1
    assert re.search("AR502 spawn-inside-srun(:|   node07)", result.stderr)
    assert "started as RANK=" in result.stderr
