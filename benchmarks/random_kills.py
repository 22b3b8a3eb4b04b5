"""Does a training that is killed at random instants, again and again, come to the very same weights?

python benchmarks/random_kills.py --ranks 3 --kills 200        bit-identical to the uninterrupted run
python benchmarks/random_kills.py --ranks 6 --kills 30
python benchmarks/random_kills.py --ranks 3,2,3 --kills 20     the size changes with every restart: same samples, 1e-5
python benchmarks/random_kills.py --ranks 3 --kills 20 --launcher    restarts are those of `allranks run`
python benchmarks/random_kills.py --ranks 3 --kills 200 --launcher --full --signals KILL,STOP --into DIR --minutes 9
                        everything that a training has; again and again, until it says how many were bit-identical
python benchmarks/random_kills.py --ranks 3 --kills 20 --full --amp      autocast and a GradScaler, too
python benchmarks/random_kills.py --ranks 3 --kills 20 --full --amp --every 0 --total 600 --pause-s 0.2 --lead-s 90
                        allranks chooses the interval between checkpoints: the first one comes after a minute

A run goes through as many lives as it is killed; in each one a random rank gets SIGKILL at a random instant
(start-up, steps and saves included), with its writer in one of two, then the rest is ended, and the next life begins.
When a run has reached its end its weights, optimizer, EMA, GradScaler and samples are held against the uninterrupted
run's, and another run begins, until there were enough kills. Without `--launcher` workers are forked from this process,
which has torch imported already, and the newest checkpoint must load after every kill.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from allranks.state.saved.checkpoint import Checkpointer

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "exact_train.py"
for _module in ("torch._dynamo", "allranks.session", "allranks.state.resumed.begin"):
    importlib.import_module(_module)  # once, for all workers: DDP alone imports 800 modules when it is made
LIFE_S = 300.0
"""Deadline of one life, without its pauses: a hang is a failure, too."""
GIVES_UP = re.compile(r"AR509 |failed \d+ times without progress")
"""What `allranks run` says where it ends repeats; it is started again then."""
FAST_GUARD = "[guard]\nbeat_s = 0.2\ngone_s = 5\nstopped_s = 2\n"
"""So that a stopped rank does not take the default 5 s of each kill."""


@dataclass
class Told:
    """What all runs came to."""

    kills: int = 0
    runs: int = 0
    starts: int = 0
    """Of `allranks run`."""
    lives_without_step: int = 0
    identical: int = 0
    largest_difference: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass
class Course:
    """One training: where, with which options, and how many ranks in which life."""

    out: Path
    sizes: Sequence[int]
    options: Sequence[str]
    life_s: float = LIFE_S

    def size(self, life: int) -> int:
        return self.sizes[life % len(self.sizes)]

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def is_done(self) -> bool:
        return (self.out / "final.pt").exists()


def start_rank(course: Course, life: int, rank: int, port: int) -> int:
    """Fork one worker, with the environment that torchrun would give."""
    pid = os.fork()
    if pid:
        return pid
    try:
        size = str(course.size(life))
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "kills"}
        os.environ |= {"ALLRANKS_CHECKPOINT_DIR": str(course.checkpoints), "EXACT_LIFE": str(life)}
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
        log = os.open(course.out / f"life_{life}_rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        sys.argv = [str(SCRIPT), str(course.out), *course.options]
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as exc:
        os._exit(exc.code if isinstance(exc.code, int) else 1)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def live(course: Course, life: int, *, kill_after_s: float | None, chance: random.Random) -> str:
    """Run one life, and kill a rank so long after the first step, before it where negative; return how it ended."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    ranks = {start_rank(course, life, rank, port): rank for rank in range(course.size(life))}
    steps = course.out / str(life) / "0.steps"
    started_s, kill_at_s, end_at_s = time.monotonic(), None, None
    if kill_after_s is not None and kill_after_s < 0:
        kill_at_s = started_s - kill_after_s
    end = ""
    while ranks:
        now_s = time.monotonic()
        if kill_after_s is not None and kill_at_s is None and steps.exists() and steps.stat().st_size:
            kill_at_s = now_s + kill_after_s
        if kill_at_s is not None and now_s >= kill_at_s and not end:
            victim = chance.choice(list(ranks))
            writers = children_of(victim) if chance.random() < 0.5 else []
            for pid in [victim, *writers]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            whom = f"rank {ranks[victim]}{' and its writer' * bool(writers)}"
            end, end_at_s = f"{whom} killed", now_s + chance.choice([0.0, 0.05, 0.6])
        if now_s - started_s > course.life_s:
            end, end_at_s = end or "hang", now_s
        if end_at_s is not None and now_s >= end_at_s:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        for pid in list(ranks):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
                if code and not end:
                    end, end_at_s = f"rank {rank} ended with {code} by itself", now_s + 1
        time.sleep(0.002)
    return end or "done"


def live_below_launcher(course: Course, told: Told, options: argparse.Namespace, chance: random.Random) -> None:
    """Have `allranks run` restart what is killed or stopped from outside, and start it again where it gives up."""
    course.out.mkdir(parents=True, exist_ok=True)
    (course.out / "cluster.toml").write_text(FAST_GUARD)
    command = [sys.executable, "-m", "allranks", "run", "--nproc-per-node", str(course.size(0)), "--max-restarts"]
    command += ["1000", "--checkpoint-dir", str(course.checkpoints), str(SCRIPT), str(course.out), *course.options]
    while not course.is_done and not told.wrong and not is_time_up(options):
        first = first_free_life(course)
        told.starts += 1
        log_path = course.out / f"run_{first}.log"
        with log_path.open("w") as log:
            env = {**os.environ, "EXACT_LIFE": str(first)}
            job = subprocess.Popen(command, cwd=course.out, env=env, stdout=log, stderr=log)
            strike_until_end(course, told, job, first, options, chance)
        if job.returncode and not is_time_up(options) and not GIVES_UP.search(log_path.read_text()):
            told.wrong.append(f"{course.out}: allranks run ended with {job.returncode}, see {log_path}")


def strike_until_end(
    course: Course,
    told: Told,
    job: subprocess.Popen[bytes],
    life: int,
    options: argparse.Namespace,
    chance: random.Random,
) -> None:
    """Kill or stop a rank in each life of this job, until there were enough kills or the time is up."""
    began_s = time.monotonic()
    while job.poll() is None:
        pids = [course.out / str(life) / f"{rank}.pid" for rank in range(course.size(0))]
        steps = course.out / str(life) / "0.steps"
        if told.kills < options.kills and all(path.exists() and path.stat().st_size for path in [*pids, steps]):
            time.sleep(chance.uniform(0, options.lead_s))
            name = chance.choice(options.signals.split(","))
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(chance.choice(pids).read_text()), signal.Signals[f"SIG{name}"])
                told.kills += 1
                show(f"life {life}: SIG{name}, {told.kills} of {options.kills}")
                keep_told(told, course.out.parent)
            life, began_s = life + 1, time.monotonic()
        if time.monotonic() - began_s > course.life_s:
            told.wrong.append(f"{course.out}: the job hangs in life {life}")
        if told.wrong or is_time_up(options):
            job.terminate()
            job.wait(60)
        time.sleep(0.01)


def first_free_life(course: Course) -> int:
    return 1 + max((int(path.name) for path in course.out.iterdir() if path.name.isdecimal()), default=-1)


def is_time_up(options: argparse.Namespace) -> bool:
    return time.monotonic() > options.until_s


def keep_told(told: Told, root: Path) -> None:
    (root / "told.json").write_text(json.dumps(asdict(told)))


def in_child(work: Callable[[], str]) -> str:
    """What this returns in a process of its own, so that this one stays without threads."""
    end, other = os.pipe()
    if pid := os.fork():
        os.close(other)
        with os.fdopen(end) as answer:
            said = answer.read()
        os.waitpid(pid, 0)
        return said
    try:
        os.write(other, work().encode())
    finally:
        os._exit(0)


def newest_step(course: Course) -> int:
    """Step of the newest checkpoint that loads; -1: there is none."""

    def load() -> str:
        with Checkpointer(course.checkpoints, say=lambda text: None) as checkpoints:
            loaded = checkpoints.load()
        return str(-1 if loaded is None else loaded.step)

    return int(in_child(load) or -1)


def samples_of(course: Course) -> list[dict[int, list[int]]]:
    """Per life and step, the samples of all ranks in their order; steps that not all ranks wrote are left out."""
    lives = []
    folders = [path for path in course.out.iterdir() if path.name.isdecimal()]
    for folder in sorted(folders, key=lambda path: int(path.name)):
        steps: dict[int, list[int]] = defaultdict(list)
        seen: dict[int, int] = defaultdict(int)
        files = [folder / f"{rank}.steps" for rank in range(course.size(int(folder.name)))]
        for path in files:
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            for line in lines:
                if line.endswith("\n"):
                    number, *samples = map(int, line.split())
                    steps[number] += samples
                    seen[number] += 1
        lives.append({number: steps[number] for number in steps if seen[number] == len(files)})
    return lives


def compare(course: Course, reference: Course, told: Told) -> None:
    """Hold weights and samples of a run that has reached its end against the uninterrupted one's."""
    whole = samples_of(reference)[0]
    for life, steps in enumerate(samples_of(course)):
        told.lives_without_step += not steps
        wrong = [number for number, samples in steps.items() if samples != whole[number]]
        if wrong:
            told.wrong.append(f"{course.out}: life {life} took other samples at step {wrong[0]}")
    mine, its = (dict(tensors_of(torch.load(each.out / "final.pt"))) for each in (course, reference))
    difference = max((mine[name].double() - its[name].double()).abs().max().item() for name in its)
    told.largest_difference = max(told.largest_difference, difference)
    is_identical = all(torch.equal(mine[name], its[name]) for name in its)
    told.identical += is_identical
    what = f"{len(its)} values of model, optimizer, EMA and GradScaler"
    show(f"{course.out.name} is done: {what} {'bit-identical' if is_identical else f'differ by {difference:.3g}'}")
    if not is_identical and len(set(course.sizes)) == 1:
        told.wrong.append(f"{course.out}: weights differ by {difference:.3g}")
    if difference > 1e-5:
        told.wrong.append(f"{course.out}: weights differ by {difference:.3g}, more than 1e-5")


def tensors_of(state: object, where: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors and numbers in a state, as tensors, with the path to each."""
    if isinstance(state, torch.Tensor | float | int):
        yield where, torch.as_tensor(state)
    for key, value in state.items() if isinstance(state, dict) else ():
        yield from tensors_of(value, f"{where}/{key}")


def show(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def kill_run(course: Course, told: Told, kills: int, chance: random.Random, lead_s: float) -> None:
    """One run to its end, through as many lives as it takes."""
    course.out.mkdir(parents=True)
    life, best = 0, -1
    while not course.is_done:
        is_early = chance.random() < 0.1
        after_s = -chance.uniform(0, 0.5) if is_early else chance.uniform(0, lead_s)
        end = live(course, life, kill_after_s=after_s if told.kills < kills else None, chance=chance)
        newest = newest_step(course)
        if newest < best:
            told.wrong.append(f"{course.out}: after life {life} step {newest} is the newest that loads, {best} was")
        best = max(best, newest)
        if end.endswith("killed"):
            told.kills += 1
        elif end != "done":
            told.wrong.append(f"{course.out}: life {life}: {end}")
            return
        if end != "done":
            when = f"{after_s:+.2f} s from the first step"
            show(f"life {life}: {end} {when}; step {newest} loads; {told.kills} of {kills}")
        life += 1
    told.runs += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="3", help="one number, or one for each life in turn: 3,2,3")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--total", type=int, default=400, help="steps of a run")
    parser.add_argument("--every", type=int, default=7, help="steps between checkpoints; 0: allranks chooses")
    parser.add_argument("--lead-s", type=float, default=1.2, help="most seconds from a life's first step to its kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader")
    parser.add_argument("--launcher", action="store_true", help="restarts are those of `allranks run`")
    parser.add_argument("--signals", default="KILL", help="KILL,STOP: one of them at random; STOP with --launcher only")
    parser.add_argument("--full", action="store_true", help="BatchNorm, EMA, clipping, micro-batches, 2 loader workers")
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16, and a GradScaler; one size only")
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each step, so that a run takes longer")
    parser.add_argument("--into", type=Path, help="directory to work in; the same one again goes on where it stopped")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long; --into goes on later")
    parser.add_argument("--unpinned", action="store_true", help="torch's own DDP, for comparison")
    options = parser.parse_args()

    if "STOP" in options.signals and not options.launcher:
        parser.error("--signals STOP: only `allranks run` sees that a rank is stopped; say --launcher, too")
    options.until_s = time.monotonic() + 60 * options.minutes
    sizes = [int(size) for size in options.ranks.split(",")]
    if options.amp and len(set(sizes)) > 1:
        parser.error("--amp: with another number of ranks, bfloat16 sums differ by more than 1e-5")
    life_s = LIFE_S + options.lead_s + options.total * options.pause_s
    flags = ["--total", str(options.total), *(["--every", str(options.every)] if options.every else [])]
    flags += ["--full", "--micro", "4", "--batch", "32"] * options.full
    flags += ["--workers", str(max(options.workers, 2 * options.full))]
    flags += ["--noise"] * (len(set(sizes)) == 1) + ["--unpinned"] * options.unpinned
    flags += ["--amp"] * options.amp + ["--pause-s", str(options.pause_s)] * (options.pause_s > 0)
    root = options.into or Path(tempfile.mkdtemp(prefix="kills-"))
    root = root.absolute()
    told = Told(**json.loads((root / "told.json").read_text())) if (root / "told.json").exists() else Told()
    chance = random.Random(options.seed + told.kills)
    os.environ |= {"OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)

    reference = Course(root / "reference", sizes[:1], flags, life_s)
    if not reference.is_done:
        reference.out.mkdir(parents=True)
        started_s = time.monotonic()
        if (end := live(reference, 0, kill_after_s=None, chance=chance)) != "done":
            sys.exit(f"the uninterrupted run: {end}; see {reference.out}")
        show(f"uninterrupted: {options.total} steps at {sizes[0]} ranks in {time.monotonic() - started_s:.1f} s")
    while told.kills < options.kills and not told.wrong and not is_time_up(options):
        course = Course(root / f"run_{told.runs}", sizes, flags, life_s)
        if options.launcher:
            live_below_launcher(course, told, options, chance)
            told.runs += course.is_done
        else:
            kill_run(course, told, options.kills, chance, options.lead_s)
        if course.is_done:
            compare(course, reference, told)
        keep_told(told, root)
    print(f"ranks {options.ranks}: {told.kills} kills in {told.runs} runs of {options.total} steps")
    print(f"  bit-identical state    {told.identical} of {told.runs}")
    print(f"  largest difference     {told.largest_difference:.3g}")
    print(f"  lives without a step   {told.lives_without_step}")
    if options.launcher:
        print(f"  starts of allranks run {told.starts}")
    if told.wrong:
        sys.exit("\n".join([f"WRONG (kept in {root}):", *told.wrong]))
    if told.kills < options.kills:
        sys.exit(f"not done yet: the same command with --into {root} goes on")
    if options.into is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
