"""Is each node fit for a job: limits, memory, directories, clock, a name of its own?"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from allranks.causes.outcome import PASSED, Checks, Outcome, Surveyed, failed, skipped, unknown, warned
from allranks.causes.probes.cards import is_same_machine, most_common, with_facts
from allranks.model.card import Card, Facts, JobDirectory
from allranks.model.finding import Status
from allranks.model.safe_text import GIB, KIB, MIB, size_text

# Are the node's limits high enough for a job: shared memory, locked memory, open files, cores?


def probe_shm_too_small(card: Card) -> Outcome:
    """Fails below 128 MiB or 64 MiB free (warns without GPUs); with GPUs, warns below 1 GiB or 512 MiB free."""
    if card.facts is None:
        return unknown("this node reported no facts")
    place = next((place for place in card.facts.places if place.purpose == "/dev/shm"), None)  # noqa: S108
    if place is None or place.size_bytes is None or place.free_bytes is None:
        why = place.problem if place else card.facts.unread.get("places")
        return unknown(why or "shared memory was not checked")
    values = {"free": size_text(place.free_bytes), "size": size_text(place.size_bytes)}
    if place.size_bytes < 128 * MIB or place.free_bytes < 64 * MIB:
        return failed(**values) if card.num_gpus else warned(**values)
    if card.num_gpus and (place.size_bytes < GIB or place.free_bytes < 512 * MIB):
        return warned(**values)
    return PASSED


def probe_ib_memlock(card: Card) -> Outcome:
    """Fails below 16 GiB if the node has an active RDMA port."""
    if card.facts is None:
        return unknown("this node reported no facts")
    if card.facts.environment.get("NCCL_IB_DISABLE") == "1":
        return skipped("NCCL_IB_DISABLE=1")
    if not _has_rdma(card.facts):
        return skipped("no active RDMA port")
    if "memlock_bytes" not in card.facts.limits:
        return unknown(card.facts.unread.get("limits", "the limit could not be read"))
    limit = card.facts.limits["memlock_bytes"]
    if limit is not None and limit < 16 * GIB:
        return failed(f"ulimit -l: {limit // KIB} KiB", limit=size_text(limit), wanted="RDMA needs unlimited")
    return PASSED


def survey_ib_memlock(cards: Sequence[Card]) -> Surveyed:
    """Without RDMA, warns about nodes whose limit is lower than that of most nodes."""
    known = [
        (card, math.inf if limit is None else float(limit))
        for card in cards
        if card.facts and "memlock_bytes" in card.facts.limits
        for limit in [card.facts.limits["memlock_bytes"]]
    ]
    if not known:
        return []
    usual, times = Counter(limit for _, limit in known).most_common(1)[0]
    if times * 2 <= len(known):
        return []
    wanted = f"{times} of {len(known)} nodes allow {size_text(usual)}"
    odd = [(card, limit) for card, limit in known if limit < usual and card.facts and not _has_rdma(card.facts)]
    return [
        ((card.host,), warned(f"ulimit -l: {int(limit) // KIB} KiB", limit=size_text(limit), wanted=wanted))
        for card, limit in odd
    ]


def probe_too_many_open_files(card: Card) -> Outcome:
    """Fails below 1024, the soft limit of most machines."""
    if card.facts is None:
        return unknown("this node reported no facts")
    if "nofile" not in card.facts.limits:
        return unknown(card.facts.unread.get("limits", "the limit could not be read"))
    limit = card.facts.limits["nofile"]
    if limit is None or limit >= 1024:
        return PASSED
    return failed(f"ulimit -n: {limit}", limit=limit)


def probe_cpu_starved(card: Card) -> Outcome:
    """Warns if the job may use fewer cores than it has workers with GPUs."""
    if card.facts is None or card.facts.num_cpus < 1:
        return unknown("the number of cores is unknown")
    # Workers without a GPU are what somebody asked for, on a laptop often more than cores.
    if card.num_gpus and card.facts.num_cpus < card.num_workers:
        return warned(cores=_cores(card.facts.num_cpus), workers=card.num_workers, others="")
    return PASSED


def survey_cpu_starved(cards: Sequence[Card]) -> Surveyed:
    """Warns if a node has fewer cores than most nodes, and fewer per worker."""
    known = [(card, facts.num_cpus) for card, facts in with_facts(cards) if facts.num_cpus > 0 and card.num_workers > 0]
    usual = most_common(cpus for _, cpus in known)
    if usual is None:
        return []
    shares = [cpus / card.num_workers for card, cpus in known if cpus == usual]
    others = f"; {len(shares)} of {len(known)} nodes have {usual}"
    return [
        ((card.host,), warned(cores=_cores(cpus), workers=card.num_workers, others=others))
        for card, cpus in known
        if cpus < usual and cpus / card.num_workers < min(shares) and probe_cpu_starved(card).status is Status.PASS
    ]


def _cores(number: int) -> str:
    return f"{number} core{'s' * (number != 1)}"


def _has_rdma(facts: Facts) -> bool:
    return any(port.state == "ACTIVE" for port in facts.rdma_ports)


# Can the job write to the run directory, TMPDIR and HOME, and is the run directory shared?

_WRITTEN_TO = ("run directory", "TMPDIR", "HOME")

FILES_OF_RANK, FILES_OF_NODE = 4, 12
"""That a job makes in its run directory, at least."""

FEW_INODES = 1000


def probe_disk_full(card: Card) -> Outcome:
    """Fails with less than 64 MiB free in the run directory or TMPDIR, or without inodes for this node's files in
    the run directory; warns below 1 GiB or 1000 inodes, or if HOME is full."""
    if card.facts is None:
        return unknown("this node reported no facts")
    places = [place for place in card.facts.places if place.purpose in _WRITTEN_TO]
    known = {place.purpose: place for place in places if place.free_bytes is not None}
    worst = PASSED
    for purpose in _WRITTEN_TO:
        place = known.get(purpose)
        if place is None or place.free_bytes is None:
            continue
        if is_full(place) and purpose != "HOME":
            return failed(str(place.problem), place=purpose, path=place.path, free=_free(place))
        values = {"place": purpose, "path": place.path, "free": _free(place)}
        if place.free_bytes < 64 * MIB and purpose != "HOME":
            return failed(**(values | {"free": f"{values['free']} of the required 64 MiB"}))
        if place.free_inodes is not None and place.free_inodes < FEW_INODES:
            values["free"] = f"{place.free_inodes} free inodes (df -i)"
            if purpose == "run directory" and place.free_inodes < FILES_OF_NODE + FILES_OF_RANK * card.num_workers:
                return failed(**values)
            worst = worst if worst is not PASSED else warned(**values)
        is_scarce = is_full(place) or place.free_bytes < (64 * MIB if purpose == "HOME" else GIB)
        if is_scarce and worst is PASSED:
            worst = warned(**values)
    if worst is not PASSED:
        return worst
    for place in places:
        if place.free_bytes is None:
            return unknown(f"{place.purpose}: {place.problem}")
    return PASSED if places else unknown(card.facts.unread.get("places", "no directory was checked"))


def probe_run_dir_not_shared(card: Card) -> Outcome:
    """Reports on which nodes the run directory could not be checked, which proves nothing."""
    place = _run_directory(card)
    if place is None:
        return skipped("no run directory was checked")
    if place.free_bytes is None and place.problem is not None:
        return unknown(f"{place.path}: {place.problem}")
    return PASSED


def survey_run_dir_not_shared(cards: Sequence[Card]) -> Surveyed:
    """Fails if a node does not see the leader's file in the run directory, or may not write there."""
    places = {card.host: _run_directory(card) for card in cards}
    leaders = [card for card in cards if card.came_by is None]
    leader = max(leaders or cards, key=lambda card: bool((place := places[card.host]) and place.nonce), default=None)
    theirs = places[leader.host] if leader else None
    if leader is None or theirs is None:
        return []
    found: list[tuple[tuple[str, ...], Outcome]] = []
    others = [host for host, place in places.items() if place and host != leader.host]
    blind = [host for host in others if (place := places[host]) and _is_elsewhere(place, theirs)]
    # Where nobody sees what the leader wrote, the leader is the odd one.
    is_leaders = len(blind) == len(others) > 1
    if is_leaders:
        alone = f"none of the {len(others)} other nodes sees the file that {leader.host} wrote"
        found.append(((leader.host,), failed(path=theirs.path, what=alone)))
    for card in cards:
        place = places[card.host]
        what = _objection(place, theirs, leader.host) if place else None
        if place and what and not (is_leaders and card.host in blind):
            found.append(((card.host,), failed(path=place.path, what=what)))
    return found


def is_full(place: JobDirectory) -> bool:
    """Whether the file system refused a block, by space or by quota."""
    return bool(re.search("No space left|quota exceeded", place.problem or "", re.IGNORECASE))


def _free(place: JobDirectory) -> str:
    if is_full(place):
        return "no space"
    return size_text(place.free_bytes or 0)


def _run_directory(card: Card) -> JobDirectory | None:
    return next((p for p in card.facts.places if p.purpose == "run directory"), None) if card.facts else None


def _is_elsewhere(place: JobDirectory, theirs: JobDirectory) -> bool:
    """Whether a node does not see what the leader wrote, though it could look."""
    if place.problem is not None and place.free_bytes is None:
        return "No such file" in place.problem
    return theirs.nonce is not None and place.nonce != theirs.nonce


def _objection(place: JobDirectory, theirs: JobDirectory, leader: str) -> str | None:
    """What speaks against this node's run directory, or None."""
    if is_full(place):
        return None  # AR005 says so
    if place.is_writable is False:
        return f"it is not writable: {place.problem or 'no permission'}"
    if place.problem is not None:
        return "the directory does not exist" if "No such file" in place.problem else None
    if theirs.nonce is None or place.nonce == theirs.nonce:
        return None
    if place.nonce is None:
        return f"the file that {leader} wrote is missing, so this is another directory of the same name"
    return f"it shows another file than {leader} wrote, so this is another directory of the same name"


# Is the node's clock right, and does its host name occur only once?


def probe_clock_skew(card: Card) -> Outcome:
    """Notes a clock that no time service sets; it never warns, because offsets are measured between nodes."""
    if card.facts is None:
        return unknown("this node reported no facts")
    if card.facts.is_clock_synchronised is None:
        return skipped("the kernel does not report whether the clock is synchronized")
    return PASSED if card.facts.is_clock_synchronised else Outcome(Status.PASS, "not synchronized (NTP)")


def survey_duplicate_host(cards: Sequence[Card]) -> Surveyed:
    """Fails if two machines with different addresses have equal names and boot ids; warns if only names are."""
    by_name: dict[str, list[Card]] = defaultdict(list)
    for card in cards:
        if card.facts and card.facts.host_name:
            others = by_name[card.facts.host_name]
            if not any(other.facts and is_same_machine(card.facts, other.facts) for other in others):
                others.append(card)
    found: list[tuple[tuple[str, ...], Outcome]] = []
    for name, same in by_name.items():
        if len(same) < 2:
            continue
        hosts = tuple(card.host for card in same)
        evidence = [f"{card.host}: boot id {card.facts.boot_id or 'unknown'}" for card in same if card.facts]
        identities = [_nccl_identity(card.facts) for card in same if card.facts]
        if None not in identities and len(set(identities)) < len(identities):
            outcome = failed(*evidence, count=len(same), name=name, what="NCCL treats them as one machine")
        else:
            what = "a boot id is unknown" if None in identities else "NCCL can tell them apart, logs cannot"
            outcome = warned(*evidence, count=len(same), name=name, what=what)
        found.append((hosts, outcome))
    return found


def _nccl_identity(facts: Facts) -> str | None:
    """What NCCL hashes to tell machines apart; None where it is not known."""
    if hostid := facts.environment.get("NCCL_HOSTID"):
        return hostid
    return facts.host_name + facts.boot_id if facts.boot_id else None


CHECKS = {
    "AR002": Checks(probe=probe_shm_too_small),
    "AR003": Checks(probe=probe_ib_memlock, survey=survey_ib_memlock),
    "AR004": Checks(probe=probe_too_many_open_files),
    "AR005": Checks(probe=probe_disk_full),
    "AR006": Checks(probe=probe_run_dir_not_shared, survey=survey_run_dir_not_shared),
    "AR007": Checks(probe=probe_clock_skew),
    "AR009": Checks(survey=survey_duplicate_host),
    "AR011": Checks(probe=probe_cpu_starved, survey=survey_cpu_starved),
}
