"""Is a lost RDMA peer the consequence where a log tells how that peer's process ended? Whole logs, from `probes/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from allranks.why.conclusion import Conclusion

Why = Callable[[str | Mapping[str, str]], list[Conclusion]]

PROBES = Path(__file__).parent / "probes"
LOST = (
    "gpu-b12:40122:41007 [3] transport/net_ib/p2p.cc:514 NCCL WARN NET/IB: Got completion from peer 10.0.4.17<38221> "
    "with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RDMA_WRITE(1) reqSize=0 vendor_err=129 req_type=Send localGid "
    "::ffff:10.0.4.12 remoteGids::ffff:10.0.4.17 hca mlx5_3"
)
"""Rank 35 on gpu-b12 has lost its peer on gpu-b17."""


@pytest.mark.parametrize(
    ("probe", "cause", "culprit"),
    [
        pytest.param("06", "host-oom-kill", "worker-3", id="killed by SIGKILL, says the launcher"),
        pytest.param("u-a", "host-oom-kill", "gpu-b17 task 72", id="killed by the OOM killer, says SLURM"),
        pytest.param("u-b", "dead-rank", "gpu-b17 task 72", id="crashed, says srun"),
        pytest.param("u-c", "user-code-error", "rank 72 train.py:12", id="raised, in the same file"),
        pytest.param("u-d", "user-code-error", "rank 72 train.py:12", id="raised, in a file of its own"),
    ],
)
def test_a_peer_that_ended_outranks_the_packets_that_it_no_longer_answered(
    why: Why, probe: str, cause: str, culprit: str
) -> None:
    found = why({path.name: path.read_text() for path in (PROBES / probe).iterdir()})
    assert (found[0].cause.name, found[0].culprit.words()) == (cause, culprit)
    assert "ib-link-error" in [each.cause.name for each in found[1:]]


@pytest.mark.parametrize(
    "after",
    [
        pytest.param("", id="nothing else"),
        pytest.param("srun: error: gpu-b12: task 35: Aborted (core dumped)", id="who reports it is aborted"),
        pytest.param("srun: error: gpu-b12: task 35: Segmentation fault (core dumped)", id="who reports it crashes"),
        pytest.param("srun: error: gpu-b17: task 72: Killed", id="the peer is killed, nobody says by whom"),
    ],
)
def test_lost_packets_are_the_cause_where_no_peer_is_known_to_have_ended(why: Why, after: str) -> None:
    found = why(f"{LOST}\n{after}\n")
    assert found[0].cause.name == "ib-link-error"
