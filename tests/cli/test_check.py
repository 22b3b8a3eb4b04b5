"""`allranks check` through the command line; the nodes are this machine, `srun` is faked, all else is real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fake_srun import FakeStep

from allranks.launch.check.check_outcome import CheckOutcome, checks, choose_checks, judge_check, nodes_to_exclude
from allranks.launch.check.check_step import Held, StepHeard, sum_up
from allranks.launch.check.where import Asked, choose_in_cluster, choose_in_job
from allranks.model.card import Card, Facts, Interface, TestPorts
from allranks.model.errors import AllranksError, UsageError
from allranks.model.finding import Confidence, Finding, Severity, Status
from allranks.model.pair import PairResult
from allranks.preflight.judge import Observations
from cards import make_card
from conftest import Allranks, allranks_command, clean_env

# All "nodes" are one machine here, and say so.
ONE_MACHINE = ("--ignore", "AR009,AR005,AR007,AR207,AR212,AR213")


ENOUGH_S = "12"
"""Until a node counts as silent: a slow and busy machine needs seconds to start the others."""
ALONE_S = "4"
"""The same where only the first node speaks, which waits for the others once it has started."""


@pytest.fixture
def step(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> FakeStep:
    # A port of its own: other tests lead their jobs on this machine, too.
    (tmp_path / "cluster.toml").write_text(f"[network]\nport = {21000 + os.getpid() % 8000}\n")
    return FakeStep(tmp_path_factory.mktemp("slurm") / "bin")


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".allranks")]


def test_this_machine_without_a_scheduler(allranks: Allranks, tmp_path: Path) -> None:
    result = allranks("check", "--ignore", "AR005", env={"PATH": "/usr/bin:/bin"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "one node alone" in result.stdout
    assert ": no problem found, " in result.stdout.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_deep_check_of_one_machine_has_nothing_to_pair(allranks: Allranks) -> None:
    result = allranks("check", "--deep", "--select", "AR403", env={"PATH": "/usr/bin:/bin"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 check skipped on" in result.stdout
    assert result.stderr == "allranks: --deep: no collectives were run, because they need at least two nodes\n"


def test_a_deep_check_is_no_part_of_a_step(allranks: Allranks) -> None:
    task = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n1,n2", "SLURM_PROCID": "0", "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0", "SLURM_GTIDS": "0", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    result = allranks("check", "--deep", env=task)
    assert (result.returncode, result.stderr) == (
        2,
        "error: --deep starts its own job steps: run it in the allocation, without srun\n",
    )


def test_all_nodes_and_pairs_in_one_step(allranks: Allranks, step: FakeStep, tmp_path: Path) -> None:
    result = allranks("check", "--nodes", "3", *ONE_MACHINE, env=step.env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "network: " in result.stdout
    assert "checks passed on 3 nodes" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("3 nodes: no problem found, ")
    assert "Welcome" not in result.stdout
    flags = step.call["flags"]
    assert isinstance(flags, dict)
    assert (flags["nodes"], flags["ntasks-per-node"], "overlap" in flags) == ("3", "1", False)
    assert left_behind(tmp_path) == []


def test_json_has_nodes_results_findings_and_exit_code(allranks: Allranks, step: FakeStep) -> None:
    result = allranks("check", "--nodelist", "n1,n2", "--json", *ONE_MACHINE, env=step.env)
    found = json.loads(result.stdout)
    assert found["nodes"] == [{"name": "n1", "answered": True}, {"name": "n2", "answered": True}]
    assert {(each["node"], each["status"]) for each in found["results"] if each["cause"] == "AR204 mtu-blackhole"} == {
        ("n1", "pass"),
        ("n2", "pass"),
    }
    assert (found["findings"], found["exit_code"], result.returncode) == ([], 0, 0)
    assert 0 < found["elapsed_s"] < 60


def test_inside_an_allocation_it_is_an_overlapping_step(allranks: Allranks, step: FakeStep) -> None:
    job = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "99", "SLURM_PROCID": "0"}
    result = allranks("check", "--json", *ONE_MACHINE, env=step.env | job)
    assert result.returncode == 0, result.stderr
    flags = step.call["flags"]
    assert isinstance(flags, dict)
    assert (flags["jobid"], flags["overlap"], flags["nodelist"], flags["nodes"]) == ("12", "", "n1,n2", "2")


def test_a_silent_node_is_the_finding_and_a_deep_check_stops_there(
    allranks: Allranks, step: FakeStep, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    silent = step.env | {"FAKE_SILENT": "n2"}
    result = allranks("check", "--nodes", "3", "--timeout", ENOUGH_S, "--deep", *ONE_MACHINE, env=silent)
    assert result.returncode == 1
    assert "--deep: no collectives were run, because the check found a problem that would stop a job" in result.stderr
    assert "AR403" not in result.stdout
    assert "AR001 node-silent   n2" in result.stdout
    assert f"the node's agent did not join within {ENOUGH_S} s; 2 of 3 nodes joined" in result.stdout
    assert re.search(r"still waiting for n2 after \d+ s; 2 of 3 nodes have answered", result.stderr)
    assert result.stdout.splitlines()[-1].startswith("3 nodes: 1 problem that would stop a job (n2); ")
    assert time.monotonic() - began_s < 55
    assert left_behind(tmp_path) == []
    assert not Path("/proc", str(step.call["pid"])).exists()


def test_a_silent_first_node_is_named_once_and_the_rest_judged(allranks: Allranks, step: FakeStep) -> None:
    silent = step.env | {"FAKE_SILENT": "n1"}
    result = allranks("check", "--nodes", "3", "--timeout", ENOUGH_S, "--json", *ONE_MACHINE, env=silent)
    found = json.loads(result.stdout)
    assert [(each["cause"], each["node"]) for each in found["findings"]] == [("AR001 node-silent", "n1")]
    assert {each["node"] for each in found["results"] if each["status"] == "pass"} == {"n2", "n3"}
    assert {each["status"] for each in found["results"] if each["cause"] == "AR204 mtu-blackhole"} == {"unknown"}


def test_the_exclude_list_is_names_alone(allranks: Allranks, step: FakeStep) -> None:
    silent = step.env | {"FAKE_SILENT": "n2,n3"}
    result = allranks("check", "--nodes", "3", "--timeout", ALONE_S, "--exclude-list", *ONE_MACHINE, env=silent)
    assert (result.stdout, result.returncode) == ("n[2-3]\n", 1)


def test_without_a_place_to_write_it_works_all_the_same(step: FakeStep) -> None:
    result = subprocess.run(
        allranks_command("check", "--nodelist", "localhost", *ONE_MACHINE),
        cwd="/proc",
        env=clean_env(os.environ, **step.env, HOME="/proc"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_torch_is_not_imported_on_any_node(allranks: Allranks, step: FakeStep, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    env = step.env | {"PYTHONPATH": str(tmp_path)}
    result = allranks("check", "--nodes", "2", *ONE_MACHINE, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "torch was imported" not in result.stderr


def test_the_queue_is_said_and_left_at_its_deadline(allranks: Allranks, step: FakeStep, tmp_path: Path) -> None:
    result = allranks("check", "--nodes", "3", "--queue-timeout", "5", env=step.env | {"FAKE_QUEUE": "1"})
    assert result.returncode == 3
    *waiting, last = result.stderr.splitlines()
    reason = r"\(SLURM: job 7 queued and waiting for resources\)"
    assert re.fullmatch(rf"allranks: still waiting for SLURM to start 3 nodes after \d s {reason}", waiting[-1])
    assert last == (
        "error: SLURM has not started 3 nodes within 5 s (SLURM: job 7 queued and waiting for resources); "
        "wait longer with --queue-timeout DURATION, or look at squeue and sinfo -R"
    )
    assert left_behind(tmp_path) == []
    assert not Path("/proc", str(step.call["pid"])).exists()


def test_ctrl_c_ends_the_step_and_leaves_nothing(step: FakeStep, tmp_path: Path) -> None:
    process = subprocess.Popen(
        allranks_command("check", "--nodes", "3"),
        cwd=tmp_path,
        env=clean_env(os.environ, **step.env, FAKE_QUEUE="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "for SLURM to start 3 nodes" in process.stderr.readline()
    assert len(left_behind(tmp_path)) == 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert left_behind(tmp_path) == []
    assert not Path("/proc", str(step.call["pid"])).exists()


BAD = {
    ("--select", "AR999"): 'no cause "AR999": expected an id, a name or an alias; allranks explain lists them',
    ("--ignore", "mtu"): 'no cause "mtu": did you mean "mtu-blackhole"? ',
    (
        "--select",
        "AR590",
    ): "allranks check does not test for AR590 user-code-error; allranks check --list prints all its checks",
    ("--select", "AR403"): "--select AR403: this check runs only with --deep",
    ("--select", "AR2", "--ignore", "AR2"): "--select and --ignore leave no check to run; ",
    ("--exclude-list", "--json"): "--exclude-list prints only names of nodes: remove --json and --verbose",
    ("--nodes", "1", "--nodelist", "n[1-2]"): "check: --nodes 1 is less than --nodelist n[1-2] (2 nodes)",
    ("--nodelist", "n1,n1"): "check: --nodelist n1,n1: expected each node once",
    ("--nodelist", "n[1-"): "host list ",
    ("--partition", "nope"): "check: --partition nope: SLURM has no such partition; sinfo lists them",
}


@pytest.mark.parametrize("flags", BAD, ids=" ".join)
def test_bad_input_is_one_line(allranks: Allranks, step: FakeStep, flags: tuple[str, ...]) -> None:
    result = allranks("check", *flags, env=step.env)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {BAD[flags]}")
    assert result.stderr.count("\n") == 1


def test_a_node_that_slurm_does_not_know_is_its_one_line(allranks: Allranks, step: FakeStep) -> None:
    result = allranks("check", "--nodelist", "n9", env=step.env | {"FAKE_REFUSAL": "Invalid node name specified"})
    assert (result.returncode, result.stderr) == (
        2,
        "error: n9: SLURM says: Invalid node name specified; sinfo -N lists the nodes\n",
    )


def test_without_srun_nodes_cannot_be_reached(allranks: Allranks, tmp_path: Path) -> None:
    result = allranks("check", "--nodes", "2", env={"PATH": str(tmp_path)})
    assert (result.returncode, result.stderr) == (
        78,
        "error: srun: not found on this machine; SLURM's commands are needed: load the slurm module, or log in to "
        "a login node of the cluster\n",
    )


def test_the_list_says_how_each_check_looks(allranks: Allranks) -> None:
    result = allranks("check", "--list", "--select", "AR001,AR002,AR205,AR204,AR403,AR505")
    ways = {line.split()[0]: line.rpartition("; ")[2] for line in result.stdout.splitlines()}
    assert ways == {
        "AR001": "by the roll call: a node does not answer",
        "AR002": "on each node",
        "AR204": "between pairs of nodes",
        "AR205": "over all nodes together",
        "AR403": "by --deep: Gloo between pairs of nodes",
        "AR505": "compared on all nodes",
    }
    found = json.loads(allranks("check", "--list", "--json").stdout)
    assert {each["id"] for each in found} == set(checks())
    assert "AR590" not in checks()


# --- What it is made of: pure


def test_flags_and_allocation_must_agree() -> None:
    nodes = ["n1", "n2", "n3"]
    assert choose_in_job(Asked(), "12", nodes, verb="check").names == ("n1", "n2", "n3")
    assert choose_in_job(Asked(nodes=2), "12", nodes, verb="check").names == ("n1", "n2")
    assert choose_in_job(Asked(nodelist="n3"), "12", nodes, verb="check").names == ("n3",)
    for asked, said in (
        (Asked(nodelist="n[3-5]"), r"inside job 12, which has n\[1-3\], not n\[4-5\] \(--nodelist\)"),
        (Asked(nodes=4), "expected at most 3 for --nodes, got 4"),
        (Asked(partition="main"), "remove --partition"),
        (Asked(nodes=1, nodelist="n[1-2]"), "disagree"),
    ):
        with pytest.raises(UsageError, match=said):
            choose_in_job(asked, "12", nodes, verb="check")


def test_a_partition_alone_means_its_idle_nodes() -> None:
    place = choose_in_cluster(Asked(nodes=4, nodelist="n1", partition="main"), verb="check", list_idle=lambda _: ())
    assert (place.num_nodes, place.names, place.pinned, place.partition) == (4, (), ("n1",), "main")
    assert place.describe() == "4 nodes of partition main"


def test_an_order_of_another_version_is_refused(allranks: Allranks) -> None:
    result = allranks("check", "--member", env={"ALLRANKS_CHECK": "bm9uZQ=="})
    assert (result.returncode, result.stderr) == (
        2,
        "error: ALLRANKS_CHECK is not from this version of allranks; unset it\n",
    )


def card(host: str, index: int, **more: object) -> Card:
    interfaces = (Interface("eth0", (f"10.0.0.{index + 1}",), is_up=True, networks=("10.0.0.0/24",), mtu=1500),)
    facts = Facts(host_name=host, boot_id=f"boot-{index}", interfaces=interfaces, num_cpus=8)
    fields = {
        "pid": 7, "data_interface": "eth0", "data_address": f"10.0.0.{index + 1}",
        "test_ports": TestPorts(tcp=(40000,), udp=40001), "facts": facts,
    }  # fmt: skip
    return make_card(index + 1, host=host, **(fields | more))


def good_pair(source: int, target: int) -> PairResult:
    return PairResult(
        source=source, target=target, num_open=8, large_s=0.01, large_sent=49152, large_back=49152, datagrams_sent=40,
        datagrams={1500: True}, rtt_s=0.001, clock_offset_s=0.0,
    )  # fmt: skip


def held(*hosts: str, **more: object) -> Held:
    cards = {index: card(host, index) for index, host in enumerate(hosts)}
    results = tuple(good_pair(a, b) for a in cards for b in cards if a != b)
    seen = Observations(**({"cards": cards, "results": results} | more))  # type: ignore[arg-type]
    return Held(seen=seen, num_nodes=max(3, len(hosts)), node_names=("n1", "n2", "n3"))


def test_a_check_that_nobody_made_is_no_pass() -> None:
    outcome = judge_check(held("n1", "n2", "n3", results=()), choose_checks(["AR204"], []))
    assert {(each.cause, each.status) for each in outcome.results if each.cause > "AR1"} >= {
        ("AR204 mtu-blackhole", Status.UNKNOWN)
    }
    assert outcome.exit_code == 3


def test_selection_is_what_is_said_and_who_is_missing() -> None:
    outcome = judge_check(held("n1", "n2", missing=(2,), waited_s=5.0), choose_checks(["AR204"], []))
    assert {each.cause_id for each in outcome.results} == {"AR001", "AR012", "AR204", "AR512"}
    assert [(each.cause, each.node) for each in outcome.findings] == [("AR001 node-silent", "n3")]
    assert outcome.nodes == ("n1", "n2", "n3")
    assert outcome.exit_code == 1
    assert judge_check(held("n1", "n2", missing=(2,)), choose_checks(["AR204"], []), ignored=["AR001"]).exit_code == 0


def test_a_crashed_tester_is_a_crash_and_could_not_be_told() -> None:
    pairs = (good_pair(0, 1), PairResult(source=1, target=0, problem="the tester crashed: ValueError"))
    outcome = judge_check(held("n1", "n2", "n3", results=pairs), choose_checks(["AR206"], []))
    statuses = {each.node: each.status for each in outcome.results if each.cause == "AR206 firewall-port"}
    assert statuses == {"n1": Status.PASS, "n2": Status.CRASH, "n3": Status.UNKNOWN}


def finding(node: str, confidence: Confidence = Confidence.CERTAIN, severity: Severity = Severity.FAIL) -> Finding:
    return Finding(cause="AR210 link-down", severity=severity, confidence=confidence, node=node, message="cut")


def test_only_nodes_that_are_at_fault_are_excluded() -> None:
    found = (
        finding("n[2-3]"),
        finding("n1 <-> n4"),
        finding("n1 or n5", Confidence.UNDECIDED),
        finding("n5", severity=Severity.WARN),
    )
    outcome = CheckOutcome(nodes=("n1", "n2", "n3", "n4", "n5"), results=(), findings=found, exit_code=1)
    assert nodes_to_exclude(outcome) == (
        ["n2", "n3"],
        ["AR210 link-down (n1 <-> n4) excludes no node: cut", "AR210 link-down (n1 or n5) excludes no node: cut"],
    )
    everybody = CheckOutcome(nodes=("n1",), results=(), findings=(finding("n1"),), exit_code=1)
    assert nodes_to_exclude(everybody) == (
        ["n1"],
        ["all checked nodes are at fault: excluding nodes does not cure it"],
    )


def test_a_node_that_speaks_through_slurm_alone_is_cut_off_and_not_silent() -> None:
    lost = card("n3", 2, problem="no leader of job 7 within 5 s", problem_exit=75)
    heard = StepHeard(
        node_names=("n1", "n2", "n3"),
        here={0, 1, 2},
        cards={2: lost},
        held=held("n1", "n2", missing=(2,)),
    )
    outcome = judge_check(sum_up(heard, 3, waited_s=5.0), choose_checks(["AR201"], []))
    assert [(each.cause, each.node, each.message) for each in outcome.findings] == [
        ("AR201 master-unreachable", "n3", "n3 answers through SLURM but does not reach the leader on n1")
    ]


def test_a_leader_whom_nobody_reaches_is_the_one() -> None:
    lost = {i: card(f"n{i + 1}", i, problem="no leader", problem_exit=75) for i in (1, 2)}
    heard = StepHeard(node_names=("n1", "n2", "n3"), here={0, 1, 2}, cards=lost, held=held("n1", missing=(1, 2)))
    outcome = judge_check(sum_up(heard, 3, waited_s=5.0), choose_checks(["AR201"], []))
    assert [(each.node, each.message) for each in outcome.findings] == [
        ("n1", "2 nodes answer through SLURM but do not reach the leader on n1")
    ]


def test_a_leader_that_dies_is_said_once() -> None:
    lost = {i: card(f"n{i + 1}", i, problem="no leader", problem_exit=75) for i in (1, 2)}
    heard = StepHeard(node_names=("n1", "n2", "n3"), here={0, 1, 2}, cards=lost, words=["srun: error: n1: killed"])
    outcome = judge_check(sum_up(heard, 3, waited_s=5.0), choose_checks(["AR201"], []))
    assert [(each.cause, each.node) for each in outcome.findings if each.severity is Severity.FAIL] == [
        ("AR012 node-failure", "n1")
    ]


def test_nobody_at_all_is_could_not_tell() -> None:
    with pytest.raises(AllranksError, match="no node answered"):
        sum_up(StepHeard(here={1}), 3, waited_s=5.0)
