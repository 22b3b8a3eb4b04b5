"""Live through many simulated jobs, and find every mutant of the reducers.

    python -m simulation.run --lives 20000         what `make simulate LIVES=20000` does
    python -m simulation.run --seed 646            one life, with all that happened in it
                                                   (where a rule falls: the smallest such life, too, as Python)
    python -m simulation.run --mutants             only the mutants

Exit code: 0 if no invariant fell and every mutant was found, else 1. A seed lives the same life each time.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from dataclasses import dataclass
from itertools import chain

from .invariants import Violation
from .known import KNOWN
from .lives import Life, draw
from .mutants import CORES, Cores, Mutant, load, read_mutants
from .shrink import as_literal, rule_of, shrink
from .world import World

MOST_LIVES = 10_000
"""In which a mutant must be found."""
BLOCK = 500


@dataclass(frozen=True)
class Tally:
    """What came of some lives."""

    lives: int = 0
    events: int = 0
    cpu_s: float = 0.0
    fallen: tuple[tuple[int, str], ...] = ()
    """Seeds, and what fell."""


def live(life: Life, cores: Cores = CORES, *, log: list[str] | None = None) -> tuple[World, str]:
    """Live one life; returns it, and what fell (empty: nothing). An assertion of the product counts, too."""
    world = World(life, cores, log=log)
    try:
        world.run()
    except Violation as exc:
        return world, str(exc)
    except Exception as exc:
        return world, f"{type(exc).__name__}: {exc}"
    return world, ""


def live_block(first: int, num_lives: int = BLOCK) -> Tally:
    """Live a block of lives."""
    gc.disable()
    begun_s, num_events, fallen = time.process_time(), 0, []
    for seed in range(first, first + num_lives):
        world, broken = live(draw(seed))
        num_events += world.num_events
        if broken:
            fallen.append((seed, broken))
        if seed % 50 == 49:
            gc.collect()
    gc.enable()
    return Tally(num_lives, num_events, time.process_time() - begun_s, tuple(fallen))


def find(mutant: Mutant) -> tuple[int | None, str]:
    """Return the first seed at which a mutant is found, and by what; None: in none of MOST_LIVES.

    Some rules are so rarely needed that only a life beyond these has shown it: that one is in known.py, and tried last.
    """
    cores = load(mutant)
    lives = map(draw, range(MOST_LIVES))
    for life in chain(lives, [KNOWN[mutant.name]] if mutant.name in KNOWN else []):
        _, broken = live(life, cores)
        if broken:
            return life.seed, broken
    return None, ""


def _find_named(name: str) -> tuple[str, int | None, str]:
    mutant = next(each for each in read_mutants() if each.name == name)
    return name, *find(mutant)


def run_lives(num_lives: int, *, first: int, jobs: int) -> bool:
    """Live many lives; returns whether no invariant fell."""
    blocks = range(first, first + num_lives, BLOCK)
    tallies = []
    with multiprocessing.Pool(jobs) as pool:
        for tally in pool.imap(live_block, blocks):
            tallies.append(tally)
            for seed, broken in tally.fallen:
                print(f"seed {seed}: {broken}", flush=True)
    lives, num_events = sum(each.lives for each in tallies), sum(each.events for each in tallies)
    cpu_s, fallen = sum(each.cpu_s for each in tallies), sum(len(each.fallen) for each in tallies)
    rate = f"{lives / cpu_s:.0f} lives and {num_events / cpu_s:.0f} events per core-second"
    print(f"{lives} lives from seed {first}, {fallen} with a fallen invariant; {rate}", flush=True)
    for seed in {
        rule_of(broken): seed for tally in reversed(tallies) for seed, broken in reversed(tally.fallen)
    }.values():
        _show_small(draw(seed))
    return fallen == 0


def _show_small(life: Life) -> None:
    small, num_lives = shrink(life, lambda other: live(other)[1])
    print(f"seed {life.seed}, as small as {num_lives} lives made it, for KNOWN in known.py:\n    {as_literal(small)},")


def run_mutants(*, jobs: int) -> bool:
    """Look for all mutants; returns whether all were found."""
    missed = 0
    with multiprocessing.Pool(jobs) as pool:
        for name, seed, broken in pool.imap(_find_named, [each.name for each in read_mutants()]):
            missed += seed is None
            print(f"{name}: " + (f"seed {seed}: {broken[:100]}" if seed is not None else "NOT FOUND"), flush=True)
    print(f"{len(read_mutants()) - missed} of {len(read_mutants())} mutants found within {MOST_LIVES} lives")
    return missed == 0


def show(seed: int) -> bool:
    """Print one life."""
    log: list[str] = []
    world, broken = live(draw(seed), log=log)
    print(world.life, *log, broken or "no invariant fell", sep="\n")
    if broken:
        _show_small(world.life)
    return not broken


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="print this life only")
    parser.add_argument("--mutants", action="store_true", help="look for mutants only")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    if options.seed is not None:
        return 0 if show(options.seed) else 1
    is_well = options.mutants or run_lives(options.lives, first=options.first, jobs=options.jobs)
    return 0 if run_mutants(jobs=options.jobs) and is_well else 1


if __name__ == "__main__":
    sys.exit(main())
