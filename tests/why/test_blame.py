"""Is it the culprit that is named, and not who reports it? Whole logs, small and made of the programs' own formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion

Why = Callable[[str | Mapping[str, str]], list[Conclusion]]


def timeout(rank: int, seq: int, op: str = "ALLREDUCE", numel: int = 4096, at: str = "20:27:21.426415540") -> str:
    """What the NCCL watchdog of a rank prints (PyTorch 2.6)."""
    return (
        f"[rank{rank}]:[E1218 {at} ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for "
        "600081 milliseconds before timing out."
    )


def traceback(error: str, *frames: str, prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):", *(f'  File "{frame}", line 7, in main' for frame in frames), error]
    return "\n".join(prefix + line for line in lines)


SUMMARY = """\
Root Cause (first observed failure):
[0]:
  time      : 2024-09-09_09:36:56
  host      : {node}
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 3309)
  error_file: <N/A>
  traceback : {text}"""

CASES = [
    pytest.param(
        "\n".join(timeout(rank, 100) for rank in (0, 1, 3)),
        "straggler-rank",
        "rank 2",
        id="the rank that reports no timeout",
    ),
    pytest.param(
        "\n".join([*(timeout(rank, 101) for rank in (0, 1, 3)), timeout(2, 100)]),
        "straggler-rank",
        "rank 2",
        id="the rank that is a collective behind",
    ),
    pytest.param(
        "\n".join([*(timeout(rank, 100) for rank in (0, 1, 3)), timeout(2, 100, "BROADCAST", 1)]),
        "collective-mismatch",
        "rank 2",
        id="the rank that is in another collective",
    ),
    pytest.param(
        "\n".join([*(timeout(rank, 100) for rank in (0, 1, 3)), timeout(2, 100, numel=4095)]),
        "collective-mismatch",
        "rank 2",
        id="the rank whose tensor has another size",
    ),
    pytest.param(timeout(5, 9), "collective-timeout", "", id="one victim alone"),
    pytest.param(
        "\n".join(timeout(rank, 9) for rank in range(4)) + "\nworld_size=4",
        "collective-timeout",
        "",
        id="all are in the same collective",
    ),
    pytest.param(
        timeout(0, 100) + "\n" + traceback("KeyError: 'label'", "/home/me/train.py", prefix="[rank2]: "),
        "user-code-error",
        "rank 2",
        id="the exception of one rank, the timeout of another",
    ),
    pytest.param(
        traceback("KeyError: 'label'", "/home/me/data.py", "/opt/lib/python3.11/site-packages/torch/x.py"),
        "user-code-error",
        "data.py:7",
        id="the last frame in the user's files",
    ),
    pytest.param(
        traceback(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
            "79.15 GiB of which 1.2 GiB is free.",
            "/home/me/train.py",
            prefix="[rank3]: ",
        ),
        "cuda-oom",
        "rank 3",
        id="an exception that a sign explains is no user error",
    ),
    pytest.param(
        traceback(
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
            "[10.0.0.7]:43185",
            "/home/me/train.py",
            prefix="[rank0]: ",
        ),
        "peer-connection-lost",
        "address 10.0.0.7",
        id="a victim names its peer",
    ),
    pytest.param(
        SUMMARY.format(node="node03", rank=7, code=-9, text="Signal 9 (SIGKILL) received by PID 3309"),
        "host-oom-kill",
        "node03",
        id="SIGKILL without a word is most often memory",
    ),
    pytest.param(
        SUMMARY.format(node="node03", rank=7, code=-11, text="Signal 11 (SIGSEGV) received by PID 3309"),
        "dead-rank",
        "rank 7",
        id="a crash in native code",
    ),
    pytest.param(
        "slurmstepd: error: *** STEP 11.0 ON node01 CANCELLED AT 2026-03-25T10:34:07 DUE TO PREEMPTION ***\n"
        + traceback("SignalException: Process 3045566 got signal: 15", "/home/me/train.py"),
        "preempted",
        "",
        id="the scheduler's word before the signals it causes",
    ),
    pytest.param(
        "\n".join(
            "INFO:root:Waiting in store based barrier to initialize process group for rank: "
            f"{rank}, key: store_based_barrier_key:1 (world_size=4, worker_count=3, timeout=0:30:00)"
            for rank in (0, 1, 3)
        ),
        "missing-rank",
        "rank 2",
        id="the rank that never waits at the barrier",
    ),
    pytest.param(
        "\n".join(f"initializing ddp: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/4" for rank in (0, 0, 1, 1)),
        "slurm-env",
        "rank 2",
        id="ranks that were started twice",
    ),
    pytest.param(
        "{'loss': 0.8533, 'grad_norm': 4.86, 'learning_rate': 1.4e-05, 'epoch': 0.16}\n"
        "Training completed. Do not forget to share your model on huggingface.co/models =)\n",
        "healthy",
        "",
        id="a run that came to its end",
    ),
]


@pytest.mark.parametrize(("log", "cause", "culprit"), CASES)
def test_the_cause_and_its_culprit_are_named_first(why: Why, log: str, cause: str, culprit: str) -> None:
    first = why(log)[0]
    assert first.cause.name == cause
    assert culprit in first.culprit.words()
    assert first.evidence


def test_victims_are_no_culprits(why: Why) -> None:
    first = why("\n".join(timeout(rank, 100) for rank in (0, 1, 3)))[0]
    assert first.victims == {0, 1, 3}
    assert first.confidence is Confidence.LIKELY
    assert first.ask


def test_an_error_after_which_its_own_line_goes_on_is_never_sure(why: Why) -> None:
    error = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.12 GiB."
    assert why(f"{error}\n")[0].confidence is Confidence.CERTAIN
    assert why(f"{error} Retrying with half the batch\n")[0].confidence is Confidence.UNDECIDED


def test_who_only_waited_is_never_the_culprit(why: Why) -> None:
    first = why(timeout(5, 9))[0]
    assert not first.culprit
    assert first.victims == {5}


def test_a_primary_line_comes_before_what_only_usually_means_something(why: Why) -> None:
    found = why(
        "RuntimeError: CUDA error: unknown error\n"
        "srun: error: Node failure on node07\n"
        "srun: Job step aborted: Waiting up to 62 seconds for job step to finish.\n"
    )
    assert [one.cause.name for one in found][:2] == ["node-failure", "gpu-hardware"]
    assert found[0].culprit.nodes == ("node07",)


def test_of_two_primary_lines_the_earlier_one_comes_first(why: Why) -> None:
    ecc = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    full = "OSError: [Errno 28] No space left on device"
    assert why(f"{ecc}\n{full}\n")[0].cause.name == "gpu-hardware"
    assert why(f"{full}\n{ecc}\n")[0].cause.name == "disk-full"


def test_times_tell_what_came_first_in_several_files(why: Why) -> None:
    found = why(
        {
            "rank_0.err": "2024-05-01 10:00:09 OSError: [Errno 28] No space left on device\n",
            "rank_1.err": "2024-05-01 10:00:05 CUDA error: uncorrectable ECC error encountered\n",
        }
    )
    assert found[0].cause.name == "gpu-hardware"
    assert found[0].culprit.ranks == (1,)


def test_what_srun_says_while_it_ends_tasks_is_no_death(why: Why) -> None:
    found = why(
        "slurmstepd: error: *** STEP 7.0 ON node01 CANCELLED AT 2026-03-25T10:34:07 DUE TO TIME LIMIT ***\n"
        "srun: error: node02: task 1: Killed\n"
    )
    assert [one.cause.name for one in found] == ["time-limit"]


def test_the_task_that_failed_is_named_not_those_that_srun_killed_for_it(why: Why) -> None:
    first, *_ = why("srun: error: n12: tasks 4-7: Exited with exit code 134\nsrun: error: n11: tasks 0-3: Killed")
    assert first.cause.name == "dead-rank"
    assert first.culprit.nodes == ("n12",)


@pytest.mark.parametrize(
    ("lost", "culprit"), [("", "cn01"), ("srun: error: Node failure on cn07\n", "cn07")], ids=["alone", "others known"]
)
def test_where_a_lost_jobs_step_ran_is_named_only_where_nothing_else_is(why: Why, lost: str, culprit: str) -> None:
    end = "slurmstepd: error: *** STEP 7.0 ON cn01 CANCELLED AT 2023-03-06T03:17:51 DUE TO NODE FAILURE, SEE SLURMCTLD"
    first, *_ = why(lost + end)
    assert (first.cause.name, first.culprit.nodes) == ("node-failure", (culprit,))


def test_ranks_whose_calls_differ_are_named_where_the_sentence_is_broken(why: Why) -> None:
    told = "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective:\n"
    first, *_ = why(f"{told}CollectiveFingerPrint(OpType=ALLREDUCE),\nbut Rank 1 is running collective:")
    assert first.cause.name == "collective-mismatch"
    assert 0 in first.culprit.ranks


def test_a_debugger_tells_the_exception_above_its_frames(why: Why) -> None:
    error = "Tensors must be CUDA and dense"
    first, *_ = why(f"{error}\n" + traceback(f"RuntimeError: {error}", "/home/me/tune.py").partition("\n")[2])
    assert (first.cause.name, first.culprit.words()) == ("backend-device-mismatch", "tune.py:7")


def test_a_cut_traceback_is_still_the_users_code(why: Why) -> None:
    first = why('Traceback (most recent call last):\n  File "/home/me/train.py", line 74, in <module>\n')[0]
    assert (first.cause.name, first.confidence) == ("user-code-error", Confidence.UNDECIDED)


def test_a_cut_traceback_of_the_launcher_says_nothing(why: Why) -> None:
    first = why('Traceback (most recent call last):\n  File "/opt/bin/torchrun", line 8, in <module>\n')[0]
    assert first.cause.name == "healthy"


def test_lines_that_a_terminal_cut_are_joined(why: Why) -> None:
    whole = (
        "[rank6]:[E513 04:55:49.384372190 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 6] "
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued "
        "collectives. This typically indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, "
        "and could be triggered by another thread holding the GIL inside a CUDA api"
    )
    cut = "\n".join(whole[at : at + 90] for at in range(0, len(whole), 90))
    assert "watchdog got stuck for" not in cut.replace("\n", "|").split("|")[1][:20]
    assert why(cut)[0].cause.name == "heartbeat-stuck"


CANCELLED = "slurmstepd: error: *** STEP 7.0 ON node01 CANCELLED AT 2026-03-25T10:34:07 ***\n"


def test_a_step_that_was_ended_was_cancelled_whatever_came_before(why: Why) -> None:
    for before in ("iteration 70 loss: 0.2\n", "Initializing distributed\n"):
        assert why(before + CANCELLED)[0].cause.name == "cancelled"


def test_an_exception_beside_a_watchdogs_line_is_still_the_users(why: Why) -> None:
    log = traceback("RuntimeError: no such thing", "/home/me/train.py", prefix="[rank3]: ") + "\n" + timeout(3, 9)
    assert why(log)[0].cause.name == "user-code-error"


def test_what_nccl_says_of_itself_comes_before_an_error_without_a_reason(why: Why) -> None:
    found = why(
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled system error\n"
        "[rank0]: Last error:\n"
        "[rank0]: socketStartConnect: Connect to 10.0.0.4<43117> failed : Software caused connection abort"
    )
    assert [one.cause.name for one in found[:2]] == ["firewall-port", "nccl-pair-failed"]
    assert "10.0.0.4" in found[0].culprit.words()


def test_of_the_nodes_that_are_shown_the_one_is_named_that_was_lost(why: Why) -> None:
    first, *_ = why(
        "NodeName=c014 Arch=x86_64 CoresPerSocket=28\n   State=MIXED ThreadsPerCore=1\n"
        "NodeName=c015 Arch=x86_64 CoresPerSocket=28\n   State=DOWN ThreadsPerCore=1\n"
        "   Reason=Node unexpectedly rebooted [slurm@2022-07-23T15:27:10]\n"
        "NodeName=c016 Arch=x86_64 CoresPerSocket=28\n   State=IDLE ThreadsPerCore=1"
    )
    assert first.cause.name == "node-failure"
    assert first.culprit.nodes + first.culprit.things == ("c015",)


NO_STORE = (
    "RuntimeError: [15] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store "
    "by key '0', but store->get('0') got error: Connection reset by peer"
)


def test_a_store_is_lost_because_of_the_exception_before(why: Why) -> None:
    error = traceback("ValueError: Undefined dataset", "/home/me/loader.py", prefix="gpu003: ")
    first, second, *_ = why(f"{error}\ngpu004: {NO_STORE}\n")
    assert (first.cause.name, first.culprit.words()) == ("user-code-error", "gpu003 loader.py:7")
    assert (second.cause.name, second.is_consequence) == ("store-lost", True)


def test_a_watchdog_stands_still_because_of_the_exception_before(why: Why) -> None:
    error = traceback("FileNotFoundError: index.json", "/home/me/loader.py", prefix="gpu003: ")
    stuck = "[rank8]:[E127 04:11:22.1] First PG on this rank that detected no heartbeat of its watchdog."
    first, second, *_ = why(f"{error}\ngpu004: {stuck}\n")
    assert first.cause.name == "user-code-error"
    assert (second.cause.name, second.is_consequence) == ("heartbeat-stuck", True)


def test_who_is_awaited_is_named_by_who_tells_of_the_wait(why: Why) -> None:
    log = (
        "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0. Please check rank 0 logs for faulty rank.\nOriginal exception: [../third_party/gloo/gloo/"
        "transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete\n"
    )
    first = why(log)[0]
    assert (first.cause.name, first.culprit.ranks) == ("stuck-rank", (0,))


def test_ranks_that_all_came_did_not_all_say_so(why: Why) -> None:
    log = "Initializing distributed: GLOBAL_RANK: {}, MEMBER: {}/8\n"
    log = log.format(0, 1) + log.format(3, 4)
    assert why(log)[0].cause.name == "missing-rank"
    assert why(log + "All distributed processes registered. Starting with 8 processes\n")[0].cause.name == "healthy"


def test_a_loopback_is_behind_no_firewall(why: Why) -> None:
    line = "n1:31:37 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to {}<52781> failed : Software caused"
    names = {at: why(line.format(at) + " connection abort")[0].cause.name for at in ("127.0.0.1", "10.0.0.1")}
    assert names == {"127.0.0.1": "loopback-hostname", "10.0.0.1": "firewall-port"}


def test_what_nccl_says_comes_before_what_torch_says_of_it(why: Why) -> None:
    torch = (
        "RuntimeError: NCCL error in: /torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1269, unhandled system error, "
        "NCCL version 2.14.3\n"
    )
    nccl = "n1:2:3 [1] misc/socket.cc:456 NCCL WARN Net : Connect to 10.1.1.5<48113> failed : Connection refused\n"
    assert why(torch)[0].cause.name == "nccl-pair-failed"
    assert set(why(nccl + torch)[0].culprit.things) == {"port 48113", "address 10.1.1.5"}


def test_a_cut_traceback_says_where_a_device_was_asked_for(why: Why) -> None:
    check = "THCudaCheck FAIL file=/pytorch/torch/csrc/cuda/Module.cpp line=59 error=101 : invalid device ordinal\n"
    cut = traceback("", "/home/me/run.py").rstrip() + "\n"
    first = why(check + cut)[0]
    assert (first.cause.name, first.culprit.words()) == ("invalid-device", "run.py:7")


def test_where_the_job_goes_on_all_may_be_well(why: Why) -> None:
    complaint = "RuntimeError: Broken pipe\n"
    assert "healthy" not in [one.cause.name for one in why(complaint)]
    assert why(complaint + "step 120 loss: 0.2\n")[0].cause.name == "healthy"


def test_a_port_that_becomes_active_is_no_link_error(why: Why) -> None:
    log = "NCCL WARN NET/IB : mlx5_0:1 Got async event : port active\nstep 100 loss 2.31\ntraining finished"
    assert "ib-link-error" not in [conclusion.cause.name for conclusion in why(log)]


def test_a_stop_that_the_launcher_tells_twice_is_told_once(why: Why) -> None:
    torchrun = "12384 torch/distributed/elastic"
    stopped = [
        f"W1130 05:07:14.541000 {torchrun}/agent/server/api.py:753] Received 2 death signal, shutting down workers",
        f"W1130 05:07:14.541000 {torchrun}/multiprocessing/api.py:1028] Sending process 12570 closing signal SIGINT",
        f"W1130 05:07:14.552000 {torchrun}/multiprocessing/api.py:1028] Sending process 12572 closing signal SIGINT",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12384 got signal: 2",
    ]
    first, *_ = why("\n".join(stopped))
    assert first.cause.name == "cancelled"
    assert not [note for note in first.notes if note.startswith("also by itself")]
