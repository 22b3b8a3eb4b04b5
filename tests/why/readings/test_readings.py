"""What several lines come to together: other launchers' words, Horovod's stalls, NCCL's list of calls, restarts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion
from allranks.why.logs.log_events import Logs

RAISED = Path(__file__).parents[2] / "model" / "raised"
Why = Callable[[str | Mapping[str, str]], list[Conclusion]]


def call(pid: int, op: str, count: int, number: str = "28c", comm: str = "0x55bef0201370") -> str:
    """A collective as NCCL_DEBUG_SUBSYS=COLL shows it (NCCL 2.10)."""
    return (
        f"node1:{pid}:{pid} [{pid - 100}] NCCL INFO {op}: opCount {number} sendbuff 0x7f5d recvbuff 0x7f5d "
        f"count {count} datatype 7 op 0 root 0 comm {comm} [nranks=8] stream 0x55be"
    )


STALLED = (
    "WARNING: One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
    "waiting for remainder of ranks for more than 60 seconds. Stalled ops: "
)
RAY = """\
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: WorkerDict
\tpid: 278219
\tip: 10.0.0.7
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file."""
RESTART = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group"
ANEW = "    will not load any checkpoints and will start from random"
CASES = [
    pytest.param("srun: error: n03: task 5: Exited with exit code 1", "user-code-error", "n03 rank 5", id="srun"),
    pytest.param(
        "  Process name: [[12345,1],3]\n  Exit code:    1",
        "user-code-error",
        "rank 3",
        id="mpirun names it a line before",
    ),
    pytest.param(
        "Process name: worker-1[0]\nExit code: 137", "host-oom-kill", "worker-1 local rank 0", id="horovodrun, a signal"
    ),
    pytest.param("Process 2 exit with status code 1.", "user-code-error", "rank 2", id="horovodrun"),
    pytest.param(
        "Container rank 3 status failed cmd ['python', '-u', 'train.py'] code 1 log log/workerlog.3",
        "user-code-error",
        "rank 3",
        id="Paddle's launcher",
    ),
    pytest.param(
        "Container rank 3 status failed cmd ['python', '-u', 'train.py'] code -9 log log/workerlog.3",
        "host-oom-kill",
        "rank 3",
        id="Paddle's launcher, a signal",
    ),
    pytest.param(
        "ERROR:composer.cli.launcher:Rank 2 crashed with exit code 1.", "user-code-error", "rank 2", id="Composer"
    ),
    pytest.param(
        "ERROR:composer.cli.launcher:Global rank 2 (PID 812) exited with code -11",
        "dead-rank",
        "rank 2 process 812",
        id="Composer, a signal",
    ),
    pytest.param(
        "[rank9]:[W ProcessGroupGloo.cpp:721] Warning: Unable to resolve hostname to a (local) address. Using the "
        "loopback address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME.\n"
        "[rank8]:[E ProcessGroupGloo.cpp:144] Gloo connectFullMesh failed with "
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        "loopback-hostname",
        "rank 9",
        id="who fell back to the loopback address, where Gloo lost its own message",
    ),
    pytest.param(
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 17",
        "user-code-error",
        "local rank 1",
        id="torch.multiprocessing",
    ),
    pytest.param(
        "[INFO] [launch.py:428:sigkill_handler] Killing subprocess 13266\n"
        "[ERROR] [launch.py:434:sigkill_handler] ['python3', 'main.py', '--local_rank=0'] exits with return code = -9",
        "host-oom-kill",
        "process 13266",
        id="DeepSpeed's only worker",
    ),
    pytest.param(
        "[INFO] [launch.py:428:sigkill_handler] Killing subprocess 1201\n"
        "[INFO] [launch.py:428:sigkill_handler] Killing subprocess 1202\n"
        "[ERROR] [launch.py:434:sigkill_handler] ['python3', 'main.py', '--local_rank=1'] exits with return code = 1",
        "user-code-error",
        "",
        id="DeepSpeed names the last worker whoever failed",
    ),
    pytest.param(
        "Sending process 185003 closing signal SIGTERM\nSending process 185005 closing signal SIGTERM\n"
        "failed (exitcode: 1) local_rank: 0 (pid: 185002) of binary: /usr/bin/python",
        "user-code-error",
        "local rank 0 process 185002",
        id="the agent says who it was: the pid that is missing is not",
    ),
    pytest.param(RAY, "dead-rank", "process 278219 address 10.0.0.7", id="Ray's dead actor"),
    pytest.param(
        STALLED + "grad_1 [ready ranks: 5, 1, 4, 7, 2, 3], grad_2 [ready ranks: 5, 1, 4, 7, 2, 3]",
        "straggler-rank",
        "rank 0 rank 6",
        id="Horovod: ready for nothing",
    ),
    pytest.param(
        STALLED + "loss [ready ranks: 3], grad_1 [ready ranks: 2, 0, 1], grad_2 [ready ranks: 2, 0, 1]",
        "collective-mismatch",
        "rank 3",
        id="Horovod: ready for something else",
    ),
    pytest.param(
        "\n".join(
            [
                *(call(pid, "AllReduce", 9984) for pid in (100, 101, 103)),
                call(102, "AllGather", 592),
                call(104, "AllReduce", 9984, number="28b"),  # its list may be cut
            ]
        ),
        "collective-mismatch",
        "node1 local rank 2 process 102",
        id="NCCL: another call at the same number",
    ),
    pytest.param(f"{ANEW}\n{RESTART}\n{ANEW}", "elastic-no-resume", "", id="anew after a restart"),
    pytest.param(
        "\n".join(
            f"[E ProcessGroupNCCL.cpp:566] [Rank {rank}] Watchdog caught collective operation timeout: "
            "WorkNCCL(OpType=BROADCAST, Timeout(ms)=60000) ran for 66853 milliseconds before timing out."
            for rank in (1, 2, 3)
        ),
        "straggler-rank",
        "rank 0",
        id="torch 1.8, which numbers no collective",
    ),
    pytest.param(
        "train: Caching images (31.3GB ram):  85%|####  | 35595/41999 [29:57<08:39, 12.34it/s]\n"
        "[E ProcessGroupNCCL.cpp:587] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
        "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800115 milliseconds before timing out.",
        "straggler-rank",
        "rank 0",
        id="a progress bar as long as the timeout",
    ),
    pytest.param(
        "Worker VllmWorkerProcess pid 214281 died, exit code: -11",
        "dead-rank",
        "process 214281 VllmWorkerProcess",
        id="vLLM's worker",
    ),
    pytest.param(
        "CollectiveX: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=101, OpType=ALLGATHER), but Rank 7 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE).",
        "collective-mismatch",
        "rank 1 rank 7",
        id="both ranks of a pair that differs",
    ),
]


@pytest.mark.parametrize(("log", "cause", "culprit"), CASES)
def test_the_lines_together_name_cause_and_culprit(why: Why, log: str, cause: str, culprit: str) -> None:
    first = why(log)[0]
    assert (first.cause.name, first.culprit.words()) == (cause, culprit)


@pytest.mark.parametrize(
    "log",
    [
        pytest.param(f"{ANEW}\niteration 1/ 10 | lm loss: 9.1", id="the first start finds no checkpoint"),
        pytest.param("\n".join(call(pid, "AllReduce", 9984) for pid in (100, 101, 102)), id="all the same"),
        pytest.param(
            "\n".join(
                [
                    *(call(pid, "AllReduce", 9984) for pid in (100, 101, 103)),
                    call(102, "AllGather", 592, comm="0x1"),
                    call(102, "AllReduce", 9984, number="28d", comm="0x2"),
                ]
            ),
            id="several communicators of one size",
        ),
        pytest.param(
            "\n".join(call(pid, "AllReduce", 9984 if pid < 108 else 592) for pid in range(100, 112)),
            id="communicators of three pipeline stages",
        ),
        pytest.param(
            "18:00:31.711 [INFO] Epoch 2 done\n2026-02-05 18:00:31 end of main\n"
            "[rank0]:[W205 18:00:34.953145631 ProcessGroupNCCL.cpp:1538] Warning: bye",
            id="a time without a year is not 54 years before one with",
        ),
        pytest.param("Process 2 exit with status code 0.", id="a good end"),
        pytest.param(
            "[W socket.cpp:601] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - Connection "
            "refused).\nepoch 1 step 10 loss 0.3",
            id="it was connected in the end",
        ),
        pytest.param(
            "[W socket.cpp:663] [c10d] The IPv6 network addresses of (localhost, 29500) cannot be retrieved (gai "
            "error: -2 - Name or service not known).\n{'loss': 2.1, 'epoch': 0.1}",
            id="a name was found in the end",
        ),
    ],
)
def test_what_proves_nothing_is_no_failure(why: Why, log: str) -> None:
    assert why(log)[0].cause.name == "healthy"


@pytest.mark.parametrize(
    ("log", "cause", "culprit"),
    [
        pytest.param(
            "epoch 1 step 10 loss 0.3\nnode1:21:99 [3] misc/new.cc:586 NCCL WARN the frobnicator is bent",
            "nccl-pair-failed",
            "node1 local rank 3",
            id="NCCL",
        ),
        pytest.param(
            "node1:21:99 [3] NCCL INFO misc/socket.cc:564 -> 2",
            "nccl-pair-failed",
            "node1 local rank 3",
            id="its trace",
        ),
        pytest.param(
            "subprocess.CalledProcessError: Command '['train.py', '--epochs', '180']' died with <Signals.SIGUSR1: 10>.",
            "user-code-error",
            "",
            id="a command in an exception",
        ),
        pytest.param(
            "[rank2]: step 10 loss 0.3\n[rank2]: fatal: out of cheese", "user-code-error", "rank 2", id="fatal"
        ),
    ],
)
def test_words_of_a_failure_that_no_sign_knows_are_not_well(why: Why, log: str, cause: str, culprit: str) -> None:
    first = why(log)[0]
    assert (first.cause.name, first.culprit.words()) == (cause, culprit)
    assert first.confidence is Confidence.UNDECIDED
    assert first.evidence[0].line == log.count("\n") + 1


@pytest.mark.parametrize(
    "log",
    [
        "node1:21:99 [3] misc/new.cc:586 NCCL WARN the frobnicator is bent\nepoch 1 step 10 loss 0.3",
        "node1:21:99 [3] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.",
        "loss 0.3\nWARNING: failed to import apex, going on without",
    ],
)
def test_runs_that_go_on_after_such_words_are_well(why: Why, log: str) -> None:
    assert why(log)[0].cause.name == "healthy"


@pytest.mark.parametrize(
    "start", ["slurmstepd: error:", "[2026-11-23T14:03:24.131] error:"], ids=["to 24.11", "from 25.05 on"]
)
def test_what_slurm_says_of_a_step_is_no_progress(why: Why, start: str) -> None:
    ended = f"{start} *** STEP 7.0 ON node01 CANCELLED AT 2026-11-23T14:03:24 DUE TO TASK FAILURE ***\n"
    assert why("terminate called: fatal: no such frobnicator\n" + ended)[0].cause.name == "user-code-error"


def test_who_interrupts_a_job_that_says_nothing_lost_patience(why: Why) -> None:
    first, *_ = why(
        "node1:21:99 [0] NCCL INFO Launch mode Parallel\n^CTraceback (most recent call last):\nKeyboardInterrupt"
    )
    assert (first.cause.name, first.confidence) == ("silent-hang", Confidence.LIKELY)


def test_what_else_the_same_lines_may_come_of_is_noted(why: Why) -> None:
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:575] Connection closed by peer [10.0.0.4]:16062"
    assert "AR407 dead-rank" in " ".join(why(lost)[0].notes)
    certain = why("RuntimeError: CUDA error: invalid device ordinal")
    assert ([each.cause.name for each in certain], certain[0].notes) == (["invalid-device"], ())


def test_where_in_nccl_an_error_passed_is_a_complaint_with_and_without_the_function(why: Why) -> None:
    for where in ("transport/net.cc:890", "transport/net.cc:890 (sendProxyProgress)"):
        first = why(f"n1:1:1 [0] NCCL INFO {where} -> 5")[0]
        assert (first.cause.name, first.culprit.nodes) == ("nccl-pair-failed", ("n1",))


@pytest.mark.parametrize(
    "said",
    [
        "ncclCommInitRank comm 0x55 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId 0x7b - Init START",
        "[Rank 0] ncclCommInitRank comm 0x55 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId 0x7b - Init START",
        "ncclCommSplit comm 0x55 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 parent 0x5 color 7 key 0- Init START",
    ],
)
def test_a_communicator_that_is_begun_and_never_made_is_waited_for(why: Why, said: str) -> None:
    first = why(f"n1:1:1 [0] NCCL INFO {said}")[0]
    assert (first.cause.name, "while NCCL creates a communicator" in first.message) == ("silent-hang", True)


@pytest.mark.parametrize("bootstrap", ["Bootstrap : Using eth0:10.0.0.2<0>", "Bootstrap: Using eth0:10.0.0.2<0>"])
def test_a_peer_is_known_by_the_address_that_its_bootstrap_took(why: Why, bootstrap: str) -> None:
    lost = "n1:4:8 [0] misc/socket.cc:860 NCCL WARN ncclSocketRecv: Connection closed by remote peer 10.0.0.2<45763>"
    assert why(f"n2:5:5 [0] NCCL INFO {bootstrap}\n{lost}")[0].culprit.nodes == ("n2",)


def test_the_port_of_a_device_is_no_address(read: Callable[[str], Logs]) -> None:
    assert not list(read("n2:5:5 [0] NCCL INFO Bootstrap: Using mlx5_0:1").of("bootstrap"))


def test_what_nccl_does_without_is_no_failure(why: Why) -> None:
    said = (
        "n1:1:1 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]\nn1:1:1 [0] NCCL INFO Using network"
    )
    assert why(said)[0].cause.name == "healthy"


def test_the_script_that_argparse_or_torchrun_names_is_named(why: Why) -> None:
    first = why("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --local-rank=0")[0]
    assert first.culprit.words() == "--local-rank=0 train.py"


def test_the_worker_whose_error_is_passed_on_is_named_beside_its_file(why: Why) -> None:
    first = why(
        '-- Process 6 terminated with the following error:\nTraceback (most recent call last):\n  File "/a/waymo.py", '
        "line 171, in get\n    assert boxes\nAssertionError\n"
    )[0]
    assert first.culprit.words() == "local rank 6 waymo.py:171"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dataloader", "train.py:6: KeyError: 0"),
        (
            "dataloader_collate",
            "train.py:32: RuntimeError: stack expects each tensor to be equal size, but got [1] at entry 0 and [2] at "
            "entry 1",
        ),
        ("process_pool_executor", "train.py:8: KeyError: 3"),
        ("ray", "data.py:12: KeyError: 3"),
        ("accelerate_notebook", "train.py:15: ValueError: bad 1"),
        ("datasets", "rows.py:8: ValueError: line 17 has no label"),
    ],
)
def test_the_exception_that_a_framework_handed_on_is_shown(why: Why, name: str, message: str) -> None:
    assert why((RAISED / f"{name}.txt").read_text())[0].message == message


def test_the_file_that_was_read_last_is_the_damaged_one(why: Why) -> None:
    first = why(
        "load checkpoint from local path: work/iter_1.pth\nload checkpoint from local path: work/iter_2.pth\n"
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory\n"
    )[0]
    assert "work/iter_2.pth" in first.culprit.words()
    assert "iter_1" not in first.culprit.words()


@pytest.mark.parametrize(
    ("log", "culprit"),
    [
        ("Child process 17057 (local_rank 0) FAILED (exitcode 1)", "local rank 0 process 17057"),
        (
            '{"name": "torchelastic.worker.status.FAILED", "source": "WORKER", "metadata": {"global_rank": 3, '
            '"group_rank": 0, "worker_id": "11376", "role": "default", "hostname": "n7", "state": "FAILED"}}',
            "n7 rank 3 process 11376",
        ),
    ],
)
def test_older_agents_name_the_worker_that_failed(why: Why, log: str, culprit: str) -> None:
    first = why(log)[0]
    assert (first.cause.name, first.culprit.words()) == ("user-code-error", culprit)


def test_a_call_that_does_not_fit_the_device_is_named_by_its_place(why: Why) -> None:
    first = why(
        'Traceback (most recent call last):\n  File "/home/user/train.py", line 81, in main\n    model = DDP(model)\n'
        '  File "/env/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", line 480, in __init__\n'
        "RuntimeError: Tensors must be CUDA and dense\n"
    )[0]
    assert first.cause.name == "backend-device-mismatch"
    assert first.culprit.things == ("train.py:81",)


def test_a_fault_of_the_program_is_named_by_its_place_where_nobody_is(why: Why) -> None:
    first = why(
        "THCudaCheck FAIL file=THCReduceAll.cuh line=317 error=77 : an illegal memory access was encountered\n"
        'Traceback (most recent call last):\n  File "train.py", line 15, in <module>\n    loss.backward()\n'
        "RuntimeError: cuda runtime error (77) : an illegal memory access was encountered at THCReduceAll.cuh:317\n"
    )[0]
    assert (first.cause.name, first.culprit.words()) == ("cuda-illegal-access", "train.py:15")


def test_the_variable_that_a_traceback_shows_is_named(why: Why) -> None:
    first = why(
        "    world = int(os.environ['SLURM_STEP_TASKS_PER_NODE'])\n"
        "ValueError: invalid literal for int() with base 10: '1(x2)'\n"
    )[0]
    assert (first.cause.name, first.culprit.words()) == ("slurm-env", "SLURM_STEP_TASKS_PER_NODE")


def test_the_file_that_was_being_written_is_named_where_the_disk_is_full(why: Why) -> None:
    first = why(
        "[Torch] Saving ./out/step1/model.pt...\n[Torch] Saving ./out/step1/optim.pt...\n"
        "RuntimeError: [enforce fail at inline_container.cc:471] . PytorchStreamWriter failed writing file data/3: "
        "file write failed\n"
    )[0]
    assert (first.cause.name, first.culprit.words()) == ("disk-full", "./out/step1/optim.pt")


@pytest.mark.parametrize(
    "before",
    [
        "Exception ignored in: <function Pool.__del__ at 0x7f>\nTraceback (most recent call last):\n",
        "--- Logging error ---\nTraceback (most recent call last):\n",
        'Traceback (most recent call last):\n  File "/lib/python3.8/multiprocessing/util.py", line 300, in '
        "_run_finalizers\n",
    ],
)
def test_an_exception_of_which_python_says_that_it_goes_on_ends_nothing(why: Why, before: str) -> None:
    said = before + '  File "/home/user/pool.py", line 7, in close\nKeyError: 7\nepoch 3 loss: 1.25\n'
    assert why(said)[0].cause.name == "healthy"


def test_what_comes_after_an_ignored_exception_counts(why: Why) -> None:
    first = why(
        'Exception ignored in: <f>\nTraceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 7\n'
        'Traceback (most recent call last):\n  File "train.py", line 2, in g\nException: no data\n'
    )[0]
    assert (first.cause.name, first.culprit.words()) == ("user-code-error", "train.py:2")


def test_a_few_in_another_collective_than_most_are_named(why: Why) -> None:
    said = "[E ProcessGroupNCCL.cpp:475] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, "
    said += "OpType={}, NumelIn=768, NumelOut=768, Timeout(ms)=1800000) ran for 1800885 milliseconds before timing out."
    places = ((1, 791, "ALLREDUCE"), (3, 786, "ALLGATHER"), (0, 786, "ALLGATHER"))
    first = why("\n".join(said.format(*place) for place in places))[0]
    assert (first.cause.name, first.culprit.ranks, first.victims) == ("collective-mismatch", (1,), {0, 3})


def test_lines_of_smaller_groups_are_not_compared_as_if_they_were_of_one(why: Why) -> None:
    """Without the group, as torch 2.3 writes them: three tensor-parallel groups, which count by themselves."""
    said = "[rank{}]:[E ProcessGroupNCCL.cpp:563] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL("
    said += (
        "SeqNum={}, OpType=ALLREDUCE, NumelIn=3, NumelOut=3, Timeout(ms)=600000) ran for 600010 milliseconds before "
    )
    said += "timing out.\n"
    first = why("".join(said.format(rank, rank % 4, 55 + (rank > 3)) for rank in range(12)))[0]
    assert (first.cause.name, first.culprit.ranks) == ("collective-timeout", ())


def test_who_waited_in_an_earlier_start_tells_nothing_of_the_last(why: Why) -> None:
    said = "[rank{0}]:[E ProcessGroupNCCL.cpp:629] [Rank {0}] Watchdog caught collective operation timeout: "
    said += "WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, NumelIn=3, NumelOut=3, Timeout(ms)=600000) ran for 600010 "
    said += "milliseconds before timing out.\n"
    starts = ["".join(said.format(rank, seq) for rank in ranks) for ranks, seq in (((0, 1, 2), 4), ((0, 1, 3), 9))]
    first = why(f"{RESTART}\n".join(starts))[0]
    assert (first.cause.name, first.culprit.ranks) == ("straggler-rank", (2,))


SUMMARY = """\
Failures:
[1]:
  time      : 2026-09-07_{later}
  host      : n1
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 14689)
Root Cause (first observed failure):
[0]:
  time      : 2026-09-07_13:02:58
  host      : n1
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 14690)
"""


def test_who_does_not_heed_the_agent_is_no_culprit(why: Why) -> None:
    unable = (
        "W0907 13:03:29.1 91 api.py:920] Unable to shutdown process 14689 via Signals.SIGTERM, forcefully exiting via "
    )
    found = why(unable + "Signals.SIGKILL\n" + SUMMARY.format(later="13:02:59"))
    assert [(one.cause.name, one.culprit.ranks) for one in found] == [("user-code-error", (1,))]


CLOSING = "".join(f"Sending process {pid} closing signal SIGTERM\n" for pid in (1201, 1202, 1204, 1205))


def test_the_process_that_an_agent_does_not_end_had_ended_unless_all_were_to_end(why: Why) -> None:
    assert why(CLOSING)[0].culprit.words() == "local rank 2 process 1203"
    told = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 91 got signal: 15\n"
    assert "1203" not in " ".join(one.culprit.words() for one in why(CLOSING + told))


@pytest.mark.parametrize(("rank", "culprits"), [(0, ()), (3, (3,))])
def test_what_took_long_is_no_reason_of_who_waited_itself(why: Why, rank: int, culprits: tuple[int, ...]) -> None:
    said = "[rank{0}]:[E ProcessGroupNCCL.cpp:629] [Rank {0}] Watchdog caught collective operation timeout: "
    said += "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=3, NumelOut=3, Timeout(ms)=600000) ran for 600010 "
    said += "milliseconds before timing out.\n"
    first = why(f"[rank{rank}]: epoch 1 took 3600.5 seconds\n" + "".join(map(said.format, (0, 1, 2))))[0]
    assert (first.culprit.ranks, first.confidence is Confidence.CERTAIN) == (culprits, False)


def test_the_pod_that_was_evicted_is_named(why: Why) -> None:
    pods = "ppo-master-0-9st9r   0/1   Evicted   0   19h\nppo-master-0-xk2vv   1/1   Running   0   9h\n"
    first = why(pods + "Message:  The node was low on resource: memory.\n")[0]
    assert (first.cause.name, first.culprit.nodes) == ("host-oom-kill", ("ppo-master-0-9st9r",))
