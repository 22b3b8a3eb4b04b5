"""Who is meant where the line that proves a cause names nobody: the place to meet, a fragment's only machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from allranks.facts.fact import Who
from allranks.why.conclusion import Conclusion
from allranks.why.logs.log_events import Logs
from allranks.why.people import People

Why = Callable[[str | Mapping[str, str]], list[Conclusion]]

LOST = "RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details."


@pytest.mark.parametrize(
    ("line", "endpoint"),
    [
        ("  rdzv_endpoint    : 10.28.1.16:29400", "10.28.1.16:29400"),
        ("+ torchrun --nnodes=2 --rdzv-endpoint=node01:29500 train.py", "node01:29500"),
        ("accelerate launch --main_process_ip 10.0.0.7 train.py", "10.0.0.7"),
        ("export MASTER_ADDR=<node-0>", "<node-0>"),
        ("  master_addr=worker-0.train", "worker-0.train"),
    ],
)
def test_the_place_to_meet_is_named_where_nothing_else_is(why: Why, line: str, endpoint: str) -> None:
    found = why(f"{line}\ntorch.distributed.elastic.rendezvous.api.{LOST}\n")[0]
    assert found.cause.name == "master-unreachable"
    assert endpoint in found.culprit.things


def test_a_line_that_names_an_address_is_better_than_the_place_to_meet(why: Why) -> None:
    found = why(
        "MASTER_ADDR=node01\nThe client socket has timed out after 60s while trying to connect to (10.0.0.9, 29500).\n"
    )[0]
    assert "node01" not in found.culprit.words()
    assert "10.0.0.9" in found.culprit.words()


def test_a_fragment_names_the_only_machine_that_speaks_in_it(why: Why) -> None:
    found = why(
        "dgx-3:2152:2299 [0] NCCL INFO Using network IB\n"
        "misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable\n"
    )[0]
    assert (found.cause.name, found.culprit.nodes) == ("ib-config", ("dgx-3",))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("n1:7:7 [0] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to {ip}<{port}> returned 113(No route to "
         "host)", "firewall-port"),
        ("The client socket has timed out after 60s while trying to connect to ({ip}, {port}).", "master-unreachable"),
        ("[W socket.cpp:601] [c10d] The client socket has failed to connect to [{ip}]:{port} (errno: 113 - No route to "
         "host).", "master-unreachable"),
        ("NCCL WARN NET/IB : Got completion from peer {ip}<{port}> with error 12, opcode 0, len 0, vendor err 129",
         "ib-link-error"),
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:{port}: Connection refused",
         "loopback-hostname"),
    ],
)  # fmt: skip
def test_what_people_mask_does_not_hide_the_cause(why: Why, line: str, name: str) -> None:
    found = {}
    for masked in ("xx.xx.xx.xx", "<ip>", "IP1", "***.***.***.***", "10.0.x.x"):
        for port in ("29500", "PORT", "<port>", "xxxx"):
            bare = port.strip("<>") if "<{port}>" in line else port
            text = line.replace("{ip}", masked).replace("{port}", bare)
            found[text] = why(text)[0].cause.name
    assert {text: cause for text, cause in found.items() if cause != name} == {}


def test_a_host_that_the_files_of_several_nodes_name_is_no_other_name_of_any(why: Why) -> None:
    said = "node001:4711:4711 [0] NCCL WARN NCCL_SOCKET_IFNAME set by environment to ib0\n"
    end = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    found = why(
        {f"node{node}/rank_{rank}.log": said + end * (rank == 2) for rank, node in enumerate(("007", "008", "341"))}
    )
    assert found[0].culprit.nodes == ("node341",)


JOINED = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.\n"


def test_who_only_counts_who_joined_is_not_missing_itself(why: Why) -> None:
    refused = (
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect "
    )
    refused += "to (node01, 29500).\n"
    found = why(f"[rank0]: {refused}[rank0]: {JOINED}[rank3]: {refused}")[0]
    assert (found.cause.name, found.culprit.ranks) == ("missing-rank", (3,))


def test_whoever_wrote_nothing_is_missing_if_those_are_as_many_as_did_not_join(why: Why) -> None:
    said = "[rank0]: loading\n[rank1]: loading\n{}" + f"[rank0]: {JOINED}"
    found = why(said.format("[rank2]: loading\n"))[0]
    assert (found.cause.name, found.culprit.ranks, str(found.confidence)) == ("missing-rank", (3,), "likely")
    assert why(said.format(""))[0].culprit.ranks == ()


def test_whoever_counts_who_joined_is_not_missing_whoever_waits_for_it(why: Why) -> None:
    key = "[rank1]: torch.distributed.DistStoreError: wait timeout after 15000ms, keys: /default_pg/0//cpu//0/0\n"
    assert why(key)[0].culprit.ranks == (0,)
    assert why(key + JOINED)[0].culprit.ranks == ()


WAITING = (
    "INFO:root:Waiting in store based barrier to initialize process group for rank: {}, key: store_based_barrier_key:{}"
    " (world_size=4, worker_count=3, timeout=0:30:00)\n"
)
CAME = "INFO:root:Rank {}: Completed store-based barrier for key:store_based_barrier_key:1 with 4 nodes.\n"
CLOSED = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:575] Connection closed by peer [10.0.0.7]:43185\n"


@pytest.mark.parametrize("after", [CAME.format(0), "step 1 loss 0.3\n"], ids=["the barrier ended", "it trained"])
def test_who_came_late_is_not_missing(why: Why, after: str) -> None:
    waiting = "".join(WAITING.format(rank, 1) for rank in (0, 1, 2))
    found = why(waiting + after + CLOSED)
    assert "likely" not in {str(one.confidence) for one in found if one.cause.name == "missing-rank"}


def test_who_does_not_come_to_a_later_barrier_is_missing(why: Why) -> None:
    found = why(WAITING.format(3, 1) + CAME.format(3) + "".join(WAITING.format(rank, 2) for rank in (0, 1, 2)))[0]
    assert (found.cause.name, found.culprit.ranks, str(found.confidence)) == ("missing-rank", (3,), "likely")


def test_a_communicator_of_some_ranks_numbers_them_anew(read: Callable[[str], Logs]) -> None:
    line = "n1:{0}:{0} [0] NCCL INFO comm 0x5{0} rank {1} nranks {2} cudaDev 0 busId 1000 - Init COMPLETE\n"
    people = People(read("".join(line.format(70 + rank, rank % size, size) for size in (4, 2) for rank in range(4))))
    assert [people.know(Who(node="n1", pid=70 + rank)).rank for rank in range(4)] == [0, 1, 2, 3]


SUMMARY = """============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_05:10:02
  host      : node-a
  rank      : 3 (local_rank: 3)
  exitcode  : -6 (pid: 4242)
============================================================
"""
RAISED = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 41, in main\nKeyError: 17\n'


@pytest.mark.parametrize(("folders", "ranks"), [(("",), (3,)), (("x/", "y/"), ())])
def test_only_in_one_folder_of_torchrun_is_a_local_rank_the_rank(
    why: Why, folders: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    files = {f"{folder}attempt_0/3/stderr.log": "RuntimeError: Connection reset by peer\n" for folder in folders}
    found = why({**files, "console.log": SUMMARY, f"{folders[-1]}attempt_0/3/stderr.log": RAISED})[0]
    assert (found.cause.name, found.culprit.ranks) == ("user-code-error", ranks)
