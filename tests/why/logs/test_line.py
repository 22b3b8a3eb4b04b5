"""Who says a line, and when: real lines of launchers, loggers and programs."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.why.logs.line import MAX_TEXT, Line, read_line, strip_control
from allranks.why.logs.sources import Source

BARE = Source("-", None, None, None, None, None, 0)


def read(raw: str | bytes, source: Source = BARE) -> Line:
    return read_line(raw if isinstance(raw, bytes) else raw.encode(), source, 1)


def source(node: str | None = None, rank: int | None = None, local_rank: int | None = None) -> Source:
    return Source("x.log", "x.log", node, rank, local_rank, None, 1)


SPEAKERS = [
    # raw, node, rank, local rank, pid
    ("[rank3]: RuntimeError: x", None, 3, None, None),
    ("[2025-01-29 08:52:52 DP1 TP3] Scheduler hit an exception: Traceback", None, None, 3, None),
    ("GPUCA6E: OSError: [Errno 24] Too many open files", "GPUCA6E", None, None, None),
    ("RANK0: RuntimeError: x", None, 0, None, None),
    ('gpu003:   File "train.py", line 7, in main', "gpu003", None, None, None),
    ("gpu003:   rank      : 3 (local_rank: 3)", "gpu003", None, None, None),
    ("1: [allreduce.c_d1.bias, allreduce.c_d1.weight ...]", None, None, None, None),
    ("rank_604.n7.4711.log:[E1218 20:27:21.48 A.cpp:1] x", None, 604, None, None),
    ("3: [rank3]:[W303 09:17:03.29 ProcessGroupNCCL.cpp:1168] Warning", None, 3, None, None),
    ("\x1b[36m3: \x1b[0m\x1b[31m[rank5]:\x1b[0m boom", None, 5, None, None),
    ("3:[rank3]: x", None, 3, None, None),
    ("3: Traceback (most recent call last):", None, 3, None, None),
    ("  12: loss 0.3", None, 12, None, None),
    ("100001: loss", None, None, None, None),
    ("22:13:28  Received 2 death signal, shutting down workers", None, None, None, None),
    ("[default0]:Traceback (most recent call last):", None, None, 0, None),
    ("[default7]: iteration    31214/  115311 | consumed samples: 1", None, None, 7, None),
    ("[default3]:[rank11]: KeyError: 'x'", None, 11, 3, None),
    ("1: [default3]:KeyError: 'x'", None, None, 3, None),
    ("trainer/0 [1]:[W socket.cpp:558] [c10d] The client socket has failed", "trainer/0", None, 1, None),
    ("[node03|6]:RuntimeError: x", "node03", None, 6, None),
    ("[trainer22|6]:RuntimeError: x", "trainer22", None, 6, None),
    ("[1,24]<stdout>:bert-worker-3:21:22 [0] NCCL INFO x", "bert-worker-3", 24, 0, 21),
    ("[1,24]<stderr>: Traceback", None, 24, None, None),
    ("[prterun-n1-77@1,3]<stderr>: Traceback", None, 3, None, None),
    ("[0]<stderr>:ValueError", None, 0, None, None),
    ("Fri Sep 25 03:11:09 2020[2]<stderr>:Missing ranks:", None, 2, None, None),
    ("node03: RuntimeError: x", "node03", None, None, None),
    ("dgx-a100-07.cluster.local: Killed", None, None, None, None),
    ("gpu-node-7.cluster.local: Killed", "gpu-node-7.cluster.local", None, None, None),
    ("r7i2n4: [2023-04-02 20:28:05,674] [INFO] [launch.py:319:sigkill_handler] Killing", "r7i2n4", None, None, None),
    ("10.151.80.10: node-23-10:13:15 [0] transport/net_ib.cc:1038 NCCL WARN x", "node-23-10", None, 0, 13),
    ("node02: node02:4123:4190 [3] NCCL INFO transport/net.cc:890 -> 5", "node02", None, 3, 4123),
    ("1: p4de-2:4827:6900 [4] bootstrap.cc:77 NCCL WARN Message truncated", "p4de-2", None, 4, 4827),
    ("n201:12:16 [2] transport/net_ib/common.cc:140 (ncclIbAsyncThreadMain) NCCL WARN x", "n201", None, 2, 12),
    ("12: p4de-2:4827:6900 [4] NCCL INFO x", "p4de-2", 12, 4, 4827),
    ("[2025-04-01 10:00:00] h1:7:8 [-1] NCCL INFO x", "h1", None, None, 7),
    ("4b1a9e8a140f:21:22 [1] NCCL INFO x", "4b1a9e8a140f", None, 1, 21),
    ("dgj101:1456:1457 [0] misc/ibvwrap.cu:269 WARN Call to ibv_create_qp failed", "dgj101", None, 0, 1456),
    ("vm-1-centos:2871:2872 [32523] misc/cudawrap.cc:182 NCCL WARN x", "vm-1-centos", None, None, 2871),
    ("10:34:07 [0] INFO x", None, None, None, None),
    ("2023-10-20 17:23:18 [0] WARN x", None, None, None, None),
    ("-worker-1:946:988 [0] transport/net_ib.cc:839 NCCL WARN x", "worker-1", None, 0, 946),
    ("[1668693503.473099] [amp01:1188:0]   ib_log.c:246  UCX  ERROR x", "amp01", None, None, 1188),
    ("gpu: Test CUDA failure common.cu:1030 'system not yet initialized'", "gpu", None, None, None),
    ("worker-3  | 4b1a9e8a140f:21:22 [1] NCCL INFO x", "worker-3", None, 1, 21),
    ("[0m ip-172-31-33-37:14605:14673 [0] NCCL INFO x", "ip-172-31-33-37", None, 0, 14605),
    ("[master-node r0] the sum is 6.0", "master-node", 0, None, None),
    ("[m r1] step", "m", 1, None, None),
    ("[K8s-3 r2] step", "K8s-3", 2, None, None),
    ("[Jupiter r3] step", "Jupiter", 3, None, None),
    ("[H100-a r4] step", "H100-a", 4, None, None),
    ("[36master r5] step", "36master", 5, None, None),
    ("[node03 r3] Traceback", "node03", 3, None, None),
    ("[4711_1 node03 r3] Traceback", "node03", 3, None, None),
    ("(RayWorkerWrapper pid=24271) ERROR 07-25 07:05:40 worker_base.py:382] x", None, None, None, 24271),
    ("\x1b[36m(RayTrainWorker pid=24271, ip=10.0.0.3)\x1b[0m RuntimeError", "10.0.0.3", None, None, 24271),
    ("(VllmWorker rank=3 pid=1234) ERROR x", None, 3, None, 1234),
    ("ray::WorkerDict.save() (pid=21050, ip=10.0.0.43)", None, None, None, None),
    ("worker_3  | Traceback", "worker_3", None, None, None),
    ("[pod/train-worker-1/pytorch] Traceback", "train-worker-1", None, None, None),
    ("May 19 07:08:57 ip-26-0-146-100 kernel: NVRM: Xid (PCI:0000:a8:00): 79", "ip-26-0-146-100", None, None, None),
    ("May  9 07:08:57 n7 slurmd[123]: error: x", "n7", None, None, 123),
    ("May  9 07:08:57 n7 nvidia-persistenced[123]: x", "n7", None, None, 123),
    ("2026-05-19T07:08:57.1+00:00 n7 kernel: Out of memory", "n7", None, None, None),
    ("2026-05-19T07:08:57.1Z INFO trainer: step 1", None, None, None, None),
    ("May 19 07:08:57 INFO trainer: step 1", None, None, None, None),
    ("W0325 10:34:07.578000 3045566 torch/distributed/elastic/agent.py:723] Received 15", None, None, None, 3045566),
    ("W0819 12:00:00.123000 140234567890123 torch/distributed/run.py:779] ", None, None, None, None),
    ("[E ProcessGroupNCCL.cpp:475] [Rank 13] Watchdog caught", None, 13, None, None),
    ("3: [E ProcessGroupNCCL.cpp:475] [Rank 13] Watchdog caught", None, 13, None, None),
    ("12: [E ProcessGroupNCCL.cpp:475] [PG 5 Rank 0] Watchdog caught", None, 12, None, None),
    ("[rank4]:[E ProcessGroupNCCL.cpp:1316] [PG 5 Rank 0] Heartbeat monitor timed out", None, 4, None, None),
    ("[PG ID 1 PG GUID 1 Rank 3] x", None, None, None, None),
    ("Rank 3: x", None, 3, None, None),
    ("RANK 3: x", None, 3, None, None),
    ("DTensorPolicyWorkerV2[rank=5]: offload", None, 5, None, None),
    ("[2023-10-02 08:36:08,272] [INFO] [logging.py:96:log_dist] [Rank 0] DeepSpeed info", None, 0, None, None),
    ("initializing ddp: GLOBAL_RANK: 2, MEMBER: 3/4", None, 2, None, None),
    ("LOCAL_RANK: 1 - CUDA_VISIBLE_DEVICES: [0,1]", None, None, 1, None),
    ("INFO:root:Waiting in store based barrier to initialize process group for rank: 5, key: x", None, 5, None, None),
    ("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 60000 ms", None, 0, None, None),
    # who is spoken of, not who speaks; and what only looks like a speaker
    ("  rank      : 7 (local_rank: 7)", None, None, None, None),
    ("srun: error: node03: task 3: Killed", None, None, None, None),
    ("slurmstepd: error: *** JOB 12 ON node03 CANCELLED ***", None, None, None, None),
    ("torch...SignalException: Process 3045566 got signal: 15", None, None, None, None),
    ("Process 3: x", None, None, None, None),
    ("RuntimeError: Duplicate GPU detected : rank 3 and rank 2 both on CUDA device e2000", None, None, None, None),
    ("python3: can't open file 'train.py'", None, None, None, None),
    ("mlx5_0: port 1 down", None, None, None, None),
    ("eth0: link down", None, None, None, None),
    ("step_100 | loss 0.3", None, None, None, None),
    ("RuntimeError: [/w/gloo/transport/tcp/pair.cc:799] connect [172.31.138.170]:13195: x", None, None, None, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "node", "rank", "local_rank", "pid"), SPEAKERS, ids=[case[0][:60] for case in SPEAKERS]
)
def test_who_says_a_line(raw: str, node: str | None, rank: int | None, local_rank: int | None, pid: int | None) -> None:
    line = read(raw)
    assert (line.node, line.rank, line.local_rank, line.pid) == (node, rank, local_rank, pid)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("3: [rank3]:[E1218 20:27:21.48 A.cpp:1] x", "[E1218 20:27:21.48 A.cpp:1] x"),
        ("[rank1]:     fire.Fire(do_cli)", "    fire.Fire(do_cli)"),
        ("[default0]:    loss.backward()\n", "    loss.backward()"),
        ("Fri Sep 25 03:11:09 2020[0]<stderr>:[2020-09-25 03:11:09.3: W /x] One", "[2020-09-25 03:11:09.3: W /x] One"),
        ("10.151.80.10: node-23-10:13:15 [0] NCCL INFO x", "node-23-10:13:15 [0] NCCL INFO x"),
        ("[0m ip-1-2-3-4:5:6 [0] NCCL INFO x", "ip-1-2-3-4:5:6 [0] NCCL INFO x"),
        ("[master-node] the sum", "[master-node] the sum"),
        ("[m[36m(pid) x", "(pid) x"),
        ("^[[31mred^[[0m", "red"),
        ("#033[1;31mred#033[0m", "red"),
        ("\x1b[36m(RayTrainWorker pid=2, ip=10.0.0.3)\x1b[0m RuntimeError", "RuntimeError"),
        ("(Worker pid=2) x [repeated 3x across cluster]", "x [repeated 3x across cluster]"),
        ("trainer/0 [1]:[W socket.cpp:558] x", "[W socket.cpp:558] x"),
        ("2026-03-25T10:34:07.530123456Z [rank3]: x", "x"),
        ("2026-03-25T10:34:07.530123456Z x", "x"),
        ("[PG 5 Rank 0] x", "[PG 5 Rank 0] x"),
        ("May 19 07:08:57 n7 kernel: x", "May 19 07:08:57 n7 kernel: x"),
        ("    [E A.cpp:1] x", "    [E A.cpp:1] x"),
        ("\ufeff\x1b]0;title\x07\x1b[1;31mred\x1b[0m\x1b[2K\ttab\x08\x9b1mC1", "red\ttabC1"),
        ("\x1b]0;never ends, so nothing is lost", "0;never ends, so nothing is lost"),
    ],
)
def test_what_is_said_has_neither_prefix_nor_colours(raw: str, text: str) -> None:
    assert read(raw).text == text


def test_the_line_knows_better_than_the_path_and_the_path_better_than_the_message() -> None:
    whole = source("n1", 1, 1)
    assert read("[rank7]: x", whole).rank == 7
    assert read("[PG 3 Rank 0] x", whole).rank == 1
    assert read("n9:1:2 [5] NCCL INFO x", whole).node == "n9"
    assert read("n9:1:2 [5] NCCL INFO x", whole).local_rank == 1
    assert read("4b1a9e8a140f:1:2 [5] NCCL INFO x", whole).node == "n1"
    assert read("x", whole).rank == 1


def test_a_number_and_a_colon_is_no_prefix_in_a_rank_s_own_file() -> None:
    line = read("3: [broadcast.x]", source(rank=5))
    assert (line.rank, line.text) == (5, "3: [broadcast.x]")
    assert read("3: x", source(local_rank=5)).rank is None


def utc(*when: int, fraction: float = 0) -> float:
    year, month, day, hour, minute, second = when
    return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp() + fraction


TIMES = [
    ("[rank0]:[E1218 20:27:21.426415540 A.cpp:629] x", utc(1972, 12, 18, 20, 27, 21, fraction=0.42641554), False),
    ("[rank0]:[W303 09:17:03.293812312 A.cpp:1168] x", utc(1972, 3, 3, 9, 17, 3, fraction=0.293812312), False),
    ("W0325 10:34:07.578000 3045566 torch/x.py:1] x", utc(1972, 3, 25, 10, 34, 7, fraction=0.578), False),
    ("May 19 07:08:57 h kernel: x", utc(1972, 5, 19, 7, 8, 57), False),
    ("Feb 29 07:08:57 h kernel: x", utc(1972, 2, 29, 7, 8, 57), False),
    ("(A pid=1) ERROR 07-25 07:05:40 worker_base.py:382] x", utc(1972, 7, 25, 7, 5, 40), False),
    ("[2026-03-25T10:34:07.530] error: x", utc(2026, 3, 25, 10, 34, 7, fraction=0.53), True),
    ("[2025-12-18 20:27:22,783] [INFO] x", utc(2025, 12, 18, 20, 27, 22, fraction=0.783), True),
    ("INFO 2025-12-18 20:27:22 x", utc(2025, 12, 18, 20, 27, 22), True),
    ("2025/12/18 20:27:22 x", utc(2025, 12, 18, 20, 27, 22), True),
    ("2025-12-18T20:27:22Z x", utc(2025, 12, 18, 20, 27, 22), True),
    ("2025-12-18T20:27:22.5+02:00 x", utc(2025, 12, 18, 18, 27, 22, fraction=0.5), True),
    ("2025-12-18 20:27:22 -0530 x", utc(2025, 12, 19, 1, 57, 22), True),
    ("07/25/2023 07:05:40 - INFO - x", utc(2023, 7, 25, 7, 5, 40), True),
    ("Fri Sep 25 03:11:09 2020[0]<stderr>:x", utc(2020, 9, 25, 3, 11, 9), True),
    ("Fri Sep  5 03:11:09 UTC 2020 x", utc(2020, 9, 5, 3, 11, 9), True),
    ("[Mon May 19 07:08:57 2026] NVRM: Xid", utc(2026, 5, 19, 7, 8, 57), True),
    ("[0]<stderr>:[2020-09-25 03:11:09.347196: W /x] x", utc(2020, 9, 25, 3, 11, 9, fraction=0.347196), True),
    ("  time      : 2024-09-09_09:36:56", utc(2024, 9, 9, 9, 36, 56), True),
    ("error: *** STEP 1.0 ON n CANCELLED AT 2026-03-25T10:34:07 ***", utc(2026, 3, 25, 10, 34, 7), True),
    ("May 19 07:08:57 h app: 2026-05-19 07:08:56 x", utc(2026, 5, 19, 7, 8, 56), True),
]


@pytest.mark.parametrize(("raw", "time", "has_year"), TIMES, ids=[case[0][:50] for case in TIMES])
def test_when_it_was_said(raw: str, time: float, has_year: bool) -> None:
    line = read(raw)
    assert line.time == pytest.approx(time, abs=1e-5)
    assert (line.has_year, line.has_date) == (has_year, True)


def test_a_time_of_day_has_no_date() -> None:
    line = read("[rank0]: [22:13:28] x")
    assert (line.time, line.has_year, line.has_date) == (22 * 3600 + 13 * 60 + 28, False, False)


@pytest.mark.parametrize(
    "raw",
    [
        "x", "elapsed 01:02:03", "timeout=0:30:00",
        " 10%|#  | 1/10 [01:20:33<02:00:00, 1it/s]", "2023-13-45 10:00:00 x",
        "1700000000.5 x", "99:99:99", "[c10d] connect to [::ffff:10.0.0.1]:29500", "aa:12:34:56:78:bb",
    ],
)  # fmt: skip
def test_a_duration_is_no_time(raw: str) -> None:
    line = read(raw)
    assert (line.time, line.has_year, line.has_date) == (None, False, False)


def test_a_long_line_is_cut_and_broken_utf8_is_replaced() -> None:
    line = read(b"[rank3]: " + "\u20ac".encode() * 10_000_000)
    assert (line.rank, len(line.text)) == (3, MAX_TEXT)
    assert read(b"caf\xc3").text == "caf\ufffd"


@pytest.mark.parametrize(
    "unit",
    ["a-", "1", " ", "[", "[rank", "\x1b]", "\x1b[", "00:00:00 ", "2020-", "a:1:2 [0] ", "(x pid=", "node", "-"],
)
def test_hostile_lines_take_no_time(unit: str) -> None:
    raw = f"{unit * 100_000}NCCL ".encode()
    begin = datetime.now()
    read(raw)
    assert (datetime.now() - begin).total_seconds() < 0.2


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_line(raw: bytes) -> None:
    line = read(raw)
    assert len(line.text) <= MAX_TEXT
    assert not set(line.text) & set(map(chr, [*range(9), *range(10, 32), 127]))


PIECES = [
    "[rank3]:", "3: ", "[default0]:", "[1,2]<stdout>:", "n1:1:2 [0] NCCL ", "\x1b[0m", "2020-01-01 00:00:00", "node3: ",
    "(A pid=1) ", "[PG 1 Rank 2]", "May 19 07:08:57 h k: ", "99", ":", " ", "|", "E1399 23:59:60.1 ", "[a|2]:",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join))
def test_any_mix_of_prefixes_is_a_line(text: str) -> None:
    line = read(text.encode("utf-8", "replace"))
    assert line.rank is None or 0 <= line.rank <= 100_000
    assert strip_control(line.text) == line.text
