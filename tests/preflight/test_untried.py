"""What a tester's own kernel says (an errno of connect) is named for what it is, and never as a firewall."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from seen import NO_ANSWER, PORTS, Results, around, card, change, judged, mesh, silence

from allranks.launch.check.check_outcome import choose_checks, judge_check
from allranks.launch.check.check_step import Held
from allranks.model.errors import Exit
from allranks.model.finding import Status
from allranks.preflight.judge import Judgement, Observations
from allranks.preflight.mesh.dial import describe_error
from allranks.preflight.symptoms import is_proven, own_errno

PROHIBITED = "refused on the way (ICMP: communication prohibited)"


def brief(judgement: Judgement) -> list[tuple[str, str | None, str, str]]:
    return [(each.cause_id, each.node, each.severity, each.confidence) for each in judgement.findings]


def say_of_all(reason: str, source: int, num_nodes: int = 6) -> Callable[[Results], None]:
    """No TCP connection of one node to the others, although datagrams come through."""
    pairs = [(source, target) for target in range(num_nodes) if target != source]

    def fault(results: Results) -> None:
        closed = dict.fromkeys(PORTS, reason)
        change(results, pairs, num_open=0, closed=closed, large_s=None, large_sent=0, large_back=0)
        change(results, [(source, 0)], store=reason)

    return fault


# errno -> the finding that it becomes on node03, which tries the others; and a word of its message or evidence.
CASES = {
    errno.EHOSTUNREACH: (("AR217", "node03", "warn", "certain"), "No route to host (EHOSTUNREACH)"),
    errno.ENETUNREACH: (("AR217", "node03", "warn", "certain"), "Network is unreachable (ENETUNREACH)"),
    errno.EADDRINUSE: (("AR217", "node03", "warn", "certain"), "net.ipv4.ip_local_port_range is 32768 to 60999"),
    errno.EADDRNOTAVAIL: (("AR217", "node03", "warn", "certain"), "net.ipv4.ip_local_port_range is 32768 to 60999"),
    errno.EMFILE: (("AR004", "node03", "warn", "certain"), "Too many open files (EMFILE)"),
    errno.ENFILE: (("AR217", "node03", "warn", "certain"), "Too many open files in system (ENFILE)"),
    errno.EPERM: (("AR217", "node03", "warn", "certain"), "Operation not permitted (EPERM)"),
    errno.EACCES: (("AR217", "node03", "warn", "certain"), "Permission denied (EACCES)"),
    errno.ENOBUFS: (("AR217", "node03", "warn", "certain"), "No buffer space available (ENOBUFS)"),
}


@pytest.mark.parametrize("number", CASES, ids=lambda number: errno.errorcode[number])
def test_an_errno_of_the_tester_is_named_for_what_it_is(number: int) -> None:
    row, words = CASES[number]
    judgement = judged(6, say_of_all(describe_error(number), 2))
    assert brief(judgement) == [row]
    [finding] = judgement.findings
    assert words in f"{finding.message} {finding.evidence}"
    assert judgement.exit_code == 0  # it is no proof that the job cannot run


@pytest.mark.parametrize("number", CASES, ids=lambda number: errno.errorcode[number])
def test_an_errno_on_the_leader_s_port_alone_is_no_firewall_either(number: int) -> None:
    def fault(results: Results) -> None:
        change(results, [(2, 0)], store=describe_error(number))

    assert brief(judged(6, fault)) == [CASES[number][0]]


@pytest.mark.parametrize("reason", ["refused", PROHIBITED, NO_ANSWER])
def test_a_refusal_and_a_silence_are_a_firewall_as_before(reason: str) -> None:
    def fault(results: Results) -> None:
        change(results, around(2, 6), num_open=2, closed=dict.fromkeys(PORTS[:6], reason))

    assert brief(judged(6, fault)) == [("AR206", "node03", "fail", "certain")]


def test_only_ports_that_are_kept_closed_are_counted_and_shown() -> None:
    def fault(results: Results) -> None:
        mixed = {PORTS[0]: NO_ANSWER, PORTS[1]: NO_ANSWER, PORTS[2]: describe_error(errno.EADDRINUSE)}
        change(results, around(2, 6), num_open=5, closed=mixed)

    first, *others = judged(6, fault).findings
    assert first.cause == "AR206 firewall-port"
    assert first.message.startswith("20 of 80 TCP ports ")
    assert first.evidence[0].seen == f"for example port {PORTS[0]}, {PORTS[1]}: {NO_ANSWER}; other packets pass"
    assert {each.cause for each in others} == {"AR217 local-connect-error"}


def test_no_route_and_nothing_that_comes_through_is_a_broken_link_with_the_kernel_s_words() -> None:
    def fault(results: Results) -> None:
        silence(results, around(3, 6))
        lost = dict.fromkeys(PORTS, describe_error(errno.EHOSTUNREACH))
        change(results, around(3, 6), closed=lost)

    judgement = judged(6, fault)
    assert brief(judgement) == [("AR210", "node04", "fail", "certain")]
    said = [each.seen for each in judgement.findings[0].evidence]
    assert "node01 to node04: No route to host (EHOSTUNREACH)" in said


def test_a_pair_that_was_not_tried_speaks_for_nobody() -> None:
    """The ports of node03 are filtered; that node04 could not try them is no test that passed."""

    def fault(results: Results) -> None:
        change(results, around(2, 6), num_open=2, closed=dict.fromkeys(PORTS[:6], NO_ANSWER))
        untried = dict.fromkeys(PORTS, describe_error(errno.EADDRINUSE))
        change(results, [(3, 2)], num_open=0, closed=untried)

    assert ("AR206", "node03", "fail", "certain") in brief(judged(6, fault))


def test_datagrams_that_the_kernel_did_not_send_are_said_too() -> None:
    def fault(results: Results) -> None:
        change(results, [(2, 1)], problem="cannot send from 10.0.0.9: Too many open files (EMFILE)")

    assert brief(judged(6, fault)) == [("AR004", "node03", "warn", "certain")]


def test_what_the_own_kernel_says_is_tried_again() -> None:
    [result] = [each for each in _after(say_of_all(describe_error(errno.EADDRINUSE), 1, 2)) if each.source == 1]
    assert not is_proven(result)


def test_a_check_could_not_tell_what_was_not_tried() -> None:
    results = tuple(_after(say_of_all(describe_error(errno.EADDRINUSE), 1, 2)))
    cards = {0: card(0), 1: card(1)}
    held = Held(
        seen=Observations(cards=cards, results=results), num_nodes=2, node_names=("node01", "node02"), store_port=29500
    )
    outcome = judge_check(held, choose_checks((), ()))
    found = {each.node: each for each in outcome.results if each.cause == "AR206 firewall-port"}
    assert (found["node01"].status, found["node02"].status) == (Status.PASS, Status.UNKNOWN)
    assert found["node02"].note == "not tested from here: Address already in use (EADDRINUSE)"
    assert outcome.exit_code == Exit.UNKNOWN


def _after(fault: Callable[[Results], None]) -> list:
    results = mesh(2)
    fault(results)
    return list(results.values())


def test_old_reasons_without_the_errno_s_name_are_read_too() -> None:
    assert own_errno("No route to host") == "EHOSTUNREACH"


# ---- real kernels: a network namespace of its own

TRY = """
import json, selectors, sys, time
sys.path[:0] = {path!r}
from test_mesh import ONE_PORT, Room, target_at, target_of
from allranks.model.pair import Effort
room = Room()
mesh = room.mesh()
{body}
print(json.dumps([result.num_open, list(result.closed.values())]))
"""


def in_namespace(body: str, *before: str) -> list:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("needs root and unshare")
    script = TRY.format(path=[str(Path(__file__).parent)], body=body)
    shell = "\n".join(["set -e", "ip link set lo up", *before, 'exec "$0" -c "$1"'])
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", shell, sys.executable, script],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.lab
def test_a_firewall_that_answers_by_icmp_refuses() -> None:
    rules = (
        "nft add table inet t",
        "nft 'add chain inet t in { type filter hook input priority 0; }'",
        "nft add rule inet t in tcp dport 4000 reject with icmp type host-prohibited",
    )
    body = "[result] = room.try_all(mesh, target_at(4000), effort=ONE_PORT)"
    assert in_namespace(body, *rules) == [0, [PROHIBITED]]


@pytest.mark.lab
def test_no_route_is_no_refusal() -> None:
    body = (
        "from msgspec.structs import replace\n"
        "target = replace(target_at(4000), address='192.0.2.9')\n"
        "[result] = room.try_all(mesh, target, effort=ONE_PORT, own_address=None)"
    )
    assert in_namespace(body) == [0, ["Network is unreachable (ENETUNREACH)"]]
    unreachable = "ip route add unreachable 192.0.2.9"
    assert in_namespace(body, unreachable) == [0, ["No route to host (EHOSTUNREACH)"]]


@pytest.mark.lab
def test_ten_local_ports_are_enough_for_eight_connections_to_each_of_three_nodes() -> None:
    """Listeners of the tests have ports of their own here; connections to different ports share one."""
    body = (
        "others = [target_of(room.mesh(), index) for index in (1, 2, 3)]\n"
        "open('/proc/sys/net/ipv4/ip_local_port_range', 'w').write('50000 50009')\n"
        "results = room.try_all(mesh, *others)\n"
        "result = min(results, key=lambda each: each.num_open)"
    )
    assert in_namespace(body, "echo 40000 49999 > /proc/sys/net/ipv4/ip_local_port_range") == [8, []]


@pytest.mark.lab
def test_no_free_local_port_is_said() -> None:
    body = (
        "import socket\n"
        "other = target_of(room.mesh())\n"
        "open('/proc/sys/net/ipv4/ip_local_port_range', 'w').write('50000 50001')\n"
        "held = [socket.create_server(('127.0.0.1', port)) for port in (50000, 50001)]\n"
        "[result] = room.try_all(mesh, other, effort=Effort(num_datagrams=0, large_bytes=0, has_mtu_probe=False))"
    )
    num_open, reasons = in_namespace(body, "echo 40000 49999 > /proc/sys/net/ipv4/ip_local_port_range")
    assert (num_open, set(reasons)) == (0, {"Cannot assign requested address (EADDRNOTAVAIL)"})
