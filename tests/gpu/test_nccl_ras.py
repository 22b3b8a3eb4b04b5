"""Does NCCL's RAS port answer as the parser expects, and do its counts grow with the operations of each rank?

Elsewhere the parser is fed with answers that were written after NCCL's documentation (tests/host/recorded/ras).
"""

from __future__ import annotations

import json

import pytest

from allranks.host.gpu_load import load_of, read_gpu_loads
from allranks.host.nccl_ras import read_operation_counts
from conftest import free_port, wait_until

from .conftest import Note, StartJob
from .job import PATIENCE_S


def test_ras_counts_the_operations_of_each_rank(start: StartJob, note: Note):
    """Expected, from NCCL 2.28.7: both ranks with their pids and the same count, and after 5 more all-reduces of rank 0
    and rank 1 a count that is larger by 5; before that version a refusal that names it. nvidia-smi tells of both ranks.
    """
    script = """\\
    import time
    from pathlib import Path
    from rank import add_up, dist, form_group, rank, tell, torch
    form_group()
    tell(version=torch.cuda.nccl.version())
    while not Path("more").exists():
        time.sleep(0.01)
    for _ in range(5):
        add_up()
    Path(f"{rank}.done").touch()
    while not Path("end").exists():
        time.sleep(0.01)
    dist.destroy_process_group()
    """
    job = start(script, env={"NCCL_RAS_ADDR": f"127.0.0.1:{free_port()}"})
    wait_until(lambda: all((job.where / f"{rank}.json").exists() for rank in (0, 1)), "both ranks", PATIENCE_S)
    version = tuple(job.json_of(0)["version"])
    note("NCCL", json.dumps(version))
    pids = [int((job.where / f"{rank}.pid").read_text()) for rank in (0, 1)]
    if version < (2, 28, 7):
        with pytest.raises(OSError, match=r"older than 2\.28\.7"):
            read_operation_counts(pids)
        return
    before = read_operation_counts(pids)
    (job.where / "more").touch()
    wait_until(lambda: all((job.where / f"{rank}.done").exists() for rank in (0, 1)), "5 all-reduces", PATIENCE_S)
    after, use = read_operation_counts(pids), load_of(dict(enumerate(pids)), read_gpu_loads(deadline_s=10))
    percents = {rank: load.percent for rank, load in use.items()}
    (job.where / "end").touch()
    assert job.end() == [0, 0], job.tail()
    note("counts", json.dumps([before, after, percents]))
    assert before is not None
    assert after == {pid: count + 5 for pid, count in before.items()}
    assert (set(before), set(percents)) == (set(pids), {0, 1})
