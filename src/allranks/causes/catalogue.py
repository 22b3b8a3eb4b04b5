"""All causes there are, and how one is found by what people type: id, name, alias, or the beginning of ids.

    find_cause("mtu-blackhole").label()        # AR204 mtu-blackhole
    select_causes(["AR2"], ["AR213"])          # the network causes but slow-link

Nothing is imported before it is asked for.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from allranks.causes.trait import Family
from allranks.model.errors import UsageError

if TYPE_CHECKING:
    from allranks.causes.cause import Cause
    from allranks.causes.sign import Sign
    from allranks.causes.trait import Trait

FAMILIES: Mapping[str, str] = {
    Family.NODE: "node",
    Family.GPU: "GPU",
    Family.NETWORK: "network",
    Family.FABRIC: "RDMA and fabric",
    Family.GROUP: "group and collectives",
    Family.JOB: "job, SLURM and script",
    Family.STATE: "state",
}
"""Family of an id -> what it is about, for people."""

_NO_CAUSES = {
    "allranks.causes.cause",
    "allranks.causes.catalogue",
    "allranks.causes.pages",
    "allranks.causes.sign",
    "allranks.causes.trait",
}


@functools.cache
def all_causes() -> tuple[type[Cause], ...]:
    """Return every cause and outcome, in the order of their ids."""
    import allranks.causes
    from allranks.causes.cause import Cause

    found: list[type[Cause]] = []
    for info in pkgutil.walk_packages(allranks.causes.__path__, "allranks.causes."):
        if info.name in _NO_CAUSES:
            continue
        module = importlib.import_module(info.name)
        found += [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Cause) and value.id and value.__module__ == info.name
        ]
    found.sort(key=lambda cause: cause.id)
    return tuple(found)


def find_cause(text: str) -> type[Cause]:
    """Return the cause of this id, name or alias, in any case; `AR204 mtu-blackhole` is one, too.

    Raises:
        UsageError: there is none; it says what comes close.
    """
    cause = known_cause(text)
    if cause is None:
        raise _no_such_cause(text)
    return cause


def known_cause(text: str) -> type[Cause] | None:
    """Return the same; None if there is none: a finding may be of another version."""
    return _by_name().get(text.strip().lower())


def traits_of(text: str) -> frozenset[Trait]:
    """Return what engines may ask of this cause; nothing if there is none."""
    cause = known_cause(text)
    return frozenset() if cause is None else cause.traits


@functools.cache
def _by_name() -> dict[str, type[Cause]]:
    named: dict[str, type[Cause]] = {}
    for cause in reversed(all_causes()):
        named |= {name.lower(): cause for name in (cause.id, cause.name, cause.label(), *cause.aliases)}
    return named


def find_loss(text: str) -> Sign | None:
    """Return the sign by which the end of a rank says that it only lost another rank; None: it does not say so.

    Args:
        text: an exception's type and message, without the frames, or the last lines of stderr.
    """
    return next((sign for sign, pattern in _losses() if pattern.search(text)), None)


@functools.cache
def _losses() -> tuple[tuple[Sign, re.Pattern[str]], ...]:
    ends = (sign for cause in all_causes() for sign in cause.signs if "end" in sign.where)
    return tuple((sign, re.compile(sign.pattern, re.MULTILINE)) for sign in ends)


def select_causes(select: Sequence[str], ignore: Sequence[str]) -> tuple[type[Cause], ...]:
    """Return the causes that are asked for, in the order of their ids.

    Args:
        select: ids, names, aliases or beginnings of ids (`AR2`: all of the network); none at all means every cause.
        ignore: the same, for what is left out of them.
    Raises:
        UsageError: one of them fits no cause.
    """
    chosen = set(_matching(select)) if select else set(all_causes())
    left_out = set(_matching(ignore))
    return tuple(cause for cause in all_causes() if cause in chosen and cause not in left_out)


def ways_to_find(cause: type[Cause]) -> dict[str, str]:
    """Return how a cause is looked for: the way -> when it speaks up, in one line (of its hook's docstring)."""
    from allranks.causes.cause import Cause

    hooks = {"probe": "on each node", "alike": "compared on all nodes", "survey": "over all nodes together"}
    ways = {}
    for name, way in hooks.items():
        hook = getattr(cause, name)
        if hook.__func__ is not getattr(Cause, name).__func__:
            ways[way] = (inspect.getdoc(hook) or "").partition("\n")[0]
    if cause.symptoms:
        ways["between pairs of nodes"] = f"{', or '.join(symptom.words for symptom in cause.symptoms)}."
    if cause.roll_call:
        ways["by the roll call"] = f"{cause.roll_call}."
    if cause.deep:
        ways["by --deep"] = f"{cause.deep}."
    if count := sum("log" in sign.where for sign in cause.signs):
        ways["in logs"] = f"{count} pattern{'s' if count > 1 else ''} of lines."
    return ways


def _matching(texts: Iterable[str]) -> list[type[Cause]]:
    found: list[type[Cause]] = []
    for text in texts:
        prefix = text.strip().upper()
        if re.fullmatch(r"AR[0-9]{1,2}", prefix):
            family = [cause for cause in all_causes() if cause.id.startswith(prefix)]
            if not family:
                raise _no_such_cause(text)
            found += family
        else:
            found.append(find_cause(text))
    return found


def _no_such_cause(text: str) -> UsageError:
    import difflib  # only here: it costs time

    # A wrong number is a wrong number: the nearest one is another cause.
    is_id = re.fullmatch(r"AR[0-9]*", text.strip(), re.IGNORECASE)
    names = {} if is_id else {name.lower(): name for cause in all_causes() for name in (cause.name, *cause.aliases)}
    close = difflib.get_close_matches(text.strip().lower(), names, n=1)
    within = [name for name in names.values() if len(text.strip()) > 2 and text.strip().lower() in name.lower()]
    hint = f'did you mean "{names[close[0]] if close else within[0]}"? ' if close or within else ""
    return UsageError(f'no cause "{text}": {hint}expected an id, a name or an alias; allranks explain lists them')
