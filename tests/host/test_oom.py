"""Are OOM kills of the job counted, whichever cgroup version, and only those since the watch began?"""

from __future__ import annotations

from pathlib import Path

from allranks.host.oom import OomWatch


def counter(root: Path, path: str, kills: int) -> None:
    file = root / "sys/fs/cgroup" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.name == "memory.events":
        file.write_text(f"low 0\nhigh 0\nmax 9\noom 4\noom_kill {kills}\noom_group_kill 0\n")
    else:
        file.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


def own_cgroup(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_version_2_counts_in_the_cgroup_and_above_it(tmp_path: Path):
    own_cgroup(tmp_path, "0::/system.slice/job_7/step_0/user\n")
    counter(tmp_path, "system.slice/job_7/step_0/user/memory.events", 0)
    counter(tmp_path, "system.slice/job_7/memory.events", 3)
    watch = OomWatch(root=tmp_path)
    assert watch.num_kills() == 0
    counter(tmp_path, "system.slice/job_7/memory.events", 5)
    assert watch.num_kills() == 2


def test_version_1_counts_in_the_memory_hierarchy(tmp_path: Path):
    own_cgroup(tmp_path, "5:cpu,cpuacct:/slurm\n4:memory:/slurm/uid_0/job_7\n")
    counter(tmp_path, "memory/slurm/uid_0/job_7/memory.oom_control", 1)
    watch = OomWatch(root=tmp_path)
    counter(tmp_path, "memory/slurm/uid_0/job_7/memory.oom_control", 2)
    assert watch.num_kills() == 1


def test_the_kernels_log_names_the_process(tmp_path: Path):
    (tmp_path / "dev").mkdir()
    log = tmp_path / "dev/kmsg"
    log.write_text("4,1,1,-;Out of memory: Killed process 11 (python) total-vm:1kB\n")
    watch = OomWatch(root=tmp_path)
    assert (watch.num_kills(), watch.killed_pids()) == (0, ())
    with log.open("a") as file:
        file.write("3,2,2,-;Memory cgroup out of memory: Killed process 4711 (python3.11) total-vm:9kB\n")
        file.write("3,3,3,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=4711,uid=0\n")
    assert watch.killed_pids() == (4711,)
    assert watch.num_kills() == 1
    watch.close()
    assert watch.killed_pids() == (4711,)


def test_a_machine_without_any_of_it_says_none(tmp_path: Path):
    watch = OomWatch(root=tmp_path)
    assert (watch.num_kills(), watch.killed_pids()) == (0, ())


def test_this_machine_can_be_watched():
    before = set(Path("/proc/self/fd").iterdir())
    watch = OomWatch()
    assert watch.num_kills() == 0
    watch.close()
    assert set(Path("/proc/self/fd").iterdir()) == before
