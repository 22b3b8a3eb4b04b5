"""Where is each rank? Folds the stacks of a job's nodes into groups of equal stacks, and renders them as text. Pure.

    report = StackReport(job="12", documents=documents, silent={"node05": "did not answer within 20 s"})
    print(render_stacks(report, fold(documents), style))

Two processes are in the same place if the frames of the user's code are equal, line by line, and so is the operation
that they called: which line of torch's polling loop was caught does not matter. A stopped process is never in the place
of a running one. The order helps to find the culprit: first what is stopped or dead, then what could not be read, then
the smallest groups; groups that wait for others come last.

Limits: equal places are not equal steps. A rank that is a step behind in the same loop is folded with the others.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec
from msgspec.structs import replace

from allranks.host.py_spy import ToldFrame
from allranks.host.stacks import Frame, NodeStacks, Process, Thread, is_library
from allranks.model.hostlist import fold_hosts
from allranks.model.node_look import MAX_COUNTERS, ProcessRole, StackSeen
from allranks.report.mask import mask_fields, mask_secrets
from allranks.report.text import Style, cell, count_of, fold_ranks

SHOWN_LIBRARY_FRAMES = 2
"""Number of library frames that are shown, next to the user's frames."""


# What the user's line ended up in: pattern of the file, pattern of the function (whole or its end), label with `{}` for
# the first group. Order matters: where two apply, the outermost call on the stack is named, and within one call the
# first row. Names and files as in torch 2.11 to 2.13.
_COLLECTIVES = (
    r"all_reduce|all_gather\w*|all_to_all\w*|barrier|monitored_barrier|broadcast\w*|reduce|reduce_scatter\w*|gather\w*"
    r"|scatter\w*|send\w*|recv\w*|batch_isend_irecv|init_process_group|new_group|destroy_process_group|init_device_mesh"
    r"|wait_tensor"
)
_OPERATIONS = (
    (r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$|/allranks/join/", rf"({_COLLECTIVES})", "{}"),
    (r"/torch/nn/parallel/distributed\.py$", r"_sync_(module_)?buffers", "broadcast_buffers"),
    (r"/torch/distributed/utils\.py$", r"_verify_param_shape\w+|_sync_module_states", "broadcast_parameters"),
    (r"/allranks/join/", r"init_process_group_with_names", "init_process_group"),
    (r"/torch/distributed/device_mesh\.py$", r"(init_device_mesh)", "{}"),
    (r"/torch/distributed/checkpoint/", r"(save|load|async_save)", "checkpoint {}"),
    (r"/torch/utils/data/dataloader\.py$", r"_\w*DataLoaderIter\.__next__|__next__", "DataLoader next"),
    (r"/torch/utils/data/_utils/worker\.py$", r"_worker_loop", "DataLoader worker"),
    (r"/torch/(_tensor|autograd/\w+)\.py$", r"(backward)", "{}"),
    (r"/torch/cuda/\w+\.py$", r"(synchronize)", "cuda synchronize"),
    (r"/torch/serialization\.py$", r"(save|load)", "torch.{}"),
)
# Used if the stack has none of those.
_PLAIN_WAITS = (
    (r"/subprocess\.py$", r"wait|communicate|_try_wait", "wait for a subprocess"),
    (r"/multiprocessing/(process|popen_\w+)\.py$", r"join|wait", "join of a process"),
    (r"/(multiprocessing/queues|queue)\.py$", r"get", "queue get"),
    (r"/(multiprocessing/queues|queue)\.py$", r"put", "queue put"),
    (r"/threading\.py$", r"join", "join of a thread"),
    (r"/threading\.py$", r"wait", "wait for a thread"),
    (r"/asyncio/", r"run_until_complete|run_forever", "asyncio loop"),
    (r"/(socket|ssl)\.py$", r"connect|recv\w*|read\w*|accept|create_connection", "socket"),
    (r"/selectors\.py$", r"select", "select"),
)
# C functions have no frame: the source line of the innermost frame shows the call.
_IN_SOURCE = (
    (r"\bsleep\(", "sleep"),
    (r"\.synchronize\(", "cuda synchronize"),
    (r"\.wait\(", "wait"),
    (r"\.item\(\)", "item"),
    (r"\.acquire\(", "acquire of a lock"),
    (r"\binput\(", "input"),
)
_OWN = re.compile(r"/allranks/(join|guard/inside)/")
_WAITS_FOR_OTHERS = re.compile(rf"({_COLLECTIVES}|backward)$")
_COUNTS = re.compile(
    r"(?!(?:max|min|num|nb?|total|last|start|starting|resume|end|eval|save|log)_|.*_(?:per|in)_)"
    r"(?:[a-z]+_)*(?:step|epoch|batch|iter|iteration)"
    r"(?:_(?:idx|index|id|num|no|nr|i))?|it|idx|index|i|j|k",
    re.IGNORECASE,
)
_TRAINERS = re.compile(
    r"/transformers/trainer\.py:(?:\w+\.)*(?:_run_epoch|_inner_training_loop)"
    r"|/loops/training_epoch_loop\.py:(?:\w+\.)*advance"
)
"""Functions of libraries (transformers 5.24, Lightning 2.6) whose counters are those of the training."""
_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)
_NO_RANKS = ProcessRole.LAUNCHER, ProcessRole.STORE
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "dead", "D": "waits in the kernel"}


class StackGroup(msgspec.Struct, kw_only=True):
    """All threads that are in the same place; ranks and nodes without duplicates, in order."""

    role: ProcessRole
    thread: str
    """Name of the thread, empty for the main one."""
    ranks: list[int] = []
    nodes: list[str] = []
    pids: list[tuple[str, int]] = []
    """Node and process id of each member."""
    cpu_percent: list[int] = []
    """Of each member, 100 for one core."""
    state: str
    """`T`, `t`, `Z`, `D`, or empty for a process that runs or sleeps."""
    kernel_wait: str
    operation: str
    """The known call that the user's line is in, or empty."""
    enclosing: str
    """The known call around the innermost user code: `DataLoader next at train.py:88`, or empty."""
    place: Frame | None
    """The innermost frame of the user's code."""
    problem: str
    frames: tuple[Frame, ...]  # innermost first, of the first member
    store: str = ""
    """Address and port of the job's store, if a launcher or a process of its own serves it."""


class StackReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of the nodes."""

    job: str
    documents: Sequence[NodeStacks]
    silent: Mapping[str, str] = {}
    """Nodes that did not answer, and why."""

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the job for which no process was found."""
        workers = [
            process
            for document in self.documents
            for process in document.processes
            if process.role is ProcessRole.WORKER
        ]
        sizes = {worker.world_size for worker in workers if worker.world_size}
        world_size = sizes.pop() if len(sizes) == 1 else 0
        return sorted(set(range(world_size)) - {worker.rank for worker in workers if worker.rank is not None})


def split_jobs(document: NodeStacks) -> list[StackReport]:
    """Return one report per job, for a node that runs several jobs: their ranks are never folded together."""
    jobs = sorted({process.job for process in document.processes})
    if len(jobs) < 2:
        return [StackReport(job=document.job, documents=[document])]
    of_jobs = [(job, tuple(process for process in document.processes if process.job == job)) for job in jobs]
    return [StackReport(job=job, documents=[replace(document, job=job, processes=own)]) for job, own in of_jobs]


def fold(documents: Iterable[NodeStacks], *, all_threads: bool = False) -> list[StackGroup]:
    """Return the groups of equal stacks, the odd one out first."""
    groups: dict[object, StackGroup] = {}
    for document in documents:
        for process in document.processes:
            main = next((thread for thread in process.threads if thread.is_main), Thread("", True, ()))
            for thread in (main, *(other for other in process.threads if all_threads and other is not main)):
                group = _group_of(process, thread)
                own = [(frame.file, frame.line, frame.function) for frame in group.frames if _is_user(frame)]
                place = tuple(own or [frame.function for frame in group.frames])
                key = (group.role, group.thread, group.state, group.problem, group.operation, place, group.store)
                group = groups.setdefault(key, group)
                group.pids.append((document.node, process.pid))
                group.cpu_percent.append(round(100 * process.cpu))
                group.ranks += [] if process.rank is None else [process.rank]
    for group in groups.values():
        group.ranks = sorted(set(group.ranks))
        group.nodes = list(dict.fromkeys(node for node, _ in group.pids))
    return sorted(groups.values(), key=_order)


def render_stacks(report: StackReport, groups: Sequence[StackGroup], style: Style) -> str:
    """Return the text of a report, without a final newline."""
    workers = [group for group in groups if group.role is ProcessRole.WORKER]
    ranks, places = len({pid for group in workers for pid in group.pids}), len(workers)
    nodes = count_of(len(report.documents), "node")
    if report.silent:
        nodes = f"{len(report.documents)} of {len(report.documents) + len(report.silent)} nodes"
    what = f"job {cell(report.job)}: " if report.job else ""
    parts = [f"{what}{count_of(ranks, 'rank')} on {nodes}, {count_of(places, 'place')}"]
    mark = style.mark("✗", "x")
    missing = [f"{mark} {cell(name)}   {cell(why)}" for name, why in report.silent.items()]
    if report.missing_ranks:
        missing.append(f"{mark} {fold_ranks(report.missing_ranks)}   no process found: it never started, or has ended")
    if empty := [document.node for document in report.documents if not document.processes]:
        missing.append(f"{mark} {fold_hosts(empty)}   no Python process of the job")
    if missing:
        parts.append("\n".join(style.paint(line, "31;1") for line in missing))
    parts += [_render_group(group, style) for group in groups]
    return "\n\n".join(parts)


def stacks_to_json(pairs: Sequence[tuple[StackReport, Sequence[StackGroup]]]) -> str:
    """Return the same as JSON: `documents` has everything that was read, and `jobs` each of several jobs."""
    jobs: list[dict[str, Any]] = [
        msgspec.to_builtins(report)
        | {
            "missing_ranks": report.missing_ranks,
            "groups": [
                {"job": report.job} | msgspec.to_builtins(group) | {"thread": group.thread or "MainThread"}
                for group in groups
            ],
        }
        for report, groups in pairs
    ]
    if len(jobs) == 1:
        return json.dumps(mask_fields(jobs[0]), indent=2)
    joined = {name: [entry for job in jobs for entry in job[name]] for name in ("groups", "documents")}
    return json.dumps(mask_fields({"job": "", "silent": {}, "missing_ranks": [], **joined, "jobs": jobs}), indent=2)


def _group_of(process: Process, thread: Thread) -> StackGroup:
    frames, problem = thread.frames, process.problem
    if not frames and not problem:
        problem = "has no Python frames: it is starting, ending, or its main thread runs no Python"
    return StackGroup(
        role=process.role,
        thread="" if thread.is_main else re.sub(r"-?\d+", "", thread.name) or "thread",
        state=process.state if process.state in _STATES else "",
        kernel_wait=process.kernel_wait,
        problem=problem,
        operation=name_operation(frames),
        enclosing=name_enclosing(frames),
        place=next((frame for frame in frames if _is_user(frame)), None),
        frames=frames,
        store=process.store if process.role in _NO_RANKS else "",
    )


def name_operation(frames: Sequence[Frame]) -> str:
    """Return the known call that the user's innermost line is in, or an empty text."""
    inner = list(itertools.takewhile(lambda frame: not _is_user(frame), frames))
    if not inner and frames:
        return next((label for pattern, label in _IN_SOURCE if re.search(pattern, frames[0].text)), "")
    return _look_up(inner, _OPERATIONS) or _look_up(inner, _PLAIN_WAITS)


def waits_for_others(operation: str) -> bool:
    """Tell whether a call, as `name_operation` names it, ends only when other ranks make it, too."""
    return _WAITS_FOR_OTHERS.match(operation) is not None


def summarize(told: Sequence[ToldFrame], *, at_s: float, is_still: bool, text: str = "") -> StackSeen:
    """Return what a watcher keeps of the main thread's stack: where it is, and whole numbers that count.

    Args:
        told: frames, innermost first.
        at_s: when they were read.
        is_still: the process does nothing; else `backward` computes, and does not wait for others.
        text: the innermost line of source; it shows which C function it is in.
    """
    frames = [Frame(frame.name, frame.filename, frame.line, text) for frame in told]
    operation = name_operation(frames)  # `wait` is in no Python function of a library: of an asynchronous collective
    mine = [frame for frame in told if not is_library(frame.filename)]
    place = f"{PurePath(mine[0].filename).name}:{mine[0].line} in {mine[0].name}" if mine else ""
    counts = [not is_library(frame.filename) or _TRAINERS.search(f"{frame.filename}:{frame.name}") for frame in told]
    counting = itertools.compress(told, counts)
    values = [(local.name, local.repr or "") for frame in counting for local in frame.locals or ()]
    counters = [
        (name[:300], int(value)) for name, value in values if _COUNTS.fullmatch(name) and _WHOLE.fullmatch(value)
    ]
    return StackSeen(
        at_s=at_s,
        operation=operation[:300],
        place=place[:300],
        is_collective=is_still if operation in ("backward", "wait") else waits_for_others(operation),
        counters=tuple(counters[:MAX_COUNTERS]),
    )


def name_enclosing(frames: Sequence[Frame]) -> str:
    """Return the known call that leads back into user code, and from where: `DataLoader next at train.py:88`."""
    inside = itertools.dropwhile(lambda frame: not _is_user(frame), frames)
    runs = [list(run) for _, run in itertools.groupby(inside, _is_user)]
    for called, callers in zip(runs[1::2], runs[2::2], strict=False):
        if found := _look_up(called, _OPERATIONS):
            return f"{found} at {PurePath(callers[0].file).name}:{callers[0].line}"
    return ""


def _look_up(called: Sequence[Frame], table: Sequence[tuple[str, str, str]]) -> str:
    """Return the first of these calls that is known, outermost first."""
    for frame in reversed(called):
        for file, function, label in table:
            found = re.fullmatch(rf"(?:.*[.])?(?:{function})", frame.function)
            if found and re.search(file, frame.file):
                return label.format(*found.groups())
    return ""


def _is_user(frame: Frame) -> bool:
    return not is_library(frame.file)


def _order(group: StackGroup) -> tuple[object, ...]:
    is_ordinary = (not group.state, not group.problem, waits_for_others(group.operation))
    return (
        list(ProcessRole).index(group.role),
        bool(group.thread),
        *is_ordinary,
        len(group.pids),
        group.ranks,
        group.nodes,
    )


def _render_group(group: StackGroup, style: Style) -> str:
    pid = f"pid {group.pids[0][1]}" if len(group.pids) == 1 else ""
    headline = "   ".join(filter(None, [_who(group), cell(fold_hosts(group.nodes)), pid, _what(group)]))
    low, high = min(group.cpu_percent), max(group.cpu_percent)
    cpu = f"{low}" if low == high else f"{low}-{high}"
    colour = "31;1" if group.state or group.problem else "2" if group.role is not ProcessRole.WORKER else "1"
    lines = [style.paint(headline, colour) + style.paint(f"   {cpu} % CPU", "2")]
    if group.role not in _NO_RANKS or group.state:
        lines += [f"  {line}" for line in _render_frames(group.frames, style)]
    return "\n".join(lines)


def _who(group: StackGroup) -> str:
    ranks, num_processes = fold_ranks(group.ranks), len(group.pids)
    if group.role is ProcessRole.LAUNCHER:
        who = "launcher" if num_processes == 1 else f"{num_processes} launchers"
        who += f" with the store {cell(group.store)}" if group.store else ""
    elif group.role is ProcessRole.STORE:
        who = f"owner of the store {cell(group.store)}"
    elif group.role is ProcessRole.CHILD:
        who = count_of(num_processes, "child process") + (f" of {ranks}" if ranks else "")
    elif not ranks:
        who = count_of(num_processes, "process")
    else:
        who = ranks if num_processes == 1 else f"{num_processes} ranks ({ranks.partition(' ')[2]})"
    return f"{who}, thread {cell(group.thread)}" if group.thread else who


def _what(group: StackGroup) -> str:
    words = []
    if group.state and not (group.state == "Z" and group.problem):
        words.append(_STATES[group.state] + (f" ({group.kernel_wait})" if len(group.kernel_wait) > 1 else ""))
    if group.problem:
        words.append(cell(group.problem))
    elif group.place:
        at = f"{PurePath(group.place.file).name}:{group.place.line} {group.place.function}"
        words.append(cell(f"{group.operation} at {at}" if group.operation else at))
        if group.enclosing:
            words.append(cell(f"in {group.enclosing}"))
    elif group.frames:
        inner = group.frames[0]
        words.append(cell(group.operation or f"{inner.function} ({_short(inner.file)}:{inner.line})"))
    return ", ".join(words)


def _render_frames(frames: Sequence[Frame], style: Style) -> list[str]:
    """Render the stack like a traceback, most recent call last; of libraries, only what the user's lines called."""
    # allranks' code in a worker is left out, unless there is no other.
    frames = [frame for frame in frames if not _OWN.search(frame.file)] or frames
    mine = [frame for frame in frames if _is_user(frame)]
    width = min(60, max((len(f"{frame.file}:{frame.line}") for frame in mine), default=0))
    name_width = min(30, max((len(frame.function) for frame in mine), default=0))
    lines: list[str] = []
    for is_user, run in itertools.groupby(reversed(frames), _is_user):
        if is_user:
            rows = [(f"{frame.file}:{frame.line}", frame.function, frame.text) for frame in run]
            lines += [
                cell(mask_secrets(f"{at:<{width}}  {name:<{name_width}}  {text}")).rstrip() for at, name, text in rows
            ]
        elif lines or not mine:  # what started the user's code is left out, and so are wrappers of decorators
            called = [frame for frame in run if frame is frames[0] or not frame.function.endswith("wrapper")]
            shown = [
                f"  {frame.function} ({_short(frame.file)}:{frame.line})" for frame in called[:SHOWN_LIBRARY_FRAMES]
            ]
            if hidden := called[SHOWN_LIBRARY_FRAMES:]:
                shown.append(f"  {style.mark('…', '...')} {len(hidden)} more, down to {hidden[-1].function}")
            lines += [style.paint(cell(text), "2") for text in shown]
    return lines


def _short(file: str) -> str:
    """Return a library's file below its site-packages or lib/python3.x."""
    return re.sub(r".*/((site|dist)-packages|(python|pypy)3[.\d]*t?)/", "", file)
