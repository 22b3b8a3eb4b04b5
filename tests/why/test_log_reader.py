"""For whom the answer of `allranks why` is: what the logs show, then where they are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from allranks.model.fix import ANYBODY, Reader, SchedulerKind, Vendor
from allranks.why.findings import find_reader
from allranks.why.logs.log_events import Logs

POD, NONE = Reader(SchedulerKind.POD), Reader(SchedulerKind.NONE)
CASES = {
    "nothing is known": ("RuntimeError: boom", None, ANYBODY, ANYBODY),
    "SLURM's lines, read in a pod": ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED ***", None, POD, ANYBODY),
    "kubectl's prefix": ("[pod/train-3/main] RuntimeError: boom", None, ANYBODY, POD),
    "a pod's address": ("connect to [worker-0.train.svc.cluster.local]:29500 failed", None, ANYBODY, POD),
    "kubelet": ("kubelet: Killing container train", None, ANYBODY, POD),
    "read in a pod": ("RuntimeError: boom", None, POD, POD),
    "ROCm": ("RuntimeError: HIP error: invalid device ordinal", None, ANYBODY, Reader(vendor=Vendor.AMD)),
    "RCCL": ("n1:1:1 [0] NCCL INFO RCCL version 2.20.5+hip6.2", None, ANYBODY, Reader(vendor=Vendor.AMD)),
    "a job of SLURM": ("RuntimeError: boom", "4711_3", POD, Reader(job="4711_3")),
    "a run without SLURM": ("RuntimeError: boom", "20261123-031500-4711", ANYBODY, NONE),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reader_is_found_in_the_logs_and_by_the_job(case: str, read: Callable[[str], Logs]) -> None:
    text, job, here, expected = CASES[case]
    found = find_reader(read(text), job=job, here=here)
    assert found == Reader(expected.scheduler, expected.vendor, job)
