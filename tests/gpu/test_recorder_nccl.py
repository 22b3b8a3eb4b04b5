"""Does torch's flight recorder say of NCCL what the guard takes from it: numbers, operations, open and done?"""

from __future__ import annotations

import json

import pytest

from allranks.why.dumps import find_dumps, read_dumps
from allranks.why.logs.read import ReadProblem

from .conftest import Note, StartJob
from .job import is_rehearsal, run_bare, run_one

BACKEND = "gloo" if is_rehearsal() else "nccl"


@pytest.mark.rehearsable
def test_numbers_of_called_and_of_done_collectives(start: StartJob, note: Note):
    """Expected: after 1 + 6 collectives of a group the last enqueued number is 7, and the last completed one is 7
    within 2 s: NCCL's watchdog looks every 100 ms (torch 2.11, ProcessGroupNCCL.hpp, kWatchdogThreadSleepMillis).
    """
    script = """\
    import time
    from rank import add_up, device, dist, flight, form_group, synchronize, tell, torch, world_size
    form_group()
    for _ in range(4):
        add_up()
    whole = torch.empty(8 * world_size, device=device)
    for _ in range(2):
        dist.all_gather_into_tensor(whole, torch.ones(8, device=device))
    synchronize()
    began_s = time.monotonic()
    while (states := flight().states()).get("0") != (7, 7) and time.monotonic() < began_s + 10:
        time.sleep(0.02)
    calls = [(call["seq"], call["op"], call["is_done"]) for call in flight().last_calls()]
    tell(states=states, done_after_s=time.monotonic() - began_s, calls=calls, blind=flight().blind)
    dist.barrier()
    """
    job = start(script)
    assert job.end() == [0, 0], job.tail()
    for rank in (0, 1):
        told = job.json_of(rank)
        note(f"rank {rank}", json.dumps(told))
        assert told["states"] == {"0": [7, 7]}
        assert told["done_after_s"] < 2
        assert told["blind"] == []
        gather = "all_gather" if is_rehearsal() else "_all_gather_base"
        assert told["calls"] == [[seq, "all_reduce" if seq < 6 else gather, True] for seq in range(1, 8)]


@pytest.mark.rehearsable
def test_a_collective_that_waits_for_a_peer_is_open(start: StartJob, note: Note):
    """Expected: while rank 1 stays away, rank 0 has (2, 1): two called, one done; its last call is not done, and has
    sizes and dtypes as the recorder writes them.
    """
    script = """\
    import os, time
    from rank import device, dist, flight, form_group, rank, synchronize, tell, torch
    form_group()
    total = torch.ones(3, 5, device=device)
    if rank == 0:
        waiting = dist.all_reduce(total, async_op=True)
        began_s = time.monotonic()
        while flight().states().get("0") != (2, 1) and time.monotonic() < began_s + 5:
            time.sleep(0.02)
        tell(states=flight().states(), call=flight().last_calls()[-1])
        waiting.wait()
    else:
        while not os.path.exists("0.json"):
            time.sleep(0.05)
        dist.all_reduce(total)
    synchronize()
    """
    job = start(script)
    assert job.end() == [0, 0], job.tail()
    told = job.json_of(0)
    note("rank 0", json.dumps(told))
    assert told["states"] == {"0": [2, 1]}
    call = told["call"]
    assert (call["seq"], call["op"], call["is_done"]) == (2, "all_reduce", False)
    assert (call["sizes"], call["dtypes"]) == ([[3, 5]], ["Float"])


@pytest.mark.rehearsable
@pytest.mark.parametrize("way", ["one by one", "batched"])
def test_sends_and_receives_do_not_count_as_collectives(start: StartJob, way: str, note: Note):
    """Expected: one collective, three sends and receives, one collective: the last called and done collective is
    number 2 on both ranks. NCCL numbers point-to-point calls apart, also batched ones, which it records as
    "coalesced" (torch 2.11, ProcessGroupNCCL, seqP2P_); in Gloo they share the row, and the hook takes them out
    again.
    """
    script = f"""\
    import time
    from rank import add_up, device, dist, flight, form_group, rank, tell, torch
    form_group()
    data = torch.ones(4, device=device)
    for _ in range(3):
        if {way == "batched"}:
            call = dist.P2POp(dist.isend if rank == 0 else dist.irecv, data, 1 - rank)
            for work in dist.batch_isend_irecv([call]):
                work.wait()
        else:
            (dist.send if rank == 0 else dist.recv)(data, 1 - rank)
    add_up()
    began_s = time.monotonic()
    while flight().states().get("0") != (2, 2) and time.monotonic() < began_s + 5:
        time.sleep(0.02)
    tell(states=flight().states(), calls=[(c["seq"], c["op"], c["peer"]) for c in flight().last_calls()])
    dist.barrier()
    """
    job = start(script)
    assert job.end() == [0, 0], job.tail()
    for rank in (0, 1):
        told = job.json_of(rank)
        note(f"rank {rank}", json.dumps(told))
        assert told["states"] == {"0": [2, 2]}


@pytest.mark.rehearsable
def test_a_barrier_for_a_late_rank_is_no_mismatch(start: StartJob, note: Note):
    """Expected: rank 1 comes 4 s late to a barrier, four times; no verdict. NCCL's recorder calls the barrier
    "all_reduce_barrier" (torch 2.11, ProcessGroupNCCL::barrier), and the late rank's own word for it is "barrier".
    """
    script = """\
    import time
    from rank import dist, flight, form_group, rank, tell
    form_group()
    for _ in range(4):
        time.sleep(4 * rank)
        dist.barrier()
    tell(ops=[call["op"] for call in flight().last_calls()])
    """
    job = start(script)
    assert job.end() == [0, 0], job.tail()
    note("recorded", job.json_of(0)["ops"])
    assert "✗" not in job.err


@pytest.mark.rehearsable
def test_groups_of_two_backends_keep_their_names(start: StartJob, note: Note):
    """Expected: the default group and a second one, over Gloo, are told apart by name although each backend's
    recorder counts its groups from 0: three collectives in one, five in the other.
    """
    script = """\
    import time
    from rank import add_up, dist, flight, form_group, tell, torch
    form_group()
    second = dist.new_group(backend="gloo")
    for _ in range(2):
        add_up()
    for _ in range(5):
        dist.all_reduce(torch.ones(4), group=second)
    began_s = time.monotonic()
    while flight().states() != {"0": (3, 3), "1": (5, 5)} and time.monotonic() < began_s + 5:
        time.sleep(0.02)
    groups = {name: sorted({*group.backends.values()}) for name, group in flight().groups().items()}
    tell(states=flight().states(), groups=groups)
    dist.barrier()
    """
    job = start(script)
    assert job.end() == [0, 0], job.tail()
    told = job.json_of(0)
    note("rank 0", json.dumps(told))
    assert told["states"] == {"0": [3, 3], "1": [5, 5]}
    assert told["groups"] == {"0": [BACKEND], "1": ["gloo"]}


def test_started_is_only_told_where_timing_is_on(tmp_path, note: Note):
    """Expected: with TORCH_NCCL_ENABLE_TIMING=1 the last started number is that of the last collective; without it
    -1, since no start event is recorded (torch 2.11, WorkNCCL::startedGPUExecutionInternal).
    """
    script = """\
    import json, time
    from rank import add_up, dist, form_group, rank, tell, torch
    form_group()
    add_up()
    time.sleep(1)
    dump = json.loads(torch._C._distributed_c10d._dump_nccl_trace_json())
    tell(status=dump["pg_status"], states=[entry["state"] for entry in dump["entries"]], version=dump["version"])
    dist.barrier()
    """
    plain = run_one(tmp_path / "plain", script, env={"TORCH_FR_BUFFER_SIZE": "100"})
    timed = run_one(tmp_path / "timed", script, env={"TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_ENABLE_TIMING": "1"})
    note("without timing", json.dumps(plain))
    note("with timing", json.dumps(timed))
    assert int(plain["status"]["0"]["last_started_collective"]) == -1
    assert int(timed["status"]["0"]["last_started_collective"]) == 2
    assert plain["states"] == timed["states"] == ["completed", "completed"]


def test_the_watchdog_leaves_a_dump_that_why_reads(tmp_path, note: Note):
    """Expected: when a collective times out, NCCL's watchdog writes the flight recorder to the file that allranks
    names (TORCH_FR_DUMP_TEMP_FILE and the rank), and it can be read as plain data. Source: torch 2.11,
    DebugInfoWriter.
    """
    script = """\
    import time
    from rank import device, dist, form_group, rank, torch
    form_group(timeout_s=5)
    if rank == 0:
        dist.all_reduce(torch.ones(4, device=device))
    time.sleep(25)
    """
    where = tmp_path / "dump"
    beginning = str(where / "flight_")
    env = {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": beginning}
    env |= {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": beginning, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5000"}
    ended = run_bare(where, script, env=env)
    files = sorted(path.name for path in where.glob("flight_*"))
    note("files", ", ".join(files))
    note("exit codes", ended.codes)
    assert "flight_0" in files, ended.text[-3000:]
    problems: list[ReadProblem] = []
    dump = read_dumps(find_dumps([str(where / "flight_0")]), problems)[0]
    assert problems == []
    assert [(call.op, call.is_done) for call in dump.calls] == [("all_reduce", True), ("all_reduce", False)]


def test_the_nccl2_backend_is_recorded_where_torch_has_it(start: StartJob, note: Note):
    """Expected: with torch from 2.14 on, TORCH_DIST_USE_NCCL2=1 makes nccl2 the engine, whose dump is that of
    `_dump_fr_trace_json(backend="nccl2")` while `_dump_nccl_trace_json` stays empty. The guard must see 3
    collectives.
    """
    script = """\
    import time
    from rank import add_up, dist, flight, form_group, tell, torch
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    form_group()
    for _ in range(2):
        add_up()
    time.sleep(1)
    states = flight().states() if version >= (2, 14) else {}
    tell(version=version, states=states, blind=flight().blind)
    dist.barrier()
    """
    job = start(script, env={"TORCH_DIST_USE_NCCL2": "1"})
    assert job.end() == [0, 0], job.tail()
    told = job.json_of(0)
    note("rank 0", json.dumps(told))
    if tuple(told["version"]) < (2, 14):
        pytest.skip(f"torch {told['version'][0]}.{told['version'][1]} has no nccl2")
    assert told["states"] == {"0": [3, 3]}
