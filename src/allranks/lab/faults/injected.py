"""Which faults are in a lab, and how are they injected and healed? LAB_DIR/faults.json has all that `heal` needs.

    there = inject(Lab("demo"), "cable-pulled", seed=7)     # Injected: what, where, the truth
    heal(Lab("demo"))                                       # all of them, the last one first

A fault is written into the file before anything is changed, and so is what `heal` needs. If a process is killed in
between, everything can still be healed.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from allranks.lab import hosts as machines
from allranks.lab.faults.catalogue import FAULTS
from allranks.lab.faults.fault import Fault, FaultPlace, LabScene, Where
from allranks.lab.faults.running.strike import Strike
from allranks.lab.faults.running.strike_catalogue import STRIKES
from allranks.lab.lab import Lab, check_root
from allranks.lab.node_plan import Host
from allranks.model.errors import AllranksError, SetupError, UsageError

DEFAULT_RUN_DIR = Path("runs")
"""As in `allranks run --log-dir`."""


class InjectedFault(msgspec.Struct, kw_only=True):
    """One fault, as faults.json has it."""

    fault: str
    node: str
    peer: str | None
    seed: int
    run_dir: str
    lives: dict[str, str]
    memory: dict[str, Any] = {}

    @property
    def where(self) -> Where:
        """Its place."""
        return Where(node=self.node, peer=self.peer, seed=self.seed)

    @property
    def key(self) -> str:
        """The part that is equal for the same fault at the same place."""
        return f"{self.fault}@{self.node}"


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault in a lab, and its scene: gives the truth (`fault.culprit(scene)`) and the start of the job."""

    fault: type[Fault]
    scene: LabScene


def find_fault(name: str) -> type[Fault]:
    """Return a fault by its name.

    Raises:
        UsageError: there is none; the message has the one that was meant.
    """
    known: dict[str, type[Fault]] = {**FAULTS, **STRIKES}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "allranks lab inject --list prints all"
        raise UsageError(f"unknown fault {name!r}: {hint}")
    return known[name]


def refuse_strikes(fault: type[Fault]) -> None:
    """Refuse a fault that needs a running job.

    Raises:
        UsageError: it is such a one.
    """
    if issubclass(fault, Strike):
        raise UsageError(f"{fault.name} needs a running job: allranks lab drill --running {fault.name}")


def choose_where(fault: type[Fault], planned: Sequence[Host], *, on: str | None, seed: int) -> Where:
    """Return the place of a fault: chosen by the seed, unless `on` names the node.

    Raises:
        UsageError: there is no such node, or it cannot be put there.
    """
    names = [host.name for host in planned]
    if len(names) < fault.min_nodes:
        raise UsageError(f"{fault.name} needs {fault.min_nodes} nodes: the lab has {len(names)}")
    allowed = {
        FaultPlace.ANY: names,
        FaultPlace.FIRST: names[:1],
        FaultPlace.NOT_FIRST: names[1:],
        FaultPlace.LEADER: names[:1],
    }[fault.place]
    if on is not None and on not in names:
        raise UsageError(f"no node {on!r}: expected one of {', '.join(names)}")
    if on is not None and on not in allowed:
        raise UsageError(f"{fault.name} cannot be injected on {on}: expected {', '.join(allowed)}")
    chance = random.Random(f"{fault.name} {seed}")  # neighboring seeds alone give similar numbers
    drawn = chance.choice(allowed)
    node = on or drawn
    others = [name for name in names if name != node]
    return Where(node=node, peer=chance.choice(others) if others else None, seed=seed)


def inject(lab: Lab, name: str, *, seed: int, on: str | None = None, run_dir: Path = DEFAULT_RUN_DIR) -> Injected:
    """Inject a fault into a running lab.

    Args:
        lab: a lab that is up.
        name: name of the fault.
        seed: of all random choices.
        on: the node; by default chosen by the seed.
        run_dir: parent of the jobs' run directories, for the faults that hide it.
    Raises:
        UsageError: the lab is not up, there is no such fault or node, or the lab already has this fault.
        SetupError: this machine cannot do it; nothing of the fault remains.
    """
    fault = find_fault(name)
    check_root()
    planned = _check_up(lab)
    with lab.locked():
        where = choose_where(fault, planned, on=on, seed=seed)
        inits = machines.find_inits(lab.dir)
        lab.find_init(where.node)  # fails if a node is dead
        record = InjectedFault(
            fault=name,
            node=where.node,
            peer=where.peer,
            seed=seed,
            run_dir=str(run_dir.absolute()),
            lives={node: machines.identify(pid) for node, pid in inits.items()},
        )
        there = read_records(lab)
        if any(other.key == record.key for other in there):
            raise UsageError(
                f"{lab.label}: {where.node} already has {name}; allranks lab heal --name {lab.name} {name}"
            )
        there.append(record)
        _write_records(lab, there)
        injected = _open(lab, record, there)
        try:
            fault.inject(injected.scene)
        except (AllranksError, OSError):
            fault.heal(injected.scene)
            there.remove(record)
            _write_records(lab, there)
            raise
    return injected


def heal(lab: Lab, name: str | None = None, *, on: str | None = None) -> list[Injected]:
    """Heal faults, the last one first; on nodes that were replaced since, they are gone already.

    Args:
        lab: a lab that is up.
        name: name of the fault; by default all faults.
        on: the node; by default every node.
    Returns:
        What was healed.
    Raises:
        UsageError: the lab is not up, or the named fault is not in it.
        SetupError: a fault cannot be healed; it stays in faults.json.
    """
    if name is not None:
        find_fault(name)
    check_root()
    _check_up(lab)
    healed = []
    with lab.locked():
        there = read_records(lab)
        chosen = [record for record in there if name in (None, record.fault) and on in (None, record.node)]
        if not chosen and (name or on):
            found = ", ".join(record.key for record in there) or "none"
            raise UsageError(
                f"{lab.label} has no {name or 'fault'}{f' on {on}' if on else ''}: its faults are: {found}"
            )
        failed: list[str] = []
        for record in reversed(chosen):
            injected = _open(lab, record, there)
            try:
                injected.fault.heal(injected.scene)
            except (AllranksError, OSError) as exc:  # the others are healed nevertheless
                failed.append(f"{record.key}: {exc}")
                continue
            there.remove(record)
            _write_records(lab, there)
            healed.append(injected)
        _forget_neighbours(lab)
    if failed:
        raise SetupError(
            f"{lab.label}: not healed: {'; '.join(failed)}; to remove all faults: allranks lab down, then up"
        )
    return healed


def read_injected(lab: Lab) -> list[Injected]:
    """Return the faults in a lab, the oldest first."""
    there = read_records(lab)
    return [_open(lab, record, there) for record in there]


def read_records(lab: Lab) -> list[InjectedFault]:
    """Return faults.json; empty if there is none."""
    try:
        return msgspec.json.decode((lab.dir / "faults.json").read_bytes(), type=list[InjectedFault])
    except FileNotFoundError:
        return []


def _write_records(lab: Lab, records: Sequence[InjectedFault]) -> None:
    path, draft = lab.dir / "faults.json", lab.dir / "faults.draft"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(records)))
    draft.rename(path)


def _forget_neighbours(lab: Lab) -> None:
    """Let nodes forget unreachable neighbors: the kernel repeats a lost ARP request only after a second."""
    inits = [pid for node, pid in machines.find_inits(lab.dir).items() if node != machines.SWITCH]
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(lambda pid: machines.run_in(pid, ["ip", "neighbour", "flush", "all"], must_work=False), inits))


def _check_up(lab: Lab) -> Sequence[Host]:
    lab.find_init(lab.controller().name)  # any other node may have been killed by a strike
    return lab.planned_hosts()


def _open(lab: Lab, record: InjectedFault, there: Sequence[InjectedFault]) -> Injected:
    scene = LabScene(
        lab_dir=lab.dir,
        key=record.key,
        where=record.where,
        hosts={host.name: host for host in lab.planned_hosts()},
        controller=lab.controller(),
        inits=machines.find_inits(lab.dir),
        lives=record.lives,
        run_dir=Path(record.run_dir),
        others=[(other.fault, other.where) for other in there if other is not record],
        memory=record.memory,
        save=lambda: _write_records(lab, there),
    )
    return Injected(find_fault(record.fault), scene)
