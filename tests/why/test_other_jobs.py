"""Of which job is a kill? Other jobs' kills on the node are no cause, the own job's is never left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion
from allranks.why.logs.log_events import Logs
from allranks.why.other_jobs import find_own_jobs

Why = Callable[[str | Mapping[str, str]], list[Conclusion]]
KILL_991 = "gpu-b17 slurmstepd[70113]: error: Detected 1 oom_kill event in StepId=991.0. Some were OOM Killed."
SLURMD_991 = "[2026-11-24T11:01:41.123] [991.0] error: Detected 1 oom_kill event in StepId=991.0.\n"
OWN_KILL = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed.\n"
)
TRACEBACK = 'Traceback (most recent call last):\n  File "/home/kim/proj/train.py", line 151, in train\n    x = load()\n'
CUDA_OOM = (
    "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of"
)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (f"{CUDA_OOM} 79 GiB (JobID=17)", "cuda-oom"),
        (
            "[rank2]: FileNotFoundError: [Errno 2] No such file or directory: '/data/JobId=20240101/part-0.parquet'",
            None,
        ),
        ("[rank2]: SystemExit: slurm said: Detected 1 oom_kill event in StepId=991.0", None),
        ("[rank2]: ValueError: StepId=12 of JobID=34 is not known", "user-code-error"),
    ],
)
def test_what_a_program_says_of_another_job_is_its_own(why: Why, error: str, cause: str | None) -> None:
    traceback = "".join(f"[rank2]: {line}\n" for line in TRACEBACK.splitlines())
    plain = why({"slurm-4711.out": f"{traceback}{error}\n".replace("JobID=", "JobID ").replace("Id=", "Id ")})
    found = why({"slurm-4711.out": f"{traceback}{error}\n"})
    assert (found[0].cause.name, found[0].culprit.ranks) == (cause or plain[0].cause.name, (2,))
    assert found[0].confidence is plain[0].confidence


@pytest.mark.parametrize(
    "logs",
    [
        {"slurm-4711.out": f"Nov 24 11:01:41 {KILL_991}\n"},
        {"slurm-4711.out": "step 10 loss 2.1\n", "gpu-b17.messages": f"Nov 24 11:01:41 {KILL_991}\n"},
        {"slurm-4711.out": "step 1\n", "slurmd.log": SLURMD_991},
    ],
)
def test_what_a_daemon_says_of_another_job_is_left_out(why: Why, logs: Mapping[str, str]) -> None:
    assert "host-oom-kill" not in [conclusion.cause.name for conclusion in why(logs)]


@pytest.mark.parametrize(
    "logs",
    [
        {"train.log": f"dependency of SLURM_JOB_ID=4600 satisfied\n{OWN_KILL}"},
        {"train.log": f"PREV_SLURM_JOB_ID=4600\n{OWN_KILL}"},
        {"old/slurm-990.out": "step 3 loss 2.1\n", "train.err": OWN_KILL},
        {"slurm-4700.out": "step 3 loss 2.1\n", "slurm-4710_3.out": OWN_KILL},
        {"train-4711.out": OWN_KILL},
        {"4711.out": OWN_KILL},
    ],
)
def test_a_kill_that_slurmstepd_writes_into_the_output_is_the_own_jobs(why: Why, logs: Mapping[str, str]) -> None:
    found = why(logs)[0]
    assert (found.cause.name, found.confidence) == ("host-oom-kill", Confidence.CERTAIN)


@pytest.mark.parametrize(
    ("logs", "jobs"),
    [
        ({"a.log": "PREV_SLURM_JOB_ID=4600\nSLURM_JOB_ID=4711\nSLURM_JOBID: 4711\n"}, {"4711"}),
        ({"a.log": "dependency of SLURM_JOB_ID=4600 satisfied\n"}, set()),
        ({"slurm-4700.out": "step 3\n", "slurm-4711_3.out": "step 3\n"}, set()),
        ({"gpu-b17.messages": f"Nov 24 11:01:41 {KILL_991}\n"}, set()),
    ],
)
def test_the_own_job_is_known_by_what_is_its_own(
    read: Callable[[Mapping[str, str]], Logs], logs: Mapping[str, str], jobs: set[str]
) -> None:
    assert find_own_jobs(read(logs)) == jobs


def kill(at: str, job: int, pid: int) -> str:
    return (
        f"Nov 24 {at} gpu-b17 kernel: oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),"
        f"oom_memcg=/slurm/uid_1001/job_{job}/step_0,task_memcg=/slurm/uid_1001/job_{job}/step_0/task_0,task=python3,"
        f"pid={pid},uid=1001\nNov 24 {at} gpu-b17 kernel: Memory cgroup out of memory: Killed process {pid} (python3) "
        "total-vm:812345678kB, anon-rss:263456789kB, file-rss:0kB, shmem-rss:0kB\n"
    )


def test_a_report_of_an_older_kernel_ends_with_the_process_that_it_killed(why: Why) -> None:
    at = "gpu-b17 kernel:"
    log = (
        f"Nov 24 11:01:40 {at} python3 invoked oom-killer: gfp_mask=0xd0, order=0, oom_score_adj=0\n"
        f"Nov 24 11:01:40 {at} Task in /slurm/uid_1007/job_991/step_0 killed as a result of limit of /slurm\n"
        f"Nov 24 11:01:40 {at} Memory cgroup out of memory: Kill process 21044 (python3) score 980 or sacrifice child\n"
        f"Nov 24 11:01:40 {at} Killed process 21044 (python3), UID 1007, total-vm:8123456kB, anon-rss:4190000kB\n"
        f"Nov 24 11:11:40 {at} Out of memory: Killed process 33044 (python3) total-vm:8123456kB, anon-rss:4190000kB\n"
    )
    found = why({"slurm-4711.out": "step 3 loss 2.1\n", "gpu-b17.messages": log})
    assert found[0].cause.name == "host-oom-kill"
    assert "process 33044" in found[0].culprit.things
    assert "process 21044" not in found[0].culprit.things


@pytest.mark.parametrize(
    ("job", "at", "cause", "is_told"),
    [
        (4711, "11:02:20", "host-oom-kill", True),
        (4711, "11:03:31", "user-code-error", True),
        (991, "11:02:20", "user-code-error", False),
    ],
)
def test_a_kill_in_the_jobs_own_cgroup_keeps_its_weight(
    why: Why, job: int, at: str, cause: str, *, is_told: bool
) -> None:
    raised = "".join(f"[rank2]: {line}\n" for line in f"{TRACEBACK}KeyError: 'tokens'".splitlines())
    log = f"2026-11-24 11:02:30 INFO step 140 loss 2.31\n{raised}2026-11-24 11:02:40 INFO bye\n"
    found = why({"slurm-4711.out": log, "gpu-b17.dmesg": kill(at, job, 21044)})
    assert found[0].cause.name == cause
    assert any("process 21044" in conclusion.culprit.things for conclusion in found) is is_told
    assert any("also by itself" in note for note in found[0].notes) is is_told
