"""How do the stacks of all nodes of a running job come here? Through one more SLURM step beside the job's own.

Phases, and who speaks:
1 `squeue` says which nodes the job has now; a node that SLURM gave up is not among them.
2 `srun --overlap` starts one probe a node, `allranks stack --here`: without GPUs, memory or CPUs of its own, so that
  it starts at once in a job that uses all of them. A heterogeneous job has one step for each of its components.
3 Every probe prints its document and ends. It travels in short lines, since srun mixes the output of its tasks in
  pieces of 1 KiB, and site wrappers print banners around it.
4 The step ends when every node has answered, or when none has for `silence_s`; what is left of it is ended then.

Nothing else of the job is touched: the steps that are there go on, and no signal is sent.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import selectors
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

import msgspec

from allranks.host.stacks import NodeStacks
from allranks.launch.look.stacks import StackReport
from allranks.model.errors import AllranksError, SetupError, UsageError
from allranks.model.hostlist import expand_hosts, fold_hosts

LINE_BYTES = 600
SQUEUE_S = 20.0
NOTICE_AFTER_S = 3.0
END_S = 2.0
"""For srun to end its step after SIGTERM, before it is killed."""
STEP_MINUTES = 2
"""SLURM ends the step itself, should this process be killed."""
MARK = "%allranks-stack"


@dataclass(frozen=True, slots=True)
class Component:
    """A part of a job that one srun reaches: all of it, unless the job is heterogeneous."""

    job_id: str
    het_group: str
    nodes: tuple[str, ...]


def probe_job(job: str, *, silence_s: float, env: Mapping[str, str], say: Callable[[str], None]) -> StackReport:
    """Return what the nodes of a running job say.

    Args:
        job: SLURM's id: `123`, `123_4` of an array, `123+0` of a heterogeneous job.
        silence_s: no answer for so long ends the wait.
        env: the caller's; srun gets it without what an outer job or step left in it.
        say: gets a line about whom is waited for.

    Raises:
        UsageError: there is no such job, or the id means several.
        SetupError: SLURM's commands are missing.
        AllranksError: the job is not running, or SLURM refuses.
    """
    if not re.fullmatch(r"\d+([_+]\d+)?", job):
        raise UsageError(f"stack {job!r}: expected a SLURM job id, for example 123 or 123_4; see squeue --me")
    missing = [name for name in ("squeue", "srun") if shutil.which(name, path=env.get("PATH")) is None]
    if missing:
        raise SetupError(
            f"stack {job}: {' and '.join(missing)} not on PATH: run it where SLURM is; "
            "on the machine of a process: allranks stack --pid PID"
        )
    clean = {name: value for name, value in env.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    components = find_components(job, _squeue(job, clean))
    steps = [_start(component, clean) for component in components]
    try:
        return _collect(job, components, steps, silence_s=silence_s, say=say)
    finally:
        _end(steps)


def find_components(job: str, rows: str) -> list[Component]:
    """Read what squeue says of a job, lines of `JobId|id as shown|state|nodes|reason`.

    Raises:
        UsageError: the id means several jobs.
        AllranksError: the job is not running.
    """
    found = [line.split("|", 4) for line in rows.splitlines() if line.count("|") >= 4]
    if not found:
        raise AllranksError(f"job {job} has ended; what happened to it: allranks why {job}")
    leaders = {shown.partition("+")[0] for _, shown, *_ in found}
    running = [row for row in found if row[2] == "RUNNING"]
    if not running:
        _, _, state, _, reason = found[0]
        why = f" ({reason})" if reason not in ("", "None") else ""
        raise AllranksError(f"job {job} is {state}{why}; only a running job can be looked into")
    if len(leaders) > 1:
        ids = ", ".join(sorted(row[1] for row in running))
        raise UsageError(f"job {job} is an array; name one of its running jobs: {ids}")
    return [
        Component(leader if plus else number, group if plus else "", tuple(dict.fromkeys(expand_hosts(nodes))))
        for number, shown, _, nodes, _ in running
        for leader, plus, group in [shown.partition("+")]
    ]


def srun_command(component: Component) -> list[str]:
    """Return the line that starts one probe on every node of a component."""
    count = len(component.nodes)
    return [
        "srun",
        f"--jobid={component.job_id}",
        *([f"--het-group={component.het_group}"] if component.het_group else []),
        "--job-name=allranks-stack",
        "--overlap",  # beside the steps that hold everything
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--gres=none",  # else it gets the job's GPUs; --gpus=0 is refused where SLURM knows no GPUs
        "--mem=0",
        "--mpi=none",
        "--input=none",
        "--propagate=NONE",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--chdir=/",  # this directory may not be there
        f"--time={STEP_MINUTES}",
        sys.executable,
        "-m",
        "allranks",
        "stack",
        "--here",
        component.job_id,
    ]


def pack(document: NodeStacks) -> str:
    """Return a document as lines that survive being mixed with others; `unpack` reads them."""
    text = base64.b64encode(zlib.compress(msgspec.json.encode(document))).decode()
    parts = [text[start : start + LINE_BYTES] for start in range(0, len(text), LINE_BYTES)]
    return "".join(
        f"{MARK} {document.node} {index}/{len(parts)} {part}%\n" for index, part in enumerate(parts, start=1)
    )


_LINE = re.compile(rf"{MARK} (\S+) (\d+)/(\d+) ([A-Za-z0-9+/=]+)%")


@dataclass(slots=True)
class Unpacker:
    """Takes lines of several nodes in any order, gives documents."""

    parts: dict[str, dict[int, str]] = field(default_factory=dict)

    def feed(self, line: str) -> NodeStacks | None:
        """Take a line; return the document that it completes."""
        found = _LINE.search(line)
        if found is None:
            return None
        node, index, count, part = found[1], int(found[2]), int(found[3]), found[4]
        parts = self.parts.setdefault(node, {})
        parts[index] = part
        if len(parts) < count:
            return None
        text = "".join(parts[number] for number in sorted(parts))
        try:
            return msgspec.json.decode(zlib.decompress(base64.b64decode(text)), type=NodeStacks)
        except (ValueError, zlib.error, msgspec.DecodeError):  # of another version of allranks, or torn
            return None


@dataclass(slots=True)
class _Step:
    process: subprocess.Popen[bytes]
    rest: dict[str, bytes] = field(default_factory=lambda: {"out": b"", "err": b""})


def _squeue(job: str, env: Mapping[str, str]) -> str:
    command = ["squeue", "--noheader", f"--jobs={job.partition('+')[0]}", "--format=%A|%i|%T|%N|%r"]
    try:
        result = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=SQUEUE_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise AllranksError(f"stack {job}: squeue did not answer within {SQUEUE_S:.0f} s: slurmctld is busy") from exc
    if result.returncode != 0:
        words = _words(result.stderr.splitlines())
        error = UsageError if "nvalid job id" in words else AllranksError
        raise error(f"stack {job}: squeue: {words}")
    return result.stdout


def _start(component: Component, env: Mapping[str, str]) -> _Step:
    # A session of its own: Ctrl-C reaches us, and we end it in order.
    return _Step(
        subprocess.Popen(
            srun_command(component),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    )


def _collect(
    job: str, components: Sequence[Component], steps: Sequence[_Step], *, silence_s: float, say: Callable[[str], None]
) -> StackReport:
    wanted = [node for component in components for node in component.nodes]
    documents: dict[str, NodeStacks] = {}
    unpacker, words = Unpacker(), list[str]()
    last_s = began_s = time.monotonic()
    was_told = False
    with _readers(steps) as selector:
        while selector.get_map() and set(wanted) - set(documents):
            now = time.monotonic()
            if now > last_s + silence_s:
                break
            if now > began_s + NOTICE_AFTER_S and not was_told:
                was_told = True
                late = fold_hosts([node for node in wanted if node not in documents])
                say(f"waiting {now - began_s:.0f} s for {late}; {len(documents)} of {len(wanted)} are here")
            for key, _ in selector.select(0.2):
                step, name = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                *lines, step.rest[name] = (step.rest[name] + (data or b"\n")).split(b"\n")
                for line in lines:
                    text = line.decode(errors="replace")
                    if name == "err":
                        words.append(text)
                    elif document := unpacker.feed(text):
                        documents[document.node] = document
                        last_s = time.monotonic()
        has_ended = not selector.get_map()
    if not documents and _words(words) and has_ended:
        raise AllranksError(f"stack {job}: no node answered; srun: {_words(words)}")
    silent = {
        node: _why_silent(node, words, has_ended=has_ended, silence_s=silence_s)
        for node in wanted
        if node not in documents
    }
    return StackReport(job=job, documents=[documents.pop(node) for node in wanted if node in documents], silent=silent)


@contextlib.contextmanager
def _readers(steps: Iterable[_Step]) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        for step in steps:
            streams: tuple[tuple[IO[bytes] | None, str], ...] = (
                (step.process.stdout, "out"),
                (step.process.stderr, "err"),
            )
            for stream, name in streams:
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, (step, name))
        yield selector


def _end(steps: Iterable[_Step]) -> None:
    """End what still runs: srun passes SIGTERM on to its step. The wait is not part of the answer's time."""
    for step in steps:
        deadline_s = time.monotonic() + END_S
        with step.process:
            if step.process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.process.wait(0.2)  # all is said: it ends by itself
            for end in (step.process.terminate, step.process.kill):
                if step.process.poll() is None:
                    end()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        step.process.wait(max(0.1, deadline_s - time.monotonic()))


def _why_silent(node: str, words: Sequence[str], *, has_ended: bool, silence_s: float) -> str:
    """What srun said of this node, in its own words."""
    about = [line for line in words if re.search(rf"(?<![\w.-]){re.escape(node)}(?![\w.-])", line)]
    if about:
        return f"did not answer: {_words(about)}"
    if has_ended:
        return "did not answer, and srun did not say why" + (f": {_words(words)}" if _words(words) else "")
    return f"did not answer within {silence_s:.0f} s"


def _words(lines: Sequence[str]) -> str:
    """The first words of an error, on one line, without who says it."""
    said = [re.sub(r"^(srun|squeue|slurmstepd[\w.-]*|slurm_\w+)( error)?: (error: )?", "", line) for line in lines]
    kept = [line.strip() for line in said if line.strip() and "lacks support" not in line]
    return "; ".join(dict.fromkeys(kept))[:300]
