"""Are the limits, directories and identities of nodes judged right?"""

from __future__ import annotations

from typing import Any

import pytest

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause
from allranks.causes.outcome import Outcome
from allranks.causes.probes.cards import is_same_machine
from allranks.causes.probes.node import (
    probe_clock_skew,
    probe_cpu_starved,
    probe_disk_full,
    probe_ib_memlock,
    probe_run_dir_not_shared,
    probe_shm_too_small,
    probe_too_many_open_files,
    survey_cpu_starved,
    survey_duplicate_host,
    survey_ib_memlock,
    survey_run_dir_not_shared,
)
from allranks.model.card import Card, Facts, Interface, JobDirectory, RdmaPort
from allranks.model.finding import Status
from allranks.model.safe_text import size_text
from cards import make_card, probe

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ACTIVE = RdmaPort(device="mlx5_0", port=1, state="ACTIVE", phys_state="LinkUp", rate="400", link_layer="InfiniBand")


def card(
    host: str = "node01",
    *,
    num_workers: int = 1,
    num_gpus: int = 0,
    came_by: str | None = "10.0.0.1:29500",
    **facts: Any,
) -> Card:
    return make_card(host=host, num_workers=num_workers, num_gpus=num_gpus, came_by=came_by, facts=Facts(**facts))


def shown(cause: Cause, outcome: Outcome) -> str:
    return outcome.to_finding(cause, node="node01").message


@pytest.mark.parametrize(
    "cause",
    [
        find_cause("AR002"),
        find_cause("AR003"),
        find_cause("AR004"),
        find_cause("AR005"),
        find_cause("AR007"),
        find_cause("AR011"),
    ],
)
def test_without_facts_nothing_is_passed(cause: Cause) -> None:
    outcome = probe(cause, make_card())
    assert outcome is not None
    assert outcome.status is Status.UNKNOWN


# Limits


@pytest.mark.parametrize(
    ("size", "free", "status", "message"),
    [
        (64 * MIB, 64 * MIB, Status.FAIL, "/dev/shm has 64 MiB free of 64 MiB"),
        (8 * GIB, 20 * MIB, Status.FAIL, "/dev/shm has 20 MiB free of 8 GiB"),
        (512 * MIB, 500 * MIB, Status.WARN, "/dev/shm has 500 MiB free of 512 MiB"),
        (8 * GIB, 300 * MIB, Status.WARN, "/dev/shm has 300 MiB free of 8 GiB"),
        (GIB, GIB, Status.PASS, ""),
    ],
)
def test_shared_memory_is_judged_by_size_and_by_what_is_free(
    size: int, free: int, status: Status, message: str
) -> None:
    places = (JobDirectory(purpose="/dev/shm", path="/dev/shm", size_bytes=size, free_bytes=free),)
    outcome = probe_shm_too_small(card(num_gpus=1, places=places))
    assert outcome.status is status
    milder = {Status.FAIL: Status.WARN, Status.WARN: Status.PASS}.get(status, status)
    assert probe_shm_too_small(card(places=places)).status is milder
    if message:
        assert shown(find_cause("AR002"), outcome) == message


def test_shared_memory_that_did_not_answer_is_unknown() -> None:
    place = JobDirectory(purpose="/dev/shm", path="/dev/shm", problem="no answer within 5 s")
    outcome = probe_shm_too_small(card(places=(place,)))
    assert (outcome.status, outcome.note) == (Status.UNKNOWN, "no answer within 5 s")
    assert probe_shm_too_small(card(unread={"places": "no answer"})).note == "no answer"


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"limits": {"memlock_bytes": 8 * MIB}, "rdma_ports": (ACTIVE,)}, Status.FAIL),
        ({"limits": {"memlock_bytes": None}, "rdma_ports": (ACTIVE,)}, Status.PASS),
        ({"limits": {"memlock_bytes": 64 * GIB}, "rdma_ports": (ACTIVE,)}, Status.PASS),
        ({"limits": {"memlock_bytes": 64 * KIB}}, Status.SKIP),
        (
            {
                "limits": {"memlock_bytes": 64 * KIB},
                "rdma_ports": (ACTIVE,),
                "environment": {"NCCL_IB_DISABLE": "1"},
            },
            Status.SKIP,
        ),
        ({"rdma_ports": (ACTIVE,)}, Status.UNKNOWN),
    ],
)
def test_locked_memory_matters_with_rdma_only(facts: dict[str, Any], status: Status) -> None:
    assert probe_ib_memlock(card(**facts)).status is status


def test_a_node_with_less_locked_memory_than_most_is_warned_of() -> None:
    limits = {"a": 8 * MIB, "b": 8 * MIB, "c": 64 * KIB}
    cards = [card(host, limits={"memlock_bytes": limit}) for host, limit in limits.items()]
    [(hosts, outcome)] = survey_ib_memlock(cards)
    assert (hosts, outcome.status) == (("c",), Status.WARN)
    assert shown(find_cause("AR003"), outcome) == "a process may lock only 64 KiB of memory; 2 of 3 nodes allow 8 MiB"


@pytest.mark.parametrize(
    "limits", [[8 * MIB] * 3, [None, None, None], [8 * MIB, 64 * KIB], [64 * KIB, 64 * KIB, None], []]
)
def test_locked_memory_is_fine_where_no_node_is_below_most(limits: list[int | None]) -> None:
    cards = [card(f"n{index}", limits={"memlock_bytes": limit}) for index, limit in enumerate(limits)]
    assert list(survey_ib_memlock(cards)) == []


def test_unlimited_is_more_than_any_number() -> None:
    cards = [card("a", limits={"memlock_bytes": None}), card("b", limits={"memlock_bytes": None})]
    [(hosts, outcome)] = survey_ib_memlock([*cards, card("c", limits={"memlock_bytes": 8 * MIB}), make_card()])
    assert hosts == ("c",)
    assert "2 of 3 nodes allow unlimited" in shown(find_cause("AR003"), outcome)


@pytest.mark.parametrize(
    ("limit", "status"),
    [(256, Status.FAIL), (1023, Status.FAIL), (1024, Status.PASS), (None, Status.PASS)],
)
def test_open_files_are_judged_by_the_soft_limit(limit: int | None, status: Status) -> None:
    assert probe_too_many_open_files(card(limits={"nofile": limit})).status is status


def test_cores_are_held_against_workers() -> None:
    outcome = probe_cpu_starved(card(num_cpus=1, num_workers=8, num_gpus=8))
    assert outcome.status is Status.WARN
    assert shown(find_cause("AR011"), outcome) == "the node has 1 core for 8 workers"
    assert probe_cpu_starved(card(num_cpus=8, num_workers=8, num_gpus=8, load=99.0)).status is Status.PASS
    assert probe_cpu_starved(card(num_cpus=2, num_workers=6)).status is Status.PASS


@pytest.mark.parametrize(
    ("cpus", "num_workers", "culprits"),
    [
        ((64, 64, 64), 8, []),
        ((64, 64, 16), 8, ["n2"]),
        ((64, 64, 128), 8, []),
        ((64, 16, 32), 8, []),
        ((64, 16), 8, []),
        ((64, 64, 4), 8, []),
        ((64, 64, 0), 8, []),
    ],
)
def test_a_node_with_fewer_cores_than_most_is_warned_of(
    cpus: tuple[int, ...], num_workers: int, culprits: list[str]
) -> None:
    """Without a majority nobody is; with fewer cores than workers the node's own probe has said so."""
    cards = [card(f"n{index}", num_cpus=each, num_workers=num_workers, num_gpus=8) for index, each in enumerate(cpus)]
    found = survey_cpu_starved(cards)
    assert [host for hosts, _ in found for host in hosts] == culprits
    assert {outcome.status for _, outcome in found} <= {Status.WARN}


def test_cores_are_held_against_the_workers_that_share_them() -> None:
    usual = [card(host, num_cpus=64, num_workers=8) for host in "abde"]
    assert survey_cpu_starved([*usual, card("c", num_cpus=32, num_workers=4)]) == []
    assert survey_cpu_starved([*usual, card("c", num_cpus=64, num_workers=16)]) == []
    [(hosts, outcome)] = survey_cpu_starved([*usual, card("c", num_cpus=12, num_workers=4)])
    assert hosts == ("c",)
    assert shown(find_cause("AR011"), outcome) == "the node has 12 cores for 4 workers; 4 of 5 nodes have 64"


@pytest.mark.parametrize(
    ("size", "text"), [(64 * KIB, "64 KiB"), (1.5 * GIB, "1.5 GiB"), (0, "0 KiB"), (float("inf"), "unlimited")]
)
def test_sizes_read_well(size: float, text: str) -> None:
    assert size_text(size) == text


# Directories


def place(purpose: str = "TMPDIR", **values: Any) -> JobDirectory:
    return JobDirectory(purpose=purpose, path="/scratch", **{"free_bytes": 100 * GIB, "is_writable": True} | values)


@pytest.mark.parametrize(
    ("there", "status"),
    [
        (place(free_bytes=MIB), Status.FAIL),
        (place("run directory", free_bytes=0), Status.FAIL),
        (place(free_bytes=500 * MIB), Status.WARN),
        (place("HOME", free_bytes=MIB), Status.WARN),
        (place("HOME", free_bytes=500 * MIB), Status.PASS),
        (place("run directory", free_inodes=12), Status.FAIL),
        (place("run directory", free_inodes=999), Status.WARN),
        (place("run directory", free_inodes=1000), Status.PASS),
        (place(free_inodes=12), Status.WARN),
        (place(is_writable=False, problem="Disk quota exceeded"), Status.FAIL),
        (place("HOME", is_writable=False, problem="Disk quota exceeded"), Status.WARN),
        (place("/dev/shm", free_bytes=0), Status.UNKNOWN),
        (place(free_bytes=None, problem="no answer within 5 s"), Status.UNKNOWN),
        (place(), Status.PASS),
    ],
)
def test_a_full_disk_is_named_by_what_it_is_for(there: JobDirectory, status: Status) -> None:
    assert probe_disk_full(card(places=(there,))).status is status


def test_the_worst_disk_is_named() -> None:
    outcome = probe_disk_full(
        card(places=(place("TMPDIR", free_bytes=MIB), place("run directory", free_bytes=GIB - 1)))
    )
    assert shown(find_cause("AR005"), outcome) == "TMPDIR (/scratch) has 1 MiB of the required 64 MiB left"
    outcome = probe_disk_full(card(places=(place("run directory", free_inodes=12),)))
    assert shown(find_cause("AR005"), outcome) == "run directory (/scratch) has 12 free inodes (df -i) left"


def run_dir(**values: Any) -> dict[str, Any]:
    return {"places": (place("run directory", **values),)}


LEADER = card("leader", came_by=None, **run_dir(nonce="n1"))


@pytest.mark.parametrize(
    ("theirs", "what"),
    [
        (run_dir(nonce=None), "the file that leader wrote is missing, so this is another directory of the same name"),
        (run_dir(nonce="n0"), "it shows another file than leader wrote"),
        (run_dir(nonce="n1", is_writable=False, problem="Read-only file system"), "it is not writable: Read-only"),
        (
            run_dir(free_bytes=None, is_writable=None, problem="No such file or directory"),
            "the directory does not exist",
        ),
    ],
)
def test_a_node_that_does_not_share_the_run_directory_is_named(theirs: dict[str, Any], what: str) -> None:
    [(hosts, outcome)] = survey_run_dir_not_shared([card("a", **run_dir(nonce="n1")), LEADER, card("odd", **theirs)])
    assert (hosts, outcome.status) == (("odd",), Status.FAIL)
    assert what in shown(find_cause("AR006"), outcome)


def test_a_leader_whose_file_nobody_sees_is_the_odd_one() -> None:
    others = [card(host, **run_dir(nonce=None)) for host in "abc"]
    [(hosts, outcome)] = survey_run_dir_not_shared([LEADER, *others])
    assert hosts == ("leader",)
    assert "none of the 3 other nodes sees the file that leader wrote" in shown(find_cause("AR006"), outcome)


def test_a_leader_that_cannot_write_is_itself_the_culprit() -> None:
    leader = card("leader", came_by=None, **run_dir(nonce=None, is_writable=False, problem="Permission denied"))
    [(hosts, _)] = survey_run_dir_not_shared([leader, card("a", **run_dir(nonce=None))])
    assert hosts == ("leader",)


@pytest.mark.parametrize(
    "theirs",
    [
        run_dir(nonce="n1"),
        run_dir(free_bytes=None, is_writable=None, problem="no answer within 5 s"),
        run_dir(nonce="n1", is_writable=False, problem="No space left on device"),
        {},
    ],
)
def test_what_proves_nothing_about_sharing_is_no_finding(theirs: dict[str, Any]) -> None:
    assert list(survey_run_dir_not_shared([LEADER, card("a", **theirs)])) == []
    assert list(survey_run_dir_not_shared([])) == []


def test_a_run_directory_that_did_not_answer_is_unknown() -> None:
    silent = run_dir(free_bytes=None, is_writable=None, problem="no answer within 5 s")
    assert probe_run_dir_not_shared(card(**silent)).status is Status.UNKNOWN
    assert probe_run_dir_not_shared(card()).status is Status.SKIP


# Identity


def machine(
    host: str, *, name: str = "gpu", boot_id: str | None = "b1", address: str = "10.0.0.1", **facts: Any
) -> Card:
    nic = Interface(name="eth0", addresses=(address,), is_up=True)
    return card(host, host_name=name, boot_id=boot_id, interfaces=(nic,), **facts)


def test_cloned_machines_fail() -> None:
    [(hosts, outcome)] = survey_duplicate_host([machine("a"), machine("b", address="10.0.0.2"), machine("c", name="x")])
    assert (hosts, outcome.status) == (("a", "b"), Status.FAIL)
    assert shown(find_cause("AR009"), outcome) == "2 machines have the host name gpu: NCCL treats them as one machine"
    assert outcome.evidence == ("a: boot id b1", "b: boot id b1")


@pytest.mark.parametrize(
    "other",
    [
        machine("b", address="10.0.0.2", boot_id="b2"),
        machine("b", address="10.0.0.2", boot_id=None),
        machine("b", address="10.0.0.2", environment={"NCCL_HOSTID": "b"}),
    ],
)
def test_equal_names_alone_are_warned_of(other: Card) -> None:
    [(hosts, outcome)] = survey_duplicate_host([machine("a"), other])
    assert (hosts, outcome.status) == (("a", "b"), Status.WARN)


def test_two_agents_on_one_machine_are_fine() -> None:
    assert list(survey_duplicate_host([machine("a"), machine("b"), make_card()])) == []
    one, other = machine("a").facts, machine("b").facts
    assert one
    assert other
    assert is_same_machine(one, other)


def test_a_clock_that_nothing_sets_is_noted_and_no_alarm() -> None:
    outcome = probe_clock_skew(card(is_clock_synchronised=False))
    assert (outcome.status, outcome.note) == (Status.PASS, "not synchronized (NTP)")
    assert probe_clock_skew(card(is_clock_synchronised=True)).note == ""
    assert probe_clock_skew(card()).status is Status.SKIP
