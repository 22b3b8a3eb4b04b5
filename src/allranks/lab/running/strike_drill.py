"""Does a running job survive? Start a real training, strike it, and compare what happens with what must happen.

    drill_running(Lab("demo"), "node-killed", seed=7, work_dir=Path("drills"))      # -> StrikeResult

Phase 1  the strike is prepared in the lab   (Strike.inject; the seed chooses the place)
Phase 2  a training starts through SLURM on all nodes; all ranks do some steps
Phase 3  the strike; a rank that executes it logs the time
Phase 4  wait for the expected outcome: the next step of new workers, the end, or nothing
Phase 5  the training is ordered to end, and the result is compared with the truth   (seen.judge)
Phase 6  the lab is healed and repaired, whatever happened

With a baseline, plain torchrun gets the same strike with the same training, unmodified: how long until it prints
something, what does it print, and does it ever do another step?
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from allranks.lab.faults.fault import Expected, FaultPlace, TrueCulprit
from allranks.lab.faults.injected import Injected, heal, inject
from allranks.lab.faults.running.strike import Launch, Strike
from allranks.lab.faults.running.strike_catalogue import STRIKES
from allranks.lab.faulty_job import complains, wait_until_gone, words_of
from allranks.lab.lab import Lab
from allranks.lab.running.seen import JobSeen, StrikeBaseline, judge
from allranks.lab.running.terminal import Terminal
from allranks.lab.running.training import PLAIN, PROGRAM, Running
from allranks.model.errors import UsageError

UP_S = 90.0
"""Until all ranks train: six imports of torch on two cores, beside other work of the machine."""
SETTLE_S = 1.0
SAVED_S = 30.0
END_S = 30.0
BASELINE_S = 100.0
POLL_S = 0.05
IMPORT_S = 1.2
"""What `import torch` takes on the machine for which the limits of the next step were set."""


class StrikeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one drill of a running job."""

    fault: str
    seed: int
    program: str
    truth: str
    expected: str
    verdict: str
    verdict_s: float | None
    """From the strike to the first printed line of the verdict."""
    next_step_s: float | None
    phases_s: dict[str, float]
    """From the strike to each event before the next step."""
    resumed_at: int | None
    """Number of that step."""
    exit_code: int | None
    num_requeues: int
    """How often SLURM put the job back into the queue."""
    leader: str
    """The node that took over the lead; empty: none did."""
    wrong: tuple[str, ...]
    """Differences from the expected result; empty if it is correct."""
    baseline: StrikeBaseline | None = None
    has_account: bool = False
    """Whether the job left an account of its time; what does not sum in it is in `wrong`."""


def drill_running(
    lab: Lab,
    name: str,
    *,
    seed: int,
    work_dir: Path,
    on: str | None = None,
    is_plain: bool = False,
    has_baseline: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> StrikeResult:
    """Strike one running job, and heal the lab.

    Args:
        lab: a lab that is up.
        name: name of the strike.
        seed: of all random choices.
        work_dir: for run directories and logs; visible to the nodes.
        on: the node; by default chosen by the seed.
        is_plain: train with the script that does not use allranks.
        has_baseline: whether plain torchrun gets the same strike afterwards.
        say: gets a line about steps that take long.
    Raises:
        UsageError: the lab is not up, there is no such strike or node.
        SetupError: the job does not start, the strike cannot be done or healed.
    """
    program, strike = PLAIN if is_plain else PROGRAM, STRIKES[name]
    if strike.needs_login and lab.controller() in lab.planned_hosts():
        raise UsageError(f"{name} needs a lab with a login node: allranks lab up --name {lab.name} --login")
    directory = _make_anew(work_dir / f"running-{name}-{seed}")
    injected = inject(lab, name, seed=seed, on=on, run_dir=directory)
    try:
        seen, truth, ranks = _strike_job(lab, strike, injected, directory, program)
    finally:
        _heal(lab)
    baseline = None
    if has_baseline and strike.launch is Launch.STEP:
        say(f"{name}: the same under plain torchrun, stopped {BASELINE_S:.0f} s after the strike")
        baseline = _drill_torchrun(lab, strike, seed=seed, on=on, directory=_make_anew(directory / "torchrun"))
    return _conclude(strike, seen, truth, ranks, seed=seed, program=program.name, baseline=baseline)


def _strike_job(
    lab: Lab, strike: type[Strike], injected: Injected, directory: Path, program: Path
) -> tuple[JobSeen, TrueCulprit, tuple[int, ...]]:
    job = Running(lab, directory, strike, strike.start(injected.scene))
    with Terminal(job.output) as terminal:
        try:
            job.begin(program)
            job.target.checkpoints = strike.find_checkpoints(injected.scene, job.target.checkpoints)
            job.wait_until_stepping(UP_S)
            if program is PROGRAM:
                job.target.wait(lambda: job.target.whole_checkpoint() is not None, SAVED_S, "the first checkpoint")
            time.sleep(SETTLE_S)
            strike.begin(injected.scene, job.target)
            if strike.place is FaultPlace.LEADER:
                injected.scene.aim(job.target.leader())
            began_s, start = time.time(), next(iter(job.target.newest().values())).start
            truth = strike.culprit(injected.scene)
            ranks = (
                tuple(rank for node in truth.nodes for rank in job.target.ranks_on(node)) if strike.has_ranks else ()
            )
            checkpoint = job.target.whole_checkpoint()
            job.target.saved()
            struck_s = strike.strike(injected.scene, job.target)
            strike.follow_up(injected.scene, job.target)
            _wait_for_outcome(job, strike, start)
            more = strike.check(injected.scene, job.target)
            num_ranks = len(job.target.newest())
            if strike.is_needed_again and num_ranks < job.num_nodes:
                more.append(f"the job continued with {num_ranks} of {job.num_nodes} nodes, although all were back")
            if program is PROGRAM and job.target.whole_checkpoint() is None:
                more.append("no loadable checkpoint is left")
            has_ended = job.has_ended()
            exit_code, num_requeues = job.exit_code(), job.num_requeues()
            is_batch = strike.launch is Launch.BATCH
            if is_batch and exit_code == 0 and (state := job.slurm_state()) not in strike.end_states:
                more.append(f"SLURM's state of the job is {state}, but allranks returned 0")
        finally:
            job.cut_off()
            left = wait_until_gone(lab)
    seen = JobSeen(
        began_s=began_s,
        struck_s=struck_s,
        printed=tuple(terminal.causes(since_s=struck_s)),
        events=tuple(job.events()),
        steps=tuple(job.target.steps()),
        saved=tuple(job.target.saved()),
        start=start,
        checkpoint=checkpoint,
        has_ended=has_ended,
        exit_code=exit_code,
        num_requeues=num_requeues,
        left=tuple(left),
        more=tuple(more),
        ledger=job.ledger(),
    )
    return seen, truth, ranks


def _wait_for_outcome(job: Running, strike: type[Strike], start: tuple[int, int]) -> None:
    """Wait for the expected outcome, or until it can no longer come; then for the job's end."""
    if strike.severity is Expected.FAIL:
        _wait(job.has_ended, strike.watch_s)
        return

    def has_resumed() -> bool:
        job.target.saved()  # before the job deletes them
        newest = job.target.newest()
        num_ranks = next((step.world for step in newest.values()), 0)
        if strike.is_needed_again and num_ranks < job.num_nodes:
            return False
        return job.target.is_stepping(num_ranks, after=start)

    is_survived = strike.severity is Expected.SURVIVED
    _wait(lambda: job.has_ended() or (not is_survived and has_resumed()), strike.watch_s)
    job.target.stop()
    _wait(job.has_ended, END_S)


def _drill_torchrun(lab: Lab, strike: type[Strike], *, seed: int, on: str | None, directory: Path) -> StrikeBaseline:
    injected = inject(lab, strike.name, seed=seed, on=on, run_dir=directory)
    job = Running(lab, directory, strike, strike.start(injected.scene))
    try:
        with Terminal(job.output) as terminal:
            try:
                job.begin_torchrun()
                job.wait_until_stepping(UP_S + 30.0)
                time.sleep(SETTLE_S)
                start = next(iter(job.target.newest().values())).start
                struck_s = strike.strike(injected.scene, job.target)
                _wait(lambda: job.has_ended() or job.target.is_stepping(1, after=start, num_steps=1), BASELINE_S)
                exit_code = job.exit_code()
            finally:
                job.cut_off()
                wait_until_gone(lab)
    finally:
        _heal(lab)
    first = next(((time_s, line) for time_s, line in terminal.lines if time_s >= struck_s and complains(line)), None)
    # Lines that it prints because it is cut off do not count.
    is_own = first is not None and first[0] < struck_s + BASELINE_S - 0.5
    later = [step.time_s for step in job.target.steps() if step.start > start]
    return StrikeBaseline(
        silent_s=round(first[0] - struck_s, 1) if first and is_own else None,
        said=words_of(first[1]) if first and is_own else "nothing",
        next_step_s=round(min(later) - struck_s, 1) if later else None,
        exit_code=exit_code,
    )


def _conclude(
    strike: type[Strike],
    seen: JobSeen,
    truth: TrueCulprit,
    ranks: tuple[int, ...],
    *,
    seed: int,
    program: str,
    baseline: StrikeBaseline | None,
) -> StrikeResult:
    verdict_s, next_step_s, next_step = seen.verdict_s(strike.succession), seen.next_step_s(), seen.next_step()
    said = [f"{verdict['cause']} {verdict.get('node') or ''}".strip() for verdict in seen.verdicts(strike.succession)]
    shown = f"{truth} (rank {', '.join(map(str, ranks))})" if ranks else str(truth)
    return StrikeResult(
        fault=strike.name,
        seed=seed,
        program=program,
        truth=f"{' or '.join(strike.cause)} {shown}".strip() or "nobody",
        expected=str(strike.severity),
        verdict="; ".join(dict.fromkeys(said)) or "none",
        verdict_s=None if verdict_s is None else round(verdict_s, 2),
        next_step_s=None if next_step_s is None else round(next_step_s, 2),
        phases_s=seen.phases_s(),
        resumed_at=next_step.step if next_step else None,
        exit_code=seen.exit_code,
        num_requeues=seen.num_requeues,
        leader=", ".join(seen.successors()),
        wrong=tuple(judge(strike, seen, truth, ranks, slowness=slowness())),
        baseline=baseline,
        has_account=seen.ledger is not None,
    )


@functools.cache
def slowness() -> float:
    """Return how many times as long as IMPORT_S this machine takes to import torch, at least 1; measured once."""
    began_s = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, timeout=120, check=False)
    return max(1.0, (time.monotonic() - began_s) / IMPORT_S)


def _wait(is_there: Callable[[], bool], deadline_s: float) -> bool:
    give_up_s = time.monotonic() + deadline_s
    while not is_there():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(POLL_S)
    return True


def _heal(lab: Lab) -> None:
    """Heal, and replace what died; a node that is cut off cannot be put into service."""
    heal(lab)
    lab.mend()


def _make_anew(directory: Path) -> Path:
    """Return an empty directory; remove the files of an earlier drill with the same name and seed."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory.absolute()
