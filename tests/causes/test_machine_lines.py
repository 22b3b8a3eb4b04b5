"""What lines of logs say of nodes, GPUs and RDMA: which cause, how much they prove, whom they name."""

from __future__ import annotations

import re

import pytest

from allranks.causes.book import all_causes, all_xids, find_cause
from allranks.causes.cause import Blames, Role


def read(cause: str, line: str) -> tuple[Role, Blames, dict[str, str]]:
    """The best sign of a cause for a line: what it proves, whom it blames, what all its signs for this line say."""
    hits = [(sign, match) for sign in find_cause(cause).signs if (match := re.search(sign.pattern, line))]
    assert hits, line
    best = min(hits, key=lambda hit: hit[0].role)[0]
    said = {name: value for _, match in hits for name, value in match.groupdict().items() if value}
    return best.role, best.blames, said


@pytest.mark.parametrize(
    ("cause", "line", "role", "blames", "said"),
    [
        (
            "host-oom-kill",
            "srun: error: nid006024: task 0: Out Of Memory",
            Role.PRIMARY, Blames.NAMED, {"node": "nid006024", "thing": "task 0"},
        ),
        (
            "host-oom-kill",
            "Memory cgroup out of memory: Kill process 3309 (python) score 1 or sacrifice child",
            Role.PRIMARY, Blames.SPEAKER, {"pid": "3309"},
        ),
        (
            "host-oom-kill",
            "mpirun noticed that process rank 3 with PID 2144 on node gpu-node-2 exited on signal 9 (Killed).",
            Role.LIKELY, Blames.NAMED, {"rank": "3", "pid": "2144", "node": "gpu-node-2"},
        ),
        (
            "node-failure",
            "slurmctld: error: Nodes node[03,07] not responding, setting DOWN",
            Role.PRIMARY, Blames.NAMED, {"node": "node[03,07]"},
        ),
        (
            "node-failure",
            "slurmstepd: error: *** STEP 1943824.0 ON iam17 CANCELLED AT 2023-03-06T03:17:51 DUE TO NODE FAILURE, SEE "
            "SLURMCTLD LOG FOR DETAILS ***",
            Role.PRIMARY, Blames.NOBODY, {"ran_on": "iam17"},
        ),
        (
            "disk-full",
            "OSError: [Errno 28] No space left on device: '/scratch/run/ckpt.pt'",
            Role.PRIMARY, Blames.SPEAKER, {"thing": "/scratch/run/ckpt.pt"},
        ),
        (
            "shm-too-small",
            "Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), error: No space left "
            "(28)",
            Role.PRIMARY, Blames.SPEAKER, {"thing": "/dev/shm"},
        ),
        (
            "gpu-hardware",
            "NVRM: Xid (PCI:0000:04:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 11 (0x00000003)",
            Role.PRIMARY, Blames.SPEAKER, {"gpu": "0000:04:00", "code": "145", "thing": "Link 11"},
        ),
        (
            "cuda-oom",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
            "79.15 GiB of which 1.17 GiB is free.",
            Role.PRIMARY, Blames.SPEAKER, {"gpu": "3", "wanted": "2.00 GiB", "present": "79.15 GiB"},
        ),
        (
            "duplicate-gpu",
            "Duplicate GPU detected : rank 3 and rank 2 both on CUDA device e2000",
            Role.PRIMARY, Blames.NAMED, {"rank": "3", "ranks": "2", "gpu": "e2000"},
        ),
        (
            "driver-cuda-mismatch",
            "AssertionError: The NVIDIA driver on your system is too old (found version 10010).",
            Role.PRIMARY, Blames.SPEAKER, {"thing": "version 10010"},
        ),
        (
            "ib-link-error",
            "NCCL WARN NET/IB: Got completion from peer 10.0.0.2<33057> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=",
            Role.PRIMARY, Blames.PEER, {"peer": "10.0.0.2", "status": "12"},
        ),
        (
            "ib-link-error",
            "NCCL WARN NET/IB : Got completion from peer fe80::1%ib0<33057> with status=5 opcode=0 len=0 vendor err "
            "249",
            Role.VICTIM, Blames.PEER, {"peer": "fe80::1%ib0", "status": "5"},
        ),
        (
            "ib-config",
            "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, curr state INIT",
            Role.PRIMARY, Blames.SPEAKER, {"said": "Connection timed out", "hca": "mlx5_0:1"},
        ),
        (
            "hca-set-differs",
            "NCCL INFO Rank 8 has 1 local Net devices (max 2).",
            Role.LIKELY, Blames.NAMED, {"rank": "8", "present": "1", "wanted": "2"},
        ),
    ],
)  # fmt: skip
def test_lines_are_read(cause: str, line: str, role: Role, blames: Blames, said: dict[str, str]) -> None:
    assert read(cause, line) == (role, blames, said)


def test_each_xid_is_of_one_cause() -> None:
    signs = [(cause.name, sign.role, re.compile(sign.pattern)) for cause in all_causes() for sign in cause.signs]
    fired = {
        code: {name: role for name, role, pattern in reversed(signs) if pattern.search(XID_LINE.format(code))}
        for code in all_xids()
    }
    wanted = {
        code: {"cuda-illegal-access" if xid.asks == "program" else "gpu-hardware"} for code, xid in all_xids().items()
    }
    assert {code: set(causes) for code, causes in fired.items()} == wanted
    fatal = [code for code, xid in all_xids().items() if xid.asks in ("reset", "reboot", "hands")]
    assert [code for code in fatal if Role.PRIMARY not in fired[code].values()] == []


XID_LINE = "NVRM: Xid (PCI:0000:44:00): {}, pid=812, name=python3"


def test_a_number_that_begins_like_another_is_not_it() -> None:
    assert not [
        cause.name
        for cause in all_causes()
        for sign in cause.signs
        if re.search(sign.pattern, "NVRM: Xid (PCI:0000:44:00): 7999, made up")
    ]


@pytest.mark.parametrize(
    "line",
    [
        "bert-worker-3:21:21 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.",
        "node05:44753:44753 [7] NCCL INFO NET/IB : No device found.",
        "worker-b:101542:101542 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
        "WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL.",
        "W0303 09:17:03.837000 140066 torch/distributed/elastic/multiprocessing/api.py:858] Sending process 48006 "
        "closing signal SIGTERM",
        "max memory allocated: 71.2 GiB, reserved 76.0 GiB, out of 79.1 GiB",
        "saved checkpoint to /dev/shm/ckpt, 12 GiB left on device",
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being "
        "overloaded",
    ],
)
def test_alarming_lines_of_healthy_runs_are_no_faults_of_machines(line: str) -> None:
    families = ("AR0", "AR1", "AR3")
    assert not [
        (cause.name, sign)
        for cause in all_causes()
        for sign in cause.signs
        if cause.id.startswith(families) and sign.role < Role.VICTIM and re.search(sign.pattern, line)
    ]
