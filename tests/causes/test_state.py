"""Do the signs of family 6, and of jobs that were ended from outside, name the right culprit and no healthy run?"""

from __future__ import annotations

import re
from typing import Any

import pytest

from allranks.causes.book import all_causes, find_cause
from allranks.causes.cause import Blames, Role, Sign


def best_of(name: str, line: str) -> tuple[Sign, dict[str, Any]]:
    """The sign of this cause that proves most about the line, and what its groups say."""
    found = [(sign, match) for sign in find_cause(name).signs if (match := re.search(sign.pattern, line))]
    assert found, line
    sign, match = min(found, key=lambda pair: pair[0].role)
    return sign, {key: value for key, value in match.groupdict().items() if value is not None}


@pytest.mark.parametrize(
    ("name", "line", "groups"),
    [
        (
            "nccl-version-mismatch",
            "init.cc:1039 NCCL WARN Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22703",
            {"rank": "1", "version": "22705", "own_version": "22703"},
        ),
        (
            "filesystem-hang",
            "user001   280058  117  4.6 17517200480 24494736 ? Dl  00:36 291:14 python",
            {"pid": "280058"},
        ),
        (
            "filesystem-hang",
            "INFO: task python:280058 blocked for more than 120 seconds.",
            {"command": "python", "pid": "280058", "seconds": "120"},
        ),
        (
            "filesystem-hang",
            "Lustre: fs-OST0000-osc: Connection to fs-OST0000 (at 10.0.1.5@tcp) was lost; in progress operations using",
            {"thing": "fs-OST0000", "server": "10.0.1.5@tcp"},
        ),
        ("nfs-stale", "OSError: [Errno 116] Stale file handle: '/nas/run/ckpt'", {"thing": "/nas/run/ckpt"}),
        ("nan-loss", "AssertionError: Rank 11: found NaN in local grad norm in backward pass", {"rank": "11"}),
        (
            "nan-loss",
            "RuntimeError: Rank 55, node g21u01, device 7, iteration 1: Unexpected result nan (message='found NaN')",
            {"rank": "55", "node": "g21u01", "gpu": "7"},
        ),
        (
            "world-size-changed",
            "ZeRORuntimeException: The checkpoint used a DP world size of 256 but the current world size is 2.",
            {"wanted": "256", "present": "2"},
        ),
        (
            "dataloader-shm",
            "RuntimeError: DataLoader worker (pid 3867) is killed by signal: Bus error.",
            {"pid": "3867", "signal": "Bus error"},
        ),
        ("horovod-elastic-timeout", "WARNING:root:blacklist failing host: ip-10-0-1-7", {"node": "ip-10-0-1-7"}),
        ("slurm-env", "initializing ddp: GLOBAL_RANK: 3, MEMBER: 4/8", {"rank": "3", "present": "4", "wanted": "8"}),
        ("slurm-env", "KeyError: 'SLURM_PROCID'", {"thing": "SLURM_PROCID"}),
    ],
)
def test_what_a_line_says_of_the_culprit_is_read(name: str, line: str, groups: dict[str, str]) -> None:
    assert best_of(name, line)[1] == groups


@pytest.mark.parametrize(
    ("line", "name", "role"),
    [
        ("error: *** JOB 5 ON n1 CANCELLED AT 2024-10-09T23:20:53 ***", "cancelled", Role.LIKELY),
        ("error: *** STEP 5.0 ON n1 CANCELLED AT 2024-10-09T23:20:53 ***", "cancelled", Role.VICTIM),
        ("error: *** JOB 5 ON n1 CANCELLED AT 2024-10-09T23:20:53 DUE TO TIME LIMIT ***", "time-limit", Role.PRIMARY),
        ("error: *** JOB 5 ON n1 CANCELLED AT 2024-10-09T23:20:53 DUE TO PREEMPTION ***", "preempted", Role.PRIMARY),
        ("error: *** JOB 5 ON n1 CANCELLED AT 2024-10-09T23:20:53 DUE TO JOB REQUEUE ***", "preempted", Role.LIKELY),
    ],
)
def test_slurm_says_who_ended_a_job(line: str, name: str, role: Role) -> None:
    sign, _ = best_of(name, line)
    assert sign.role is role
    assert sign.blames is Blames.NOBODY
    others = {"cancelled", "time-limit", "preempted"} - {name}
    assert not any(re.search(sign.pattern, line) for other in others for sign in find_cause(other).signs)


@pytest.mark.parametrize(
    "line",
    [
        "bert-worker-3:21:21 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.",
        "[rank0]:[W303 ProcessGroupNCCL.cpp:1168] Warning: WARNING: process group has NOT been destroyed",
        "torch/distributed/elastic/multiprocessing/api.py:858] Sending process 48006 closing signal SIGTERM",
        "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 97 - A)",
        "lm loss: 2.77E+00 | number of skipped iterations:   1 | number of nan iterations:   0 |",
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
        "initializing ddp: GLOBAL_RANK: 3, MEMBER: 4/8",
        "SLURM auto-requeueing enabled. Setting signal handlers.",
        "    will not load any checkpoints and will start from random",
        "user001   280059 87.9  4.4 17508566232 23526964 ? Rl  00:36 217:52 python",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "FutureWarning: You are using `torch.load` with `weights_only=False` (the current default value)",
    ],
)  # fmt: skip
def test_alarming_words_of_healthy_runs_accuse_nothing_of_job_or_state(line: str) -> None:
    fired = [
        cause.name
        for cause in all_causes()
        for sign in cause.signs
        if cause.id[2] in "56" and sign.role <= Role.GENERIC and re.search(sign.pattern, line)
    ]
    assert fired == []


@pytest.mark.parametrize("name", ["AR601", "AR602", "AR603", "AR604", "AR605", "AR606", "AR607", "AR608", "AR609"])
def test_family_6_says_what_was_found_without_values(name: str) -> None:
    cause = find_cause(name)
    assert cause.told
    assert "{" not in cause.told + cause.message


def test_the_old_names_of_the_elastic_gotchas_lead_to_their_causes() -> None:
    assert find_cause("MN5").name == "elastic-no-resume"
    assert find_cause("MN6").name == "horovod-elastic-timeout"
