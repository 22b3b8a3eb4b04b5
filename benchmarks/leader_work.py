"""What must the leader compute for many nodes? Their reports decoded and judged, the Plans made and encoded.

    python benchmarks/leader_work.py                  # 1,024, 4,096 and 16,384 nodes of 8 ranks
    python benchmarks/leader_work.py --nodes 256

One process, no sockets: CPU time, and the bytes that go out. The reports are this machine's own, under other names.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from roll_call import card_of

from allranks.host.node import read_card_facts
from allranks.launch.lead.group import make_group
from allranks.model.card import Card
from allranks.preflight.judge import Observations, judge
from allranks.preflight.roster import Terms
from allranks.wire.frames import encode_frame

T = TypeVar("T")
RANKS_PER_NODE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1024, 4096, 16384])
    options = parser.parse_args()
    facts = read_card_facts(os.environ)
    print("CPU seconds at the leader, and bytes of all Plans")
    print("nodes   bytes a report  decode   judge   Plans: make  encode  bytes")
    for num_nodes in options.nodes:
        sent = [
            msgspec.msgpack.encode(msgspec.structs.replace(card_of(index, facts, None), num_workers=RANKS_PER_NODE))
            for index in range(num_nodes)
        ]
        cards, decode_s = timed(
            lambda sent=sent: {i: msgspec.msgpack.decode(each, type=Card) for i, each in enumerate(sent)}
        )
        terms = Terms(job="benchmark", attempt=0, num_nodes=num_nodes, min_nodes=num_nodes)
        _, judge_s = timed(lambda cards=cards, terms=terms: judge(Observations(cards=cards), terms))
        plans, make_s = timed(
            lambda cards=cards: make_group(
                cards, wanted_backend="gloo", attempt=0, store_address="10.0.0.1", store_port=29500
            )
        )
        num_bytes, encode_s = timed(lambda plans=plans: sum(len(encode_frame(plan)) for plan in plans.values()))
        print(
            f"{num_nodes:6}  {len(sent[0]):14}  {decode_s:6.2f}  {judge_s:6.2f}  {make_s:11.2f}  {encode_s:6.2f}"
            f"  {num_bytes:12,}",
            flush=True,
        )


def timed(work: Callable[[], T]) -> tuple[T, float]:
    began_s = time.process_time()
    result = work()
    return result, time.process_time() - began_s


if __name__ == "__main__":
    main()
