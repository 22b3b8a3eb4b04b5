"""Whom a log names in passing is the culprit where no sign names anybody; who only suffers is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from allranks.why.conclusion import Conclusion

Why = Callable[[str], list[Conclusion]]


@pytest.mark.parametrize(
    ("log", "cause", "culprit"),
    [
        pytest.param(
            "2023-04-29 06:01:12.977 [177/train/578 (pid 28936)] OSError: [Errno 28] No space left on device",
            "disk-full",
            "process 28936",
            id="a process in the line's own words",
        ),
        pytest.param(
            "(WorkerDict pid=4711, ip=10.0.0.7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
            "cuda-oom",
            "process 4711",
            id="the process that speaks",
        ),
        pytest.param(
            "XID 79(GPU has fallen off the bus) detected on PCI:0000:ae:00",
            "gpu-hardware",
            "GPU 0000:ae:00",
            id="the GPU in the line's own words",
        ),
        pytest.param(
            "RuntimeError: CUDA error: unspecified launch failure\n"
            "NVRM: Xid (PCI:0000:01:00): 109, pid=4124, name=python, Ch 00000028, errorString CTX SWITCH TIMEOUT",
            "gpu-hardware",
            "GPU 0000:01:00",
            id="the GPU in the next line",
        ),
        pytest.param(
            "Exception in a thread of rank 2:\nstep\nstep\nstep\n"
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "cuda-illegal-access",
            "rank 2",
            id="the only rank that is spoken of",
        ),
        pytest.param(
            "The node with client ID 6a16415bb1baa3dc2e753af42ab73ff900d87222 has been marked dead because the monitor "
            "has missed too many heartbeats from it.",
            "node-failure",
            "6a16415bb1baa3dc2e753af42ab73ff900d87222",
            id="a node that has a number only",
        ),
    ],
)
def test_who_is_named_in_passing_is_the_culprit(why: Why, log: str, cause: str, culprit: str) -> None:
    first, *_ = why(log)
    assert first.cause.name == cause
    assert culprit in first.culprit.words()


def test_of_several_ranks_none_is_named(why: Why) -> None:
    first, *_ = why("rank 1 is here\nrank 2 is here\nCUDA error: an illegal memory access was encountered")
    assert first.cause.name == "cuda-illegal-access"
    assert not first.culprit


def test_a_preempted_jobs_node_is_no_culprit(why: Why) -> None:
    first, *_ = why("slurmstepd: error: *** JOB 7 ON cn119 CANCELLED AT 2021-06-18T13:05:36 DUE TO PREEMPTION ***")
    assert first.cause.name == "preempted"
    assert not first.culprit


def test_a_process_that_the_launcher_tells_to_end_is_no_culprit(why: Why) -> None:
    first, *_ = why(
        "WARNING:torch.distributed.elastic.rendezvous.dynamic_rendezvous:The node 'n1_3427_0' has failed to send a "
        "keep-alive heartbeat to the rendezvous 'test' due to an error of type RendezvousConnectionError.\n"
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 3494 closing signal SIGTERM"
    )
    assert first.cause.name == "store-lost"
    assert not first.culprit


def test_devices_that_an_exception_of_the_users_names_are_no_culprits(why: Why) -> None:
    first, *_ = why(
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 7, in <module>\n'
        "    main()\n"
        "RuntimeError: Expected all tensors to be on the same device, but found two devices, cuda:0 and cuda:1!"
    )
    assert first.cause.name == "user-code-error"
    assert "GPU" not in first.culprit.words()
