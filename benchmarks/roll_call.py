"""How does the roll call grow? Simulated agents, real sockets: from 8 to 1,024, and every pair at 64.

    python benchmarks/roll_call.py                    # 8, 64 (all pairs), 128, 256, 512, 1024
    python benchmarks/roll_call.py --nodes 1024 --rounds 3

The leader is a process of its own, as on its node; the agents share as many processes as the machine has cores, each
with its own connection, ports and card. What is measured is the leader's: from the first agent that may join to the
verdict. Above 64 nodes pairs are tried sparsely, with one connection and at most 4 KiB each, but for one packet of MTU
9000 that each node sends to one other and gets back.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import resource
import selectors
import statistics
import sys
import time
from multiprocessing.connection import Connection as Pipe

import msgspec

from allranks.host.node import read_card_facts
from allranks.model.card import Card, Facts, Interface
from allranks.model.finding import Verdict
from allranks.preflight.attend import Attendance
from allranks.preflight.look import FULL_UP_TO
from allranks.preflight.mesh.tester import Mesh
from allranks.preflight.pairs import choose_pairs
from allranks.preflight.rollcall import RollCall, stop
from allranks.preflight.roster import Terms
from allranks.wire.accept import Acceptor
from allranks.wire.leader import Hint, bind_port
from allranks.wire.secret import Secret
from allranks.wire.seek import seek_leader

KEY = Secret(b"a benchmark", "benchmark")
MTU = 9000
"""What data interfaces of a cluster say: the loopback interface's own size is larger than any packet."""
JOIN_S = 60.0
TESTS_S = 60.0
"""Simulated nodes share two cores: the deadline of real ones is not theirs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[8, 64, 128, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    facts = read_card_facts(os.environ)
    print(f"{os.cpu_count()} cores, {options.rounds} rounds; seconds at the leader, median (least to most)")
    print("nodes  pairs    join          roll call          frames  bytes a card")
    for num_nodes in options.nodes:
        took = [call_roll(num_nodes, facts) for _ in range(options.rounds)]
        total, joined = [each[0] for each in took], [each[1] for each in took]
        pairs = len(choose_pairs(num_nodes, full_up_to=FULL_UP_TO, seed=0))
        # Hello, Join, Welcome, Test, Tested, and the word at the end, for each agent but the leader's own.
        frames = 6 * (num_nodes - 1)
        size = len(msgspec.msgpack.encode(card_of(1, facts, None)))
        print(
            f"{num_nodes:5}  {pairs:6}  {statistics.median(joined):5.2f}"
            f"  {statistics.median(total):8.2f} ({min(total):.2f} to {max(total):.2f})  {frames:8}  {size:6}",
            flush=True,
        )


def address_of(index: int) -> str:
    return f"127.{1 + index // 16384}.{index // 128 % 128}.{1 + index % 128}"


def card_of(index: int, facts: Facts, mesh: Mesh | None) -> Card:
    nic = Interface("lo0", (address_of(index),), is_up=True, networks=("127.0.0.0/8",), mtu=MTU)
    own = msgspec.structs.replace(facts, host_name=f"node{index:04d}", boot_id=f"boot-{index}", interfaces=(nic,))
    return Card(
        host=f"node{index:04d}",
        pid=os.getpid(),
        node_index=index,
        num_workers=1,
        num_gpus=0,
        data_interface="lo0",
        data_address=address_of(index),
        test_ports=mesh.ports if mesh else None,
        facts=own,
    )


def call_roll(num_nodes: int, facts: Facts) -> tuple[float, float]:
    """Hold one roll call; return the seconds until the verdict, and those until all were here."""
    is_sparse = num_nodes > FULL_UP_TO
    listener = bind_port(0)
    port = int(listener.getsockname()[1])
    groups = max(1, min(os.cpu_count() or 1, num_nodes - 1))
    shares = [range(1 + start, num_nodes, groups) for start in range(groups)]
    context = mp.get_context("fork")
    pipes, workers = [], []
    for share in shares:
        mine, theirs = context.Pipe()
        worker = context.Process(target=run_agents, args=(share, port, facts, is_sparse, theirs))
        worker.start()
        pipes.append(mine)
        workers.append(worker)
    for pipe in pipes:
        pipe.recv()  # their sockets are open, as those of agents are that start on nodes of their own
    mesh = Mesh(1 if is_sparse else 8)
    joined_s = [0.0]
    try:
        terms = Terms(
            job="benchmark", attempt=0, num_nodes=num_nodes, min_nodes=num_nodes, join_s=JOIN_S, tests_s=TESTS_S
        )
        call = RollCall(
            terms,
            card_of(0, facts, mesh),
            acceptors=[Acceptor(listener, job="benchmark", attempt=0, secret=KEY)],
            mesh=mesh,
            say=lambda line: print(f"  {line}", file=sys.stderr),
            on_event=lambda event, **_: joined_s.append(time.monotonic()) if event == "joined" else None,
            check_signals=lambda: None,
        )
        for pipe in pipes:
            pipe.send("go")
        began_s = time.monotonic()
        judgement = call.hold()
        took_s = time.monotonic() - began_s
        verdict = Verdict(job="benchmark", attempt=0, exit_code=judgement.exit_code, findings=judgement.findings)
        stop(call.roster.peers, verdict)
    finally:
        mesh.close()
        listener.close()
        for worker in workers:
            worker.join(10)
            worker.kill()
    assert not judgement.findings, judgement.findings[:3]
    return took_s, max(joined_s) - began_s


def run_agents(share: range, port: int, facts: Facts, is_sparse: bool, pipe: Pipe) -> None:
    """Be many agents in one process, on one selector."""
    meshes = {index: Mesh(1 if is_sparse else 8) for index in share}
    cards = {index: card_of(index, facts, meshes[index]) for index in share}
    pipe.send("ready")
    pipe.recv()
    selector = selectors.DefaultSelector()
    agents = {}
    for index in share:
        connection = seek_leader(
            lambda: [[Hint("127.0.0.1", port, "benchmark")]],
            job="benchmark",
            attempt=0,
            secret=lambda: KEY,
            card=cards[index],
            deadline_s=JOIN_S,
            on_wait=lambda *_: None,
            check_signals=lambda: None,
        )
        agents[index] = Attendance(
            connection,
            cards[index],
            mesh=meshes[index],
            look_at_run_dir=lambda: None,
            patience_s=JOIN_S,
            check_signals=lambda: None,
        )
        agents[index].attach(selector)
    while agents:
        for key, mask in selector.select(0.01):
            key.data(mask)
        for index, agent in list(agents.items()):
            answer, _ = agent.step()
            if answer is not None:
                meshes[index].close()
                del agents[index]


if __name__ == "__main__":
    main()
