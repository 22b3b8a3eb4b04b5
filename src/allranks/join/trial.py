"""Run collectives in trial groups: process groups that live for one measurement only.

    python trial.py ORDER        # JSON; lines of JSON on stdout

`allranks check --deep` starts this file on each node by path, `allranks bench` for each rank. The order:

    {"start_s": 40, "group_s": 20, "timeout_s": 10,
     "num_gpus": 0,                          more than 0: times a matmul on each GPU in the end
     "work": [{"step": 0,                    its turn: every step takes group_s at most
               "round": 0, "backend": "gloo",           repeated in each line about this group
               "rank": 0, "names": ["n01", "n02"],      of all ranks, for messages
               "address": "10.0.0.1", "port": 29500,    where rank 0 opens the store
               "interface": "eth0", "device": 0,        of this node; the GPU of this rank
               "cases": [...], "budget_s": 4, "repeat": [2, 100]}]}     join/collectives.py explains them

For each group, in a process of its own:

1 arrive   rank 0 opens the store, the others look for it                   start_s, and group_s for every step before
2 form     init_process_group over the node's data interface                timeout_s
3 measure  the cases; rank 0 tells a line for each                          budget_s, and timeout_s for the last one
4 leave    each rank waits until all have their results                     timeout_s

Then every rank tells how the group ended: {"round", "backend", "status": "ok" | "failed" | "unknown", "what"}; unknown
means that something other than the group failed. A rank whose order differs from rank 0's is refused in step 1.
From the arrival of all to the end a group has group_s: a process that hangs in C++ is killed then. torch is imported
once, before the processes are forked. Standard library and torch only: it runs in the Python of the job.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import runpy
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

POLL_S = 0.1
BUSY_S = 3.0
"""Seconds to retry a port that is in use: the process of the previous round has just ended."""
HEAR_S = 1.0
"""Seconds that a rank waits longer than rank 0 does, to hear from it who is missing."""
SLACK_S = 2.0
"""Seconds that ranks may be apart in what they do."""
MAX_TEXT = 400
Words = dict[str, Any]
Tell = Callable[[Words], None]
HERE = {"here": True}
"""Between a process and its parent: all ranks have arrived."""
PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def main() -> None:
    """Run the groups that the argument lists."""
    order = json.loads(sys.argv[1])
    began_s = time.monotonic()
    try:
        import torch
        import torch.distributed  # noqa: F401  (before the fork: once, not for each group)
    except Exception as exc:  # a broken installation raises OSError, RuntimeError, ...
        is_absent = isinstance(exc, ModuleNotFoundError) and exc.name == "torch"
        _tell({"no_torch": "torch is not installed" if is_absent else f"torch cannot be imported: {_one_line(exc)}"})
        return
    measure = runpy.run_path(str(Path(__file__).with_name("collectives.py")))["measure"]  # there is no package here
    for work in order["work"]:
        arrive_by_s = began_s + order["start_s"] + work["step"] * order["group_s"]
        group = {"round": work["round"], "backend": work["backend"]}
        said = _in_a_process(
            partial(_try, work, arrive_by_s, measure, order["timeout_s"]),
            arrive_by_s=arrive_by_s,
            group_s=order["group_s"],
            on_line=partial(_tell_of, group),
        )
        _tell({**group, **said})
    if order.get("num_gpus"):
        said = _in_a_process(_time_matmuls, arrive_by_s=time.monotonic() + order["group_s"], group_s=order["group_s"])
        _tell({"matmul_s": said.get("matmul_s", []), "what": said.get("what", "")})


def _die_with(parent: int) -> None:
    """SLURM kills who started us, and not us: where it tracks processes by their group."""
    with contextlib.suppress(OSError, AttributeError):  # every wait has its deadline, so it ends all the same
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died between fork and prctl
        os._exit(1)


def _tell(words: Words) -> None:
    print(json.dumps(words), flush=True)


def _tell_of(group: Words, words: Words) -> None:
    _tell({**group, **words})


def _one_line(error: BaseException | str) -> str:
    """Return the text of an error without the places in torch's source, stacks and advice that follow it."""
    text = re.sub(
        r"\[(enforce fail at )?/\S+\.cc:\d+\] ",
        "",
        re.split(r"\s*Exception raised from| This is typically caused by", str(error))[0],
    )
    return " ".join(text.split())[:MAX_TEXT] or type(error).__name__


def _in_a_process(
    work: Callable[[Tell], None],
    *,
    arrive_by_s: float,
    group_s: float,
    on_line: Tell = print,
) -> Words:
    """Return the last line that a forked process told, or why it had to be killed; `on_line` gets those before."""
    own = os.getpid()
    try:
        reader, writer = os.pipe()
        pid = os.fork()
    except OSError as exc:
        return {"status": "failed", "what": f"its process cannot start: {str(exc.strerror).lower()}"}
    if pid == 0:
        code = 1
        try:
            _die_with(own)
            os.close(reader)
            with os.fdopen(writer, "w", buffering=1) as pipe:
                work(lambda line: print(json.dumps(line), file=pipe, flush=True))
            code = 0
        finally:
            os._exit(code)  # no destructor of a group may hang
    os.close(writer)
    rest, last, by_s = b"", Words(), max(arrive_by_s, time.monotonic()) + BUSY_S
    is_here = has_ended = False
    while not has_ended and select.select([reader], [], [], max(0.0, by_s - time.monotonic()))[0]:
        data = os.read(reader, 1 << 16)
        has_ended = not data
        *lines, rest = (rest + data).split(b"\n")
        for line in map(json.loads, lines):
            if line == HERE:
                is_here, by_s = True, time.monotonic() + group_s
            elif "row" in line or "skipped" in line:
                on_line(line)
            else:
                last = line
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if last:
        return last
    if has_ended:  # it went by itself, without a word: no exception, a crash
        return {"status": "failed", "what": f"the process of the group crashed (exit {status})"}
    what = f"not finished within {group_s:g} s after all had joined" if is_here else "the store did not answer"
    return {"status": "failed", "what": what}


def _try(work: Words, arrive_by_s: float, measure: Callable[..., None], timeout_s: float, tell: Tell) -> None:
    """One group, from the arrival of its ranks to the end; the last line tells how it ended."""
    said: Words = {"status": "ok", "what": ""}
    try:
        store = _arrive(work, arrive_by_s)
        tell(HERE)
        agree, mine, by_s = _Agreement(work, store, tell).agree, Words(), time.monotonic() + timeout_s
        try:
            _form(work, store, timeout_s=timeout_s)
        except Exception as exc:  # the others learn it at once, and by name
            mine = {"error": str(exc)}
        agree("init_process_group", mine, by_s, lambda _: {})
        measure(work, agree, tell if work["rank"] == 0 else lambda line: None, timeout_s=timeout_s)
        _leave(work, store)
    except _PortTakenError as exc:
        said = {"status": "unknown", "what": str(exc)}
    except Exception as exc:
        said = {"status": "failed", "what": _one_line(exc)}
    tell(said)


class _PortTakenError(Exception):
    """Something else listens where this node's store should be: nothing is known of the group."""


def _arrive(work: Words, by_s: float) -> Any:
    """Return the store, once all ranks are at it; its keys are those of the round."""
    plan = json.dumps([work["names"], work["cases"], work["budget_s"], work.get("repeat")])
    digest = hashlib.sha256(plan.encode()).hexdigest()
    return _lead(work, by_s, digest) if work["rank"] == 0 else _seek(work, by_s, digest)


def _lead(work: Words, by_s: float, digest: str) -> Any:
    from torch.distributed import PrefixStore, TCPStore

    busy_by_s = time.monotonic() + BUSY_S
    while True:
        try:
            tcp = TCPStore(work["address"], work["port"], is_master=True, wait_for_workers=False)
            break
        except Exception as exc:
            if "EADDRINUSE" not in str(exc):
                raise
            if time.monotonic() > busy_by_s:
                raise _PortTakenError(f"port {work['port']} is in use here") from exc
            time.sleep(POLL_S)
    store = PrefixStore(f"{work['backend']}{work['round']}", tcp)
    store.set("here/0", digest)
    missing = [*range(1, len(work["names"]))]
    while missing and time.monotonic() < by_s:
        time.sleep(POLL_S)
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
    others = [rank for rank in range(len(work["names"])) if rank not in missing]
    odd = [rank for rank in others if store.get(f"here/{rank}").decode() != digest]
    what = ""
    if missing:
        what = f"{name_ranks(work['names'], missing)} did not connect to the store at {work['address']}:{work['port']}"
    elif odd:
        what = f"{name_ranks(work['names'], odd)}: other ranks, cases or times than {name_ranks(work['names'], [0])}"
    store.set("go", what)
    if what:
        time.sleep(HEAR_S)  # the others read it, before the store is gone
        raise TimeoutError(what)
    return store


def name_ranks(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Return the names of ranks; with their numbers where several ranks share a name. Pure."""
    return ", ".join(f"{names[rank]} (rank {rank})" if names.count(names[rank]) > 1 else names[rank] for rank in ranks)


def _seek(work: Words, by_s: float, digest: str) -> Any:
    import socket

    from torch.distributed import PrefixStore, TCPStore

    store = None
    while True:
        try:
            if store is None:
                # torch's own client would wait for a second between two tries, and say nothing of the reason.
                socket.create_connection((work["address"], work["port"]), timeout=2.0).close()
                tcp = TCPStore(work["address"], work["port"], wait_for_workers=False, timeout=timedelta(seconds=2))
                found = PrefixStore(f"{work['backend']}{work['round']}", tcp)
                if found.check(["here/0"]):
                    found.set(f"here/{work['rank']}", digest)
                    store = found
                reason = "it is still busy with another group"
            elif store.check(["go"]):
                break
            else:
                reason = "it still waits for others"
        except Exception as exc:  # not there yet, or it just closes the store of the round before
            store, reason = None, _one_line(exc)
        if time.monotonic() > by_s + (HEAR_S if store else 0.0):
            raise TimeoutError(
                f"no store of {name_ranks(work['names'], [0])} at {work['address']}:{work['port']}: {reason}"
            )
        time.sleep(POLL_S)
    if what := store.get("go").decode():
        raise TimeoutError(what)
    return store


def _form(work: Words, store: Any, *, timeout_s: float) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = work["interface"]
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={work['interface']}")
    if work["backend"] == "nccl":
        import torch

        torch.cuda.set_device(work.get("device", 0))
    store.set_timeout(timedelta(seconds=timeout_s))
    # NCCL's watchdog ends the process; what measures notices a missing rank itself, and has to say so before.
    timeout = timedelta(seconds=timeout_s * (4 if work["backend"] == "nccl" else 1))
    dist.init_process_group(
        work["backend"], store=store, rank=work["rank"], world_size=len(work["names"]), timeout=timeout
    )


class _Agreement:
    """At the store each rank says something, rank 0 decides, and all learn it, or who is missing or failed.

    Gloo tells each rank about its own connections only, and the ranks at different times.
    """

    def __init__(self, work: Words, store: Any, tell: Tell) -> None:
        self.work, self.store, self.tell, self.turn = work, store, tell, 0

    def agree(self, what: str, mine: Words, by_s: float, decide: Callable[[list[Words]], Words]) -> Words:
        """Return what rank 0 decides by what the ranks say.

        Args:
            what: the ranks did.
            mine: what this rank says; "error" in it: it failed.
            by_s: when rank 0 stops waiting for the others.

        Raises:
            RuntimeError: a rank is missing or failed.
        """
        key, self.turn = f"turn{self.turn}", self.turn + 1
        leader = name_ranks(self.work["names"], [0])
        if "error" in mine:
            mine = {"error": _one_line(mine["error"])}
        silent = f"{leader}, which holds the store, does not answer after {what}: {mine.get('error', 'no error here')}"
        silent_s = max(0.0, by_s - time.monotonic()) + 2 * SLACK_S
        # If its process is stopped, or its host gone, a call of the store returns at no deadline.
        alarm = threading.Timer(silent_s + SLACK_S, self.give_up, [silent])
        alarm.start()
        try:
            self.store.set(f"{key}/{self.work['rank']}", json.dumps(mine))
            if self.work["rank"] == 0:
                said = self._hear(key, by_s)
                failure = find_failure(self.work["names"], what, said)
                self.store.set(key, json.dumps({"failed": failure} if failure else decide([*said.values()])))
            self.store.wait([key], timedelta(seconds=silent_s))
            decision = dict(json.loads(self.store.get(key)))
        except Exception as exc:
            raise RuntimeError(silent) from exc
        finally:
            alarm.cancel()
        if "failed" in decision:
            if self.work["rank"] == 0:
                time.sleep(HEAR_S)  # the others read it, before the store is gone
            raise RuntimeError(decision["failed"])
        return decision

    def give_up(self, what: str) -> None:
        self.tell({"status": "failed", "what": what})
        os._exit(0)

    def _hear(self, key: str, by_s: float) -> dict[int, Words]:
        ranks = range(len(self.work["names"]))
        with contextlib.suppress(Exception):  # at the deadline; its text would not say which key is missing
            self.store.wait(
                [f"{key}/{rank}" for rank in ranks], timedelta(seconds=max(0.0, by_s - time.monotonic()) + SLACK_S)
            )
        here = [rank for rank in ranks if self.store.check([f"{key}/{rank}"])]
        return {rank: json.loads(self.store.get(f"{key}/{rank}")) for rank in here}


def find_failure(names: Sequence[str], what: str, said: Mapping[int, Words]) -> str:
    """Return who did not do what the others did, or failed at it, and how; empty: all did. Pure."""
    errors = dict[str, list[int]]()
    for rank, words in said.items():
        if "error" in words:
            errors.setdefault(words["error"], []).append(rank)
    texts = [f"{name_ranks(names, ranks)}: {text}" for text, ranks in errors.items()]
    missing = [rank for rank in range(len(names)) if rank not in said]
    if missing:
        return "; ".join([f"{name_ranks(names, missing)} did not finish {what}", *texts])[:MAX_TEXT]
    return f"{what}: {'; '.join(texts)}"[:MAX_TEXT] if texts else ""


def _leave(work: Words, store: Any) -> None:
    """Stay until all have their results: who ends first would close its connections, rank 0 the store as well."""
    import torch.distributed as dist

    dist.destroy_process_group()
    store.set(f"done/{work['rank']}", "")
    try:
        store.wait([f"done/{rank}" for rank in range(len(work["names"]))])
    except Exception:
        if work["rank"] == 0:
            raise
        # The store is gone, so rank 0 had seen that we are done, and was so itself.


def _time_matmuls(tell: Tell) -> None:
    """Time a short matmul on each GPU. Never run on hardware."""
    import torch

    found = []
    for number in range(torch.cuda.device_count()):
        square = torch.randn(4096, 4096, device=f"cuda:{number}", dtype=torch.bfloat16)
        for turn in range(25):
            if turn == 5:  # warm by now
                torch.cuda.synchronize(number)
                began_s = time.monotonic()
            square @ square
        torch.cuda.synchronize(number)
        found.append(round((time.monotonic() - began_s) / 20, 6))
    tell({"matmul_s": found})


if __name__ == "__main__":
    main()
