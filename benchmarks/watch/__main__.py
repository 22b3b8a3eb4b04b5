"""What does `allranks watch` say of jobs that allranks did not start? As root, from the repository's root:

python -m benchmarks.watch run                                  every fault under every launcher, and the page
python -m benchmarks.watch run --faults killed,reads --launchers torchrun --repeat 3
python -m benchmarks.watch plant                                the faults alone: is each what it should be?
python -m benchmarks.watch healthy --minutes 60                 healthy jobs: no verdict
python -m benchmarks.watch strace                               a watched rank gets no stop and no signal
python -m benchmarks.watch beside                               what py-spy dump shows for the same faults

docs/evidence/watch.md is written unless --no-page is given. WATCH_DEEPSPEED=/path/to/python: an interpreter that has
DeepSpeed; without it a stand-in starts the same processes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from . import beside, healthy, page, quiet
from .faults import FAULTS
from .jobs import LAUNCHERS, DrillError, has_deepspeed
from .stage import Result, play_apart

CLUSTER = Path(__file__).with_name("three-nodes.toml")
NUM_TRIES = 2
"""Of a drill that itself failed (a job that did not start); a wrong answer is never tried again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "plant"):
        command = commands.add_parser(name)
        command.add_argument("--faults", type=_names(FAULTS), default=list(FAULTS), help="names, with commas")
        command.add_argument("--launchers", type=_names(LAUNCHERS), default=list(LAUNCHERS), help="names, with commas")
        command.add_argument("--repeat", type=int, default=1, help="drills of each")
        command.add_argument("--jobs", type=int, default=1, help="drills at the same time")
    calm = commands.add_parser("healthy")
    calm.add_argument("--minutes", type=float, default=60.0, help="of all jobs together")
    calm.add_argument("--kinds", type=_names(healthy.list_kinds()), default=healthy.list_kinds())
    commands.add_parser("strace")
    commands.add_parser("beside")
    for command in commands.choices.values():
        command.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of the jobs there")
        command.add_argument("--no-page", action="store_true", help="do not write docs/evidence/watch.md")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as left:
        scratch = options.keep or Path(left.enter_context(tempfile.TemporaryDirectory(prefix="watch-drills-")))
        scratch = scratch.absolute()
        scratch.chmod(0o755) if scratch.exists() else scratch.mkdir(parents=True)
        if options.command in ("run", "plant"):
            lab = left.enter_context(_lab()) if "srun" in options.launchers else ""
            return _run(options, scratch, lab)
        if options.command == "healthy":
            return _healthy(options, scratch)
        part = quiet.check(scratch) if options.command == "strace" else beside.compare(scratch)
    print(json.dumps(part, indent=1))
    if not options.no_page:
        page.keep(options.command, {"date": _today(), **part})
    return int(bool(part.get("num_stops")))


def _run(options: argparse.Namespace, scratch: Path, lab: str) -> int:
    is_watched = options.command == "run"
    drills = [
        (launcher, fault, number)
        for number in range(options.repeat)
        for launcher in options.launchers
        for fault in options.faults
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = []
        for result in pool.map(lambda drill: _drill(*drill, scratch, lab, is_watched=is_watched), drills):
            wrong = [*result.planted, *result.wrong]
            took = "" if result.named_s is None else f"{result.named_s:.2f} s"
            print(f"{result.launcher:10} {result.fault:16} {took:8} {result.certainty:10} load {result.load:<5.1f} "
                  f"{'; '.join(wrong) or 'ok'}   {result.said}", flush=True)  # fmt: skip
            results.append(result)
    num_wrong = sum(bool(result.wrong or result.planted) for result in results)
    print(f"{len(results) - num_wrong} of {len(results)} right")
    if is_watched and not options.no_page:
        found = {
            "torch": importlib.metadata.version("torch"), "cores": os.cpu_count(),
            "deepspeed": "its own launcher" if has_deepspeed() else "a stand-in with the same tree of processes",
            "results": [asdict(result) for result in results],
        }  # fmt: skip
        page.keep("faults", {"date": _today(), **found})
    return int(num_wrong > 0)


def _drill(launcher: str, fault: str, number: int, scratch: Path, lab: str, *, is_watched: bool) -> Result:
    for attempt in range(NUM_TRIES):
        directory = scratch / f"{launcher}-{fault}-{number}-{attempt}"
        try:
            (result,) = play_apart(launcher, [fault], directory, lab=lab, is_watched=is_watched, is_once=is_watched)
        except DrillError as exc:
            print(exc, file=sys.stderr)
            problem = str(exc)[-300:]
        else:
            return result
    return Result(fault=fault, launcher=launcher, planted=[f"the drill failed: {problem}"], truth="")


def _healthy(options: argparse.Namespace, scratch: Path) -> int:
    seconds = options.minutes * 60 / len(options.kinds)
    found = []
    for kind in options.kinds:
        calm = healthy.play_apart(kind, seconds, scratch / kind.replace("/", "-"))
        print(f"{calm.kind:38} {calm.seconds:6.0f} s  {len(calm.verdicts)} verdicts  load {calm.load:.1f}  "
              f"{'; '.join(calm.verdicts + calm.states)}", flush=True)  # fmt: skip
        found.append(asdict(calm))
    if not options.no_page:
        page.keep("healthy", {"date": _today(), "kinds": found})
    return int(any(calm["verdicts"] for calm in found))


@contextlib.contextmanager
def _lab() -> Iterator[str]:
    """Bring the lab of three nodes up, and down again."""
    name = f"watch-{os.getpid()}"
    lab = [sys.executable, "-m", "allranks", "lab"]
    try:
        subprocess.run([*lab, "up", "--name", name, "--cluster", str(CLUSTER)], check=True, timeout=120)
        yield name
    finally:
        subprocess.run([*lab, "down", "--name", name], check=False, timeout=120)


def _names(allowed: Sequence[str]):
    def convert(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(allowed):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: expected of {', '.join(allowed)}")
        return names

    return convert


def _today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


if __name__ == "__main__":
    sys.exit(main())
