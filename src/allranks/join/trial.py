"""Run collectives between this node and another one; `allranks check --deep` starts this file on each node, by path.

    python pair.py '{"work": [...], ...}'        # one line of JSON for each pair, on stdout

The work is a list of pairs, this node's own, in the order of their steps: a round with one backend. For each of them,
in a process of its own:

1 arrive   rank 0 opens a store at its address, rank 1 looks for it         start_s, and pair_s for every step before
2 form     init_process_group over the node's data interface                timeout_s
3 reduce   4 MiB, three times; every byte of each sum is compared           timeout_s each
4 measure  what fits into MEASURE_S, up to MEASURED_BYTES: once to warm     timeout_s each
           up, then NUM_MEASURED times; the collective alone is timed
5 leave    each waits until the other one has its sums

From the arrival of both to the end it has pair_s: a process that hangs in C++ is killed then. torch is imported once,
before the processes are forked. Standard library and torch only: it runs in the Python of the job.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from datetime import timedelta
from typing import Any

NUM_FLOATS = 1 << 20
"""4 MiB of float32: more than any buffer on the way holds."""
NUM_REDUCTIONS = 3
MEASURED_BYTES = {"gloo": 16 << 20, "nccl": 64 << 20}
"""Largest payload of the measurement: 16 MiB take 0.14 s at 1 Gbit/s, and a GPU's link needs more to come to speed."""
NUM_MEASURED = 4
MEASURE_S = 4.0
"""For all of the measurement. Where even 8 MiB would take longer, the faster of the last two 4 MiB stands."""
POLL_S = 0.1
BUSY_S = 3.0
"""Seconds to retry a port that is in use: the process of the previous round has just ended."""
MAX_TEXT = 400
PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def main() -> None:
    """Run the pairs that the argument lists."""
    order = json.loads(sys.argv[1])
    began_s = time.monotonic()
    try:
        import torch
        import torch.distributed  # noqa: F401  (before the fork: once, not for each pair)
    except Exception as exc:  # a broken installation raises OSError, RuntimeError, ...
        is_absent = isinstance(exc, ModuleNotFoundError) and exc.name == "torch"
        _tell({"no_torch": "torch is not installed" if is_absent else f"torch cannot be imported: {_one_line(exc)}"})
        return
    for pair in order["work"]:
        arrive_by_s = began_s + order["start_s"] + pair["step"] * order["pair_s"]
        said = _in_a_process(
            lambda pipe, pair=pair, by_s=arrive_by_s: _try(pair, by_s, timeout_s=order["timeout_s"], pipe=pipe),
            arrive_by_s=arrive_by_s,
            pair_s=order["pair_s"],
        )
        _tell({"round": pair["round"], "backend": pair["backend"], "peer": pair["peer"], **said})
    if order.get("num_gpus"):
        said = _in_a_process(_time_matmuls, arrive_by_s=time.monotonic() + order["pair_s"], pair_s=order["pair_s"])
        _tell({"matmul_s": said.get("matmul_s", []), "what": said.get("what", "")})


def _die_with(parent: int) -> None:
    """SLURM kills who started us, and not us: where it tracks processes by their group."""
    with contextlib.suppress(OSError, AttributeError):  # every wait has its deadline, so it ends all the same
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died between fork and prctl
        os._exit(1)


def _tell(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split("\n\nException raised from", 1)[0].split())[:MAX_TEXT] or type(exc).__name__


def _in_a_process(work: Any, *, arrive_by_s: float, pair_s: float) -> dict[str, Any]:
    """Return what a forked process said, or that it had to be killed."""
    reader, writer = os.pipe()
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _die_with(own)
            os.close(reader)
            with os.fdopen(writer, "w", buffering=1) as pipe:
                work(pipe)
            code = 0
        finally:
            os._exit(code)  # no destructor of a group may hang
    os.close(writer)
    text, by_s = b"", max(arrive_by_s, time.monotonic()) + BUSY_S
    is_here = has_ended = False
    while not has_ended and select.select([reader], [], [], max(0.0, by_s - time.monotonic()))[0]:
        data = os.read(reader, 1 << 16)
        has_ended = not data
        text += data
        if not is_here and b"here\n" in text:
            is_here, by_s = True, time.monotonic() + pair_s
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    lines = [line for line in text.decode().splitlines() if line.startswith("{")]
    if lines:
        return dict(json.loads(lines[-1]))
    if has_ended:  # it went by itself, without a word: no exception, a crash
        return {"status": "failed", "what": f"the process of the pair crashed (exit {status})"}
    what = f"not finished within {pair_s:g} s after both had joined" if is_here else "the store did not answer"
    return {"status": "failed", "what": what}


def _try(pair: dict[str, Any], arrive_by_s: float, *, timeout_s: float, pipe: Any) -> None:
    """One pair, from its arrival to the end; writes one line of JSON, and "here" before."""
    said: dict[str, Any]
    try:
        store = _arrive(pair, arrive_by_s)
    except _PortTakenError as exc:
        said = {"status": "unknown", "what": str(exc)}
    except Exception as exc:
        said = {"status": "failed", "what": _one_line(exc)}
    else:
        print("here", file=pipe, flush=True)
        try:
            said = _reduce(pair, store, timeout_s=timeout_s)
        except Exception as exc:
            said = {"status": "failed", "what": _one_line(exc)}
    print(json.dumps(said), file=pipe, flush=True)


class _PortTakenError(Exception):
    """Something else listens where this node's store should be: nothing is known of the pair."""


def _arrive(pair: dict[str, Any], by_s: float) -> Any:
    """Return the store, once both ends are at it; its keys are those of the round."""
    return (_lead if pair["rank"] == 0 else _seek)(pair, by_s)


def _lead(pair: dict[str, Any], by_s: float) -> Any:
    from torch.distributed import PrefixStore, TCPStore

    busy_by_s = time.monotonic() + BUSY_S
    while True:
        try:
            tcp = TCPStore(pair["address"], pair["port"], is_master=True, wait_for_workers=False)
            break
        except Exception as exc:
            if "EADDRINUSE" not in str(exc):
                raise
            if time.monotonic() > busy_by_s:
                raise _PortTakenError(f"port {pair['port']} is in use here") from exc
            time.sleep(POLL_S)
    store = PrefixStore(f"{pair['backend']}{pair['round']}", tcp)
    store.set("here/0", "")
    while not store.check(["here/1"]):
        if time.monotonic() > by_s:
            raise TimeoutError(f"{pair['peer']} did not connect to the store at {pair['address']}:{pair['port']}")
        time.sleep(POLL_S)
    return store


def _seek(pair: dict[str, Any], by_s: float) -> Any:
    import socket

    from torch.distributed import PrefixStore, TCPStore

    while True:
        try:
            # torch's own client would wait for a second between two tries, and say nothing of the reason.
            socket.create_connection((pair["address"], pair["port"]), timeout=2.0).close()
            tcp = TCPStore(pair["address"], pair["port"], wait_for_workers=False, timeout=timedelta(seconds=2))
            store = PrefixStore(f"{pair['backend']}{pair['round']}", tcp)
            if store.check(["here/0"]):
                store.set("here/1", "")
                return store
            reason = "it is still busy with another pair"
        except Exception as exc:  # not there yet, or it just closes the store of the round before
            reason = _one_line(exc)
        if time.monotonic() > by_s:
            raise TimeoutError(f"no store of {pair['peer']} at {pair['address']}:{pair['port']}: {reason}")
        time.sleep(POLL_S)


def _reduce(pair: dict[str, Any], store: Any, *, timeout_s: float) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = pair["interface"]
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={pair['interface']}")
    is_nccl = pair["backend"] == "nccl"
    device = torch.device("cuda", 0) if is_nccl else torch.device("cpu")
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group(pair["backend"], store=store, rank=pair["rank"], world_size=2, timeout=timeout)
    # Whole numbers below 2^24: their sum is exact in float32, whoever adds them.
    base = torch.arange(NUM_FLOATS, dtype=torch.float32, device=device) % 8191  # (4 MiB), the same on both
    took_s = []
    for turn in range(NUM_REDUCTIONS):
        mine = base * (pair["rank"] + 1) + turn
        began_s = time.monotonic()
        dist.all_reduce(mine)
        if is_nccl:
            torch.cuda.synchronize(device)
        took_s.append(time.monotonic() - began_s)
        wrong = int((mine != base * 3 + 2 * turn).sum())
        if wrong:
            return {"status": "failed", "what": f"the sum of all-reduce {turn + 1} is wrong in {wrong} of {NUM_FLOATS}"}
    # The first of them opened the connections.
    payload_bytes, payload_s = 4 * NUM_FLOATS, min(took_s[1:])
    larger = _agree_on_size(pair, store, payload_s)
    if larger:
        payload_bytes, payload_s = larger, _measure(dist, torch.ones(larger // 4, device=device), is_nccl=is_nccl)
    dist.destroy_process_group()
    _leave(pair, store)
    return {
        "status": "ok",
        "seconds": round(sorted(took_s)[NUM_REDUCTIONS // 2], 6),
        "payload_bytes": payload_bytes,
        "payload_s": round(payload_s, 6),
    }


def _agree_on_size(pair: dict[str, Any], store: Any, small_s: float) -> int:
    """Return the bytes that both ends reduce in the measurement, as rank 0 decides; 0: none, it would take too long."""
    if pair["rank"] == 0:
        size = MEASURED_BYTES[pair["backend"]]
        while size > 4 * NUM_FLOATS and small_s * size / (4 * NUM_FLOATS) * (1 + NUM_MEASURED) > MEASURE_S:
            size //= 2
        store.set("size", str(size if size > 4 * NUM_FLOATS else 0))
    return int(store.get("size"))


def _measure(dist: Any, payload: Any, *, is_nccl: bool) -> float:
    """Return the seconds of the fastest all-reduce: a busy moment of the machine makes one slower, and none faster."""
    took_s = []
    for _ in range(1 + NUM_MEASURED):
        began_s = time.monotonic()
        dist.all_reduce(payload)
        if is_nccl:
            import torch

            torch.cuda.synchronize(payload.device)
        took_s.append(time.monotonic() - began_s)
    return min(took_s[1:])


def _leave(pair: dict[str, Any], store: Any) -> None:
    """Stay until the other one has its sums: who ends first would close its connections, rank 0 the store as well."""
    store.set(f"done/{pair['rank']}", "")
    try:
        store.wait([f"done/{1 - pair['rank']}"])
    except Exception:
        if pair["rank"] == 0:
            raise
        # The store is gone, so rank 0 had seen that we are done, and was so itself.


def _time_matmuls(pipe: Any) -> None:
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
    print(json.dumps({"matmul_s": found}), file=pipe, flush=True)


if __name__ == "__main__":
    main()
