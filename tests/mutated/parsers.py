"""Which parsers read what others wrote: where real samples come from, how each is called, and what it may refuse with.

A parser is called through the function that the product uses, with what the product does with the value: a beat also
goes through the guard, a run directory is also listed. It returns, or raises one of its `refusals` with a text of one
line.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator

from allranks.model.errors import AllranksError
from allranks.state.saved.manifest import Damaged
from allranks.why.dumps import DumpError

from .door import Parser, of_bytes, plain, recorded, seeds
from .of_nodes import (
    book_seeds,
    books,
    books_inside,
    dump,
    dumps,
    manifest,
    manifest_line,
    messages,
    owner,
    owner_seeds,
    packed_books,
    plan_inside,
    plan_seeds,
    state,
    state_headers,
    wire,
    writer_report,
)
from .of_programs import (
    devices,
    log,
    log_seeds,
    nvidia_smi,
    py_spy,
    raised_seeds,
    slurm_answers,
    srun_output,
    srun_seeds,
    tracebacks,
)
from .of_users import page_file, page_seed, read_cluster_file, read_environment, read_hostlist, run_file
from .of_workers import CALL, TOLD, cell_book, cell_books, cell_memories, cell_memory, cell_record, worker_file

OURS = (AllranksError,)


def _lines(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


def _run_seed(name: str) -> Callable[[], list[bytes]]:
    return seeds(f"run/{name}")


_HOSTS = _lines("n[01-06,08],gpu-b17", "node1,node2", "a[1-2]b[3-4]", "n[001-100]", "[2001:db8::1]", "cn-[1-3]-ib0")
_ENV = _lines(
    "SLURM_JOB_ID=7\nSLURM_STEP_ID=0\nSLURM_PROCID=1\nSLURM_NTASKS=2\nSLURM_NODEID=1\nSLURM_JOB_NUM_NODES=2\n"
    "SLURM_STEP_NODELIST=n[1-2]\nSLURM_STEP_TASKS_PER_NODE=1(x2)\nSLURM_LOCALID=0\nSLURMD_NODENAME=n2\n",
    "RANK=1\nWORLD_SIZE=2\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=n1\nMASTER_PORT=29500\nGROUP_RANK=0\n",
    "OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1\nOMPI_COMM_WORLD_LOCAL_SIZE=2\n",
    'SM_HOSTS=["algo-1", "algo-2"]\nSM_CURRENT_HOST=algo-2\n',
    'TF_CONFIG={"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}\n',
    "JOB_COMPLETION_INDEX=1\nKUBERNETES_SERVICE_HOST=x\nHOSTNAME=job-1\nWORLD_SIZE=2\nNNODES=2\nNODE_RANK=1\nMASTER_ADDR=a\n",
    "VC_WORKER_HOSTS=a,b\nVC_TASK_INDEX=1\n",
)


def _parsers() -> Iterator[Parser]:
    yield Parser("cluster.toml", seeds("cluster.toml", "cluster_data.toml"), read_cluster_file, OURS)
    yield Parser("host lists", _HOSTS, plain(read_hostlist), OURS)
    yield Parser("environment", _ENV, of_bytes(read_environment), OURS)
    for name, kind in (
        ("attempt_0/events.jsonl", "lines of json"), ("attempt_0/verdict.json", "json"),
        ("attempt_0/roll_call.json", "json"), ("attempt_0/n1/env.json", "json"), ("attempt_0/n1/growth", "text"),
        ("attempt_0/n1/members", "text"), ("attempt_0/n1/rank_0.err", "text"), ("leader.json", "json"),
        ("culprits.json", "json"), ("attempt_0/exit_code", "text"), ("submission.sh", "text"), ("secret", "text"),
    ):  # fmt: skip
        yield Parser(f"run: {name.rpartition('/')[2]}", _run_seed(name), run_file(name), OURS, kind)
    for name, kind in (
        ("status.json", "json"), ("goodput.json", "json"), ("attempt_0/curves.jsonl", "lines of json"),
        ("attempt_0/roll_call.json", "json"), ("attempt_0/events.jsonl", "lines of json"),
        ("attempt_0/node03/rank_3.stack.txt", "text"),
    ):  # fmt: skip
        yield Parser(f"page: {name.rpartition('/')[2]}", page_seed(name), page_file(name), OURS, kind)
    yield Parser("error.json", seeds("error.json", "error_torch.json"), worker_file("error.json"), kind="json")
    yield Parser("exit.json", seeds("exit.json"), worker_file("exit.json"), kind="json")
    yield Parser("stderr's tail", raised_seeds, worker_file("err"))
    yield Parser("cell: raised", seeds("raised.json"), cell_record("raised"), kind="json")
    yield Parser("cell: raised, at the end", seeds("raised.json"), worker_file("raised"), kind="json")
    yield Parser("cell: words, at the end", seeds("raised.json"), worker_file("words"), kind="json")
    for room in ("told", "words"):
        yield Parser(f"cell: {room}", lambda: [json.dumps(TOLD).encode()], cell_record(room), kind="json")
    yield Parser("cell: call", lambda: [json.dumps(CALL).encode()], cell_record("call"), kind="json")
    yield Parser("cell: book", cell_books, cell_book, kind="bytes")
    for room in ("step", "saved", "phase"):
        yield Parser(f"cell: {room}", lambda: [struct.pack("qq", 12, 90), b"training"], cell_record(room), kind="bytes")
    yield Parser("cell: memory", cell_memories, cell_memory, kind="bytes")
    yield Parser("beats", messages("Beat"), wire, OURS, "msgpack")
    yield Parser("joins", messages("Join", "Hello"), wire, OURS, "msgpack")
    yield Parser("messages", messages(), wire, OURS, "msgpack")
    yield Parser("plans", plan_seeds, plan_inside, OURS, "msgpack")
    yield Parser("books", packed_books, books, kind="bytes")
    yield Parser("books, inside", book_seeds, books_inside, kind="msgpack")
    yield Parser("dumps as JSON", lambda: dumps()[:1], dump, (DumpError,), "json")
    yield Parser("dumps as pickles", lambda: dumps()[1:], dump, (DumpError,), "bytes")
    yield Parser("manifests", manifest_line, manifest, (Damaged,), "json")
    yield Parser("state headers", state_headers, state, (Damaged,), "json")
    yield Parser("owner files", owner_seeds, owner, kind="json")
    yield Parser("writers' reports", seeds("report.json"), writer_report, kind="json")
    gpus = (
        "550-h100.csv",
        "550-h100.apps.txt",
        "550-h100.nvlink.txt",
        "550-h100.remapped.txt",
        "470-a100.csv",
    )
    yield Parser("nvidia-smi", recorded(*gpus, "error-9-no-driver.txt"), plain(nvidia_smi))
    sites = [f"slurm/config-{version}.txt" for version in ("22.05", "25.11")]
    yield Parser(
        "SLURM", lambda: [*recorded(*sites)(), *seeds("slurm_job.txt", "slurm_rows.txt")()], plain(slurm_answers)
    )
    yield Parser("srun's output", srun_seeds, plain(srun_output))
    yield Parser("py-spy", seeds("py_spy.json"), of_bytes(py_spy), kind="json")
    yield Parser(
        "kernel and drivers",
        lambda: [*recorded("inet_diag_stuck.bin")(), *seeds("devices.txt")()],
        of_bytes(devices),
        kind="bytes",
    )
    yield Parser("logs", log_seeds, log, OURS)
    yield Parser("tracebacks", raised_seeds, plain(tracebacks))


def all_parsers() -> dict[str, Parser]:
    """Return the table, by name."""
    return {parser.name: parser for parser in _parsers()}
