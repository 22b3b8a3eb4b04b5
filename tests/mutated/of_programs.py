"""What other programs print: nvidia-smi, SLURM, py-spy, the kernel, and logs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from allranks.model.errors import AllranksError

from .door import HERE, assert_harmless


def nvidia_smi(text: str) -> object:
    from allranks.host import gpu

    answer = gpu.parse_gpus(text, gpu.QUERY_FIELDS)
    gpu.find_unknown_fields(text)
    gpu.parse_remapped_rows(text)
    gpu.parse_gpu_processes(text, is_own=lambda pid: pid == 1)
    gpu.parse_nvlinks(text)
    msgspec.msgpack.encode(answer.gpus)
    return answer


def slurm_answers(text: str) -> object:
    from allranks.host import slurm, slurm_job, slurm_site

    told = (
        slurm.parse_show_job(text), slurm.parse_squeue(text), slurm.parse_sacct(text), slurm.parse_sinfo(text),
        slurm.parse_trial(text), slurm_site.parse_site(text), slurm_site.parse_partition(text),
        slurm_job.parse_end_s(text),
    )  # fmt: skip
    with contextlib.suppress(AllranksError):
        slurm.parse_job_id(text)
    return told


def srun_output(text: str) -> object:
    from allranks.launch import srun

    parts: dict[tuple[str, str], dict[int, str]] = {}
    for line in text.splitlines():
        if done := srun.unpack(line, parts):
            with contextlib.suppress(ValueError):
                srun.decode(done[2], dict[str, int])
    return srun.words_of(text.splitlines())


def srun_seeds() -> list[bytes]:
    from allranks.launch import srun

    text = srun.pack("n1", "card", {"a": 1}) + srun.pack("n2", "card", {"b": [1] * 3000})
    return [f"srun: error: x\n{text}slurmstepd-n1: error: *** STEP\n".encode()]


def py_spy(data: bytes) -> object:
    from allranks.host import py_spy, stacks
    from allranks.host.glance import render as render_stack
    from allranks.model.node_look import ProcessRole

    try:
        threads = [stacks._thread(told, 7, {}) for told in py_spy.decode_json(data, list[py_spy.ToldThread])]
    except py_spy.Unreadable:
        return None
    process = stacks.Process(
        pid=7, role=ProcessRole.WORKER, rank=0, local_rank=0, world_size=1, state="S", threads=tuple(threads)
    )
    assert_harmless(render_stack(process))
    return process


def devices(data: bytes) -> object:
    from allranks.host import fabric, rdma, sockets, software, tcpinfo
    from allranks.host.programs import Ran

    text = data.decode(errors="replace")
    found: list[Any] = []
    with contextlib.suppress(OSError):
        sockets.parse_answer(data, found)
    for line in text.splitlines():
        sockets.parse_proc_line(line)
    with contextlib.suppress(ValueError):
        tcpinfo.parse_tcp_info(data)
    software.parse_loader_cache(data)
    software.parse_torch_cuda(text)
    rdma.parse_devinfo(text)
    fabric.parse_unit(Ran(0, text))
    fabric.parse_cuda(Ran(0, text))
    return found, fabric.select_xids(text, now=datetime.now().astimezone())


def log(folder: Path) -> Callable[[bytes], object]:
    from allranks.causes.book import all_causes
    from allranks.cli.why import make_answer, render_answer
    from allranks.report.text import Style
    from allranks.why.logs.collect import collect
    from allranks.why.logs.log_events import list_patterns
    from allranks.why.logs.match import Matcher
    from allranks.why.logs.sources import find_sources

    patterns = list_patterns(all_causes())
    matcher = Matcher([pattern.scan for pattern in patterns])
    path = folder / "job.log"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        logs = collect(find_sources([str(path)]), patterns, matcher=matcher)
        answer = make_answer(logs, [], [], is_all=True, with_timeline=True)
        assert_harmless(render_answer(answer, Style(True, False, 100), command=["allranks", "why"]))
        return answer

    return read


def log_seeds() -> list[bytes]:
    cases = [json.loads(line) for line in (HERE.parent / "why/reports.jsonl").read_text().splitlines()]
    return [case["log"][:6000].encode() for case in cases[::7] if isinstance(case.get("log"), str)]


def tracebacks(text: str) -> object:
    from allranks.model import raised

    raised.last_printed(text)
    raised.split_fatal(text)
    raised.find_fatal_place(text)
    return raised.find_origin(text), raised.find_origin(text, is_one=False)


def raised_seeds() -> list[bytes]:
    return [each for each in log_seeds() if b"Traceback" in each or b"Fatal Python" in each][:40]
