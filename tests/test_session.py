"""Does `allranks.session()` form the group however the script was started, and say at once why it cannot?"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import allranks as package
from allranks.session import SessionError
from conftest import HANG_S, Allranks, clean_env, free_port, wait_until, without_waiting, write
from forked import ForkedScript
from srun_tasks import task

SUM = Path(__file__).parent / "scripts" / "session_sum.py"
NODE = {"SLURMD_NODENAME": "node07", "PYTHONIOENCODING": "utf-8"}
SUMMED = re.compile(
    r"rank (\d+) of (\d+) local (\d+) of (\d+) on (\S+) sum (\d+) gloo cpu (leads|follows)$", re.MULTILINE
)


class Started:
    """Processes of one job, all started at once in one directory; none of them outlives the test.

    The jobs of all tests have the same name, so each has ports of its own.
    """

    def __init__(self, folder: Path, cluster: Path) -> None:
        self._folder = folder
        self._cluster = write(cluster, f"[network]\nport = {free_port()}\n")
        self._all: list[subprocess.Popen[str] | ForkedScript] = []

    def start(self, *command: object, env: Mapping[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=self._folder,
            env=self._env(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._all.append(process)
        return process

    def fork(self, script: Path, *, env: Mapping[str, str]) -> ForkedScript:
        """As `start`, where torch need not be imported anew."""
        self._all.append(process := ForkedScript(self._folder, script, env=self._env(env)))
        return process

    def _env(self, env: Mapping[str, str]) -> dict[str, str]:
        told = {"PYTHONIOENCODING": "utf-8", "ALLRANKS_CLUSTER": str(self._cluster)}
        return clean_env(os.environ, **told | dict(env))

    def run(self, *command: object, env: Mapping[str, str], within_s: float = HANG_S) -> tuple[int, str, str]:
        return end(self.start(*command, env=env), within_s=within_s)

    def step(self, script: Path, *tasks: Mapping[str, str], forks: bool = False) -> list[tuple[int, str, str]]:
        """Start a task with each environment; exit code, out and err of each."""
        start = self.fork if forks else self.start
        processes = [start(script, env=env) for env in reversed(tasks)]
        return [end(process) for process in reversed(processes)]

    def wait_for_nodes(self, seconds: int) -> None:
        with self._cluster.open("a") as file:
            file.write(f"[guard]\njoin_s = {seconds}\n")

    def kill(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate(timeout=60)


def end(process: subprocess.Popen[str] | ForkedScript, *, within_s: float = HANG_S) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=within_s)
    return process.returncode, out, err


@pytest.fixture
def started(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    processes = Started(tmp_path, tmp_path_factory.mktemp("cluster") / "cluster.toml")
    yield processes
    processes.kill()


# However it was started


@pytest.mark.torch
def test_a_lone_process_is_a_world_of_one_and_leaves_nothing_behind(started: Started, tmp_path: Path):
    code, out, err = started.run(SUM, env={"SLURMD_NODENAME": "node07"})
    assert (code, err) == (0, "")
    assert out == "rank 0 of 1 local 0 of 1 on node07 sum 1 gloo cpu leads\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.torch
@pytest.mark.parametrize(("backend", "done"), [("gloo", "destroyed"), ("cpu:gloo,cuda:nccl", "aborted")])
def test_nccl_is_aborted_after_an_exception(started: Started, tmp_path: Path, backend: str, done: str):
    """To destroy it means to wait for collectives that nobody joins. Without a GPU, the group only claims to be one."""
    script = write(
        tmp_path / "train.py",
        f"""
        import allranks
        with allranks.session(backend="gloo"):
            from torch.distributed import distributed_c10d as c10d
            import torch.distributed as dist
            groups = c10d._world.pg_map
            for group, (_, store) in list(groups.items()):
                groups[group] = ({backend!r}, store)
            dist.destroy_process_group = lambda: print("destroyed")
            c10d._abort_process_group = lambda: print("aborted")
            raise ValueError("no label")
        """,
    )
    code, out, err = started.run(script, env={})
    assert (code, out) == (1, f"{done}\n")
    assert "ValueError: no label" in err


@pytest.mark.torch
@pytest.mark.parametrize("hook", ["1", "0"])
def test_under_allranks_run_it_takes_the_agents_group(allranks: Allranks, hook: str):
    port = free_port()  # without the hook nobody holds it while the workers start
    result = allranks(
        "run", "--master-port", str(port), "--nproc-per-node", "2", SUM, env=NODE | {"ALLRANKS_HOOK": hook}
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        "[node07 r0] rank 0 of 2 local 0 of 2 on node07 sum 3 gloo cpu leads",
        "[node07 r1] rank 1 of 2 local 1 of 2 on node07 sum 3 gloo cpu follows",
    ]


@pytest.mark.torch
def test_under_srun_the_tasks_of_a_node_hold_the_roll_call_themselves(started: Started, tmp_path: Path):
    ends = started.step(SUM, *(task(rank) for rank in range(3)), forks=True)
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    assert [SUMMED.search(out).groups() for _, out, _ in ends] == [  # type: ignore[union-attr]
        ("0", "3", "0", "3", "n1", "6", "leads"),
        ("1", "3", "1", "3", "n1", "6", "follows"),
        ("2", "3", "2", "3", "n1", "6", "follows"),
    ]
    leader = ends[0][2]
    assert re.search(
        r"^allranks: 3 ranks on n1, gloo over lo; roll call \d+\.\d s; verdicts in runs/4711/attempt_0$", leader, re.M
    )
    assert "allranks: all 3 ranks are up (gloo), " in leader
    assert [without_waiting(err) for _, _, err in ends[1:]] == ["", ""]
    rows = json.loads((tmp_path / "runs/4711/attempt_0/n1/env.json").read_text())
    said = {row["name"]: (row["value"], row["source"]) for row in rows}
    assert said["RANK"] == ("0", "SLURM_PROCID")
    assert said["ALLRANKS_MEMBERS"] == ("n1=0+3", "allranks")
    assert said["TORCH_FR_BUFFER_SIZE"][1] == "allranks"
    assert "OMP_NUM_THREADS" in said
    assert said["GLOO_SOCKET_IFNAME"] == ("lo", "data_interface")


@pytest.mark.torch
def test_under_srun_uneven_nodes_form_one_group(started: Started):
    ends = started.step(SUM, *(task(rank, (2, 1)) for rank in range(3)), forks=True)
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    places = [SUMMED.search(out).groups() for _, out, _ in ends]  # type: ignore[union-attr]
    assert [place[2:5] for place in places] == [("0", "2", "n1"), ("1", "2", "n1"), ("0", "1", "n2")]
    assert "allranks: 3 ranks on 2 nodes (n[1-2]), gloo over " in ends[0][2]


@pytest.mark.torch
def test_under_torchrun_it_takes_torchruns_group(started: Started):
    code, out, err = started.run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, SUM, env=NODE, within_s=60
    )
    assert code == 0, err
    assert sorted(match[0] + match[5] for match in SUMMED.findall(out)) == ["03", "13"]


@pytest.mark.torch
def test_with_a_meeting_point_the_ranks_of_mpi_hold_the_roll_call(started: Started):
    port = free_port()

    def rank(number: int) -> dict[str, str]:
        said = {"RANK": number, "SIZE": 2, "LOCAL_RANK": number, "LOCAL_SIZE": 2}
        of_mpi = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in said.items()}
        return of_mpi | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    ends = started.step(SUM, rank(0), rank(1), forks=True)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [SUMMED.search(out)[6] for _, out, _ in ends] == ["3", "3"]  # type: ignore[index]


@pytest.mark.torch
def test_a_second_session_forms_the_group_again_and_the_environment_is_restored(started: Started, tmp_path: Path):
    script = write(
        tmp_path / "train.py",
        """
        import os
        import torch
        import torch.distributed as dist
        from allranks.session import Session  # takes the package's name session for the module
        import allranks

        before, threads = dict(os.environ), torch.get_num_threads()
        for _ in range(2):
            with allranks.session(timeout_s=20) as s:
                assert isinstance(s, Session)
                assert os.environ["RANK"] == str(s.rank)
                assert os.environ["TORCH_FR_BUFFER_SIZE"] == "512"
                assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]) == max(1, threads // 2)
                total = torch.ones(1)
                dist.all_reduce(total)
                assert total.item() == 2
                assert os.path.isdir(os.path.dirname(os.environ["TORCH_FR_DUMP_TEMP_FILE"]))
            assert dict(os.environ) == before
            assert torch.get_num_threads() == threads
        print("twice")
        """,
    )
    ends = started.step(script, task(0, (2,)), task(1, (2,)))
    assert [(code, out) for code, out, _ in ends] == [(0, "twice\n")] * 2, ends
    assert ends[0][2].count("roll call") == 1


@pytest.mark.parametrize("name", ["rank", "device", "track", "barrier"])
def test_a_session_without_with_says_what_to_write(name: str):
    opened = package.session()
    with pytest.raises(
        AttributeError, match=rf"^allranks\.session\(\)\.{name}: .*; write `with allranks\.session\(\) as s:`"
    ):
        getattr(opened, name)
    assert not hasattr(opened, "nothing")


# How it ends


FAIL_IN_BLOCK = """
    import allranks, torch.distributed as dist
    try:
        with allranks.session() as s:
            if s.rank == 1:
                raise ValueError("bad batch")
            s.barrier()
    finally:
        print("group:", dist.is_initialized())
"""


@pytest.mark.torch
def test_an_exception_in_the_block_destroys_the_group_and_stays_what_it_is(started: Started, tmp_path: Path):
    ends = started.step(write(tmp_path / "train.py", FAIL_IN_BLOCK), task(0, (2,)), task(1, (2,)), forks=True)
    assert [(code, out) for code, out, _ in ends] == [(1, "group: False\n")] * 2, ends
    assert ends[1][2].endswith("ValueError: bad batch\n")


@pytest.mark.torch
@pytest.mark.parametrize("size", [1, 2], ids=["in the block", "in the roll call"])
def test_ctrl_c_ends_it_like_any_python(started: Started, tmp_path: Path, size: int):
    script = write(
        tmp_path / "train.py",
        """
        import time
        from pathlib import Path
        import allranks
        Path("up").touch()
        with allranks.session() as s:
            Path("in").touch()
            for _ in range(600):  # Python sees a signal that comes just before a sleep only after it
                time.sleep(0.1)
        """,
    )
    process = started.start(script, env=task(0, (size,)))
    wait_until((tmp_path / ("in" if size == 1 else "runs/4711/leader.json")).exists, "the job")
    process.send_signal(signal.SIGINT)
    code, _, err = end(process, within_s=60)
    assert code == -signal.SIGINT
    assert err.endswith("KeyboardInterrupt\n")


def test_a_missing_rank_is_named_and_all_that_came_end_alike(started: Started, tmp_path: Path):
    started.wait_for_nodes(12)
    ends = started.step(SUM, task(0), task(2))
    assert [code for code, _, _ in ends] == [75, 75], ends
    leader = ends[0][2]
    assert re.search(r"^allranks: still waiting for n1-rank1 after \d+ s; 2 of 3 nodes have joined$", leader, re.M)
    assert "✗ AR001 node-silent   n1 · rank 1" in leader
    assert leader.rstrip().endswith("others waited for it or were ended: ranks 0,2")
    assert "Traceback" not in leader
    assert (ends[1][1], without_waiting(ends[1][2])) == ("", "")
    verdict = json.loads((tmp_path / "runs/4711/attempt_0/verdict.json").read_text())
    # Another test's agent may hold the first port, which is a finding, too.
    (finding,) = (each for each in verdict["findings"] if each["cause_id"] == "AR001")
    assert (verdict["exit_code"], finding["node"], finding["ranks"], finding["victims"]) == (75, "n1", [1], [0, 2])


def test_a_missing_leader_is_named_once_a_node(started: Started, tmp_path: Path):
    started.wait_for_nodes(12)
    ends = started.step(SUM, *(task(rank, (1, 2)) for rank in (1, 2)))
    assert [code for code, _, _ in ends] == [75, 75], ends
    assert "✗ AR001 node-silent   n1" in ends[0][2]
    assert "AR001" not in ends[1][2]


def test_a_rank_without_torch_is_told_to_all(started: Started, tmp_path: Path):
    (tmp_path / "without").mkdir()
    write(tmp_path / "without/sitecustomize.py", "import sys\nsys.modules['torch'] = None\n")
    started.wait_for_nodes(90)
    script = write(tmp_path / "train.py", "import allranks\nwith allranks.session(): pass\n")
    ends = started.step(script, task(0, (1, 1)), task(1, (1, 1)) | {"PYTHONPATH": str(tmp_path / "without")})
    assert [code for code, _, _ in ends] == [78, 78], ends
    assert "✗ AR512 node-cannot-start   n2 · rank 1" in ends[0][2]
    assert "session() needs PyTorch in " in ends[0][2]


def test_a_session_error_can_be_caught_and_has_the_findings(started: Started, tmp_path: Path):
    script = write(
        tmp_path / "train.py",
        """
        import allranks
        try:
            with allranks.session(): pass
        except Exception as exc:
            print(type(exc).__name__, exc.exit_code, exc.findings[0].cause)
        """,
    )
    code, out, _ = started.run(script, env=task(0) | {"RANK": "2"})
    assert (code, out) == (0, "SessionError 2 AR501 slurm-env\n")


# Starts that contradict themselves


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "6", "SLURMD_NODENAME": "n1"}
BARE = "import allranks\nwith allranks.session(**ARGUMENTS): pass\n"


@pytest.mark.parametrize(
    ("env", "arguments", "code", "said"),
    [
        pytest.param(
            task(0, (8, 8)) | TORCHRUN,
            "",
            2,
            "✗ AR502 spawn-inside-srun   n1  .*\n  torchrun \\(TORCHELASTIC_RUN_ID=none, LOCAL_WORLD_SIZE=2\\) runs "
            "inside each of 8 tasks a node \\(SLURM_STEP_TASKS_PER_NODE=8,8\\)\n  fix  start one per node: srun ",
            id="torchrun-in-tasks",
        ),
        pytest.param(
            task(0) | {"RANK": "2"},
            "",
            2,
            "✗ AR501 slurm-env   n1  .*\n  RANK=2 but SLURM_PROCID=0, and slurm started this process\n  fix  unset R",
            id="stale-rank",
        ),
        pytest.param(
            BATCH, "", 2, "✗ AR501 slurm-env   n1  .*\n  this is the job's script or shell, not a task", id="no-srun"
        ),
        pytest.param(
            TORCHRUN | {"ALLRANKS_AGENT_PID": "1", "ALLRANKS_MEMBERS": "a=0+4,b=4+4", "ALLRANKS_NODE": "b"},
            "",
            2,
            "✗ AR502 spawn-inside-srun   b  .*\n  WORLD_SIZE=2 but ALLRANKS_MEMBERS has 8 ranks",
            id="torchrun-in-a-worker",
        ),
        pytest.param(
            {}, "backend='mpi'", 2, "error: session\\(backend='mpi'\\): expected 'nccl', 'gloo'", id="backend"
        ),
        pytest.param({}, "timeout_s=0", 2, "error: session\\(timeout_s=0\\): expected seconds", id="timeout"),
        pytest.param({}, "cluster='gone.toml'", 2, "error: gone.toml: cannot be read", id="cluster"),
        pytest.param(
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "",
            2,
            "error: mpi does not say where the ranks meet: set MASTER_ADDR",
            id="mpi-without-a-place",
        ),
    ],
)
def test_a_start_that_cannot_work_is_refused_at_once(
    started: Started, tmp_path: Path, env: dict[str, str], arguments: str, code: int, said: str
):
    script = write(tmp_path / "train.py", BARE.replace("**ARGUMENTS", arguments))
    started_s = time.monotonic()
    got, _, err = started.run(script, env=env, within_s=60)
    assert time.monotonic() - started_s < 40  # alone it is 0.3, and a roll call would wait for 60
    assert got == code
    assert re.search(said, err), err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


LOOP = """
    import allranks, torch
    from types import SimpleNamespace
    part = SimpleNamespace(state_dict=lambda: {"hooks": {1} if is_odd else 0}, load_state_dict=print)
    is_odd = False
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        pytest.param(
            ["with allranks.session() as s: state = s.track(part=part); s.barrier()",
             "for step in state.steps([0], total=2): pass"],
            2,
            "error: state.steps() comes after the end of the session: move it into the `with allranks.session()` block",
            id="loop below",
        ),
        pytest.param(
            ["with allranks.session() as s: pass", "s.track(part=part)"],
            2,
            "error: s.track() comes after the end of the session: move it into the `with allranks.session()` block",
            id="track below",
        ),
        pytest.param(
            ["with allranks.session() as s: s.track(part)"],
            2,
            "error: track() takes its parts by name: track(model=model, optimizer=optimizer)",
            id="no name",
        ),
        pytest.param(
            ["with allranks.session() as s:", "    for step in s.track(part=part).steps([0], total=2): pass"],
            2,
            "error: step 0 was not done: use `with step as batch`, and let its errors pass",
            id="no with",
        ),
        pytest.param(
            ["with allranks.session() as s:", "    for step in s.track(part=part).steps([0], total=2):",
             "        with step: is_odd = True"],
            0,
            "allranks: the state after step 2 is not saved; no checkpoint is complete",
            id="no save",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2])
def test_a_slip_in_the_script_of_a_training_is_one_line(
    started: Started, tmp_path: Path, lines: list[str], code: int, said: str, size: int
):
    script = write(tmp_path / "train.py", LOOP + "".join(f"    {line}\n" for line in lines))
    ends = started.step(script, *(task(rank, (size,)) for rank in range(size)), forks=True)
    assert [got for got, _, _ in ends] == [code] * size, ends
    assert ends[0][2].splitlines()[-1].startswith(said), ends
    assert "Traceback" not in ends[0][2]
    assert not list((tmp_path / "runs").glob("*/checkpoints/owner.json"))


SPAWN = """
    import multiprocessing
    import allranks

    def train(rank):
        with allranks.session():
            pass

    if __name__ == "__main__":
        children = [multiprocessing.get_context("spawn").Process(target=train, args=(rank,)) for rank in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        raise SystemExit(max(child.exitcode for child in children))
"""


def test_spawned_processes_of_a_task_are_refused(started: Started, tmp_path: Path):
    code, _, err = started.run(write(tmp_path / "train.py", SPAWN), env=task(1, (2, 2)))
    assert code == 2
    assert "AR502 spawn-inside-srun" in err
    assert "started as SLURM_PROCID=1 of SLURM_STEP_NUM_TASKS=4" in err


@pytest.mark.torch
def test_spawned_processes_on_one_machine_are_worlds_of_one_that_say_so(started: Started, tmp_path: Path):
    code, _, err = started.run(write(tmp_path / "train.py", SPAWN), env={})
    assert code == 0, err
    assert err.count("no launcher says which rank this process of multiprocessing is") == 2


# The package


def test_importing_the_package_loads_neither_torch_nor_the_session() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "import allranks, sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert not {"torch", "msgspec", "allranks.session"} & set(shown.stdout.split())


def test_the_public_names_are_these() -> None:
    assert package.__all__ == ["Session", "SessionError", "__version__", "load_weights", "saving", "session"]
    assert package.SessionError is SessionError
    assert callable(package.session)
    with pytest.raises(AttributeError, match="has no attribute 'sesion'"):
        package.sesion  # noqa: B018
