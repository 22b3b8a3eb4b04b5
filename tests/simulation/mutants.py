"""The reducers under test: as they are, or with one rule broken."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import allranks.launch

HERE = Path(__file__).parent
TABLE = HERE / "mutants.toml"
SOURCE = Path(allranks.launch.__file__).parent
LEAD = ("members", "recovery", "generation", "summary", "status", "reports", "leader")
FIRST = ("queue.ending", "lead.course", "grace", "relays")
MODULES = (*FIRST, *(f"lead.{name}" for name in LEAD), "succession", "agent")
"""In the order in which they import each other."""


@dataclass(frozen=True)
class Cores:
    """The classes that a world is made of."""

    Leader: Any
    Terms: Any
    Node: Any
    State: Any
    Agent: Any
    decide_ending: Any
    goes_back: Any
    is_led_elsewhere: Any
    has_ended: Any
    why_not_lead: Any


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of a reducer that breaks one rule."""

    name: str
    rule: str
    """What then no longer holds."""
    file: str
    """Below src/allranks/launch."""
    before: str
    after: str
    times: int = 1

    def apply(self, source: str) -> str:
        """Return the changed source.

        Raises:
            ValueError: `before` does not occur `times` times.
        """
        if (found := source.count(self.before)) != self.times:
            raise ValueError(f"{self.name}: expected {self.before!r} {self.times} times in {self.file}, found {found}")
        return source.replace(self.before, self.after)


def read_mutants() -> list[Mutant]:
    """Return all mutants, in the order of the file."""
    return [Mutant(**row) for row in tomllib.loads(TABLE.read_text())["mutant"]]


def load(mutant: Mutant | None) -> Cores:
    """Return the reducers, with one change; all modules that import the changed one are loaded anew, and only here."""
    saved = {name: importlib.import_module(f"allranks.launch.{name}") for name in MODULES}
    if mutant is None:
        return _cores(saved)
    if mutant.file.removesuffix(".py").replace("/", ".") not in MODULES:
        raise ValueError(f"{mutant.name}: {mutant.file} is none of the modules that are loaded anew")
    loaded: dict[str, ModuleType] = {}
    try:
        for name, before in saved.items():
            path = SOURCE / f"{name.replace('.', '/')}.py"
            source = path.read_text()
            if path == SOURCE / mutant.file:
                source = mutant.apply(source)
            module = loaded[name] = ModuleType(before.__name__)
            module.__file__ = str(path)
            _put(module)
            exec(compile(source, str(path), "exec"), module.__dict__)
    finally:
        for module in saved.values():
            _put(module)
    return _cores(loaded)


def _put(module: ModuleType) -> None:
    """Have `import x.y` and `from x import y` find this module."""
    package, _, name = module.__name__.rpartition(".")
    sys.modules[module.__name__] = module
    setattr(sys.modules[package], name, module)


def _cores(modules: dict[str, Any]) -> Cores:
    return Cores(
        Leader=modules["lead.leader"].Leader,
        Terms=modules["lead.course"].Terms,
        Node=modules["lead.members"].ConnectedNode,
        State=modules["lead.members"].State,
        Agent=modules["agent"].Agent,
        decide_ending=modules["queue.ending"].decide,
        goes_back=modules["queue.ending"].goes_back,
        is_led_elsewhere=modules["succession"].is_led_elsewhere,
        has_ended=modules["succession"].has_ended,
        why_not_lead=modules["succession"].why_not_lead,
    )


CORES = load(None)
