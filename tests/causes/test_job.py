"""Are differences in environment and software, and odd timeouts, judged right?"""

from __future__ import annotations

from typing import Any

import pytest

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause
from allranks.causes.outcome import failed
from allranks.causes.probes.job import (
    collect_env_drift,
    collect_nccl_version_mismatch,
    collect_software_differs,
    probe_timeout_by_accident,
    weigh_env_drift,
    weigh_software_differs,
)
from allranks.model.card import Card, Facts
from allranks.model.finding import Severity, Status
from cards import collect, make_card


def card(**facts: Any) -> Card:
    return make_card(facts=Facts(**facts))


NO_FACTS = make_card()


@pytest.mark.parametrize("cause", [find_cause("AR503"), find_cause("AR504"), find_cause("AR505")])
def test_without_facts_nothing_is_compared(cause: Cause) -> None:
    assert collect(cause, NO_FACTS) is None


def test_variables_of_the_node_itself_are_not_compared() -> None:
    environment = {
        "NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "ens1f1", "GLOO_SOCKET_IFNAME": "ens1f1", "NCCL_HOSTID": "a",
        "CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "0", "UCX_NET_DEVICES": "mlx5_0:1", "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": "/tmp/a", "TORCH_EXTENSIONS_DIR": "/tmp/a", "TORCH_HOME": "/a", "FI_OPX_IFACE": "a",
        "LD_LIBRARY_PATH": "/opt/lib",
    }  # fmt: skip
    assert collect_env_drift(card(environment=environment)) == {"NCCL_ALGO": "Ring", "LD_LIBRARY_PATH": "/opt/lib"}


def test_configuration_files_of_nccl_count_as_environment() -> None:
    assert collect_env_drift(card(nccl_conf="0123456789abcdef")) == {"NCCL configuration files": "sha256 0123456789ab"}
    assert collect_env_drift(card(unread={"nccl_conf": "Permission denied"})) == {"NCCL configuration files": None}
    assert collect_env_drift(card(unread={"environment": "too late"})) is None


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("NCCL_ALGO", Severity.FAIL),
        ("NCCL_PROTO", Severity.FAIL),
        ("NCCL_IB_DISABLE", Severity.FAIL),
        ("NCCL_NET", Severity.FAIL),
        ("NCCL_NET_PLUGIN", Severity.FAIL),
        ("NCCL_P2P_DISABLE", Severity.FAIL),
        ("NCCL_SHM_DISABLE", Severity.FAIL),
        ("NCCL_CROSS_NIC", Severity.FAIL),
        ("GLOO_DEVICE_TRANSPORT", Severity.FAIL),
        ("NCCL configuration files", Severity.FAIL),
        ("--compress", Severity.FAIL),
        ("--bucket-mb", Severity.FAIL),
        ("NCCL_IB_HCA", Severity.WARN),
        ("NCCL_IB_GID_INDEX", Severity.WARN),
        ("LD_LIBRARY_PATH", Severity.WARN),
        ("OMP_NUM_THREADS", Severity.WARN),
    ],
)
def test_what_both_ends_must_agree_on_fails(name: str, severity: Severity) -> None:
    assert weigh_env_drift(name) is severity


@pytest.mark.parametrize(
    ("facts", "values"),
    [
        ({"nccl_version": "2.28.9"}, {"NCCL": "2.28.9", "NCCL network plugin": "none"}),
        ({}, {"NCCL": "none", "NCCL network plugin": "none"}),
        (
            {"torch_cuda": "13.0", "net_plugin": "/opt/libnccl-net.so"},
            {"NCCL": None, "NCCL network plugin": "/opt/libnccl-net.so"},
        ),
        ({"unread": {"nccl_version": "?", "net_plugin": "?"}}, {"NCCL": None, "NCCL network plugin": None}),
    ],
)
def test_nccl_that_cannot_be_seen_is_not_taken_for_none(facts: dict[str, Any], values: dict[str, str | None]) -> None:
    assert collect_nccl_version_mismatch(card(**facts)) == values


def test_software_is_compared_by_what_breaks_a_group() -> None:
    values = collect_software_differs(
        card(
            python_version="3.11.2",
            allranks_version="0.1",
            glibc_version="2.36",
            kernel="6.1",
            torch_cuda="13.0",
            packages={"torch": "2.13.0", "numpy": "2.1", "nvidia-nccl-cu13": "2.28.9"},
        )
    )
    assert values == {
        "torch": "2.13.0",
        "CUDA of torch": "13.0",
        "Python": "3.11",
        "allranks": "0.1",
        "patch level of Python": "3.11.2",
        "glibc": "2.36",
        "numpy": "2.1",
    }
    fails = [key for key in values if weigh_software_differs(key) is Severity.FAIL]
    assert fails == ["torch", "CUDA of torch", "Python", "allranks"]


def test_a_node_without_torch_is_named_once() -> None:
    values = collect_software_differs(card(python_version="3.11.2"))
    assert values is not None
    assert (values["torch"], values["CUDA of torch"]) == ("not installed", None)
    assert collect_software_differs(card(unread={"packages": "no answer"})) is None


def test_a_difference_reads_well() -> None:
    outcome = failed(what="torch", usual="5 of 6 nodes have 2.13.0", odd="node04 has 2.4.0")
    finding = outcome.to_finding(find_cause("AR505"), node="node04")
    assert finding.message == "torch differs: 5 of 6 nodes have 2.13.0; node04 has 2.4.0"
    assert finding.fix == (
        "use one environment on all nodes; on node04: which python, and check that its file system is mounted (findmnt)"
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NCCL_TIMEOUT", "1800", "NCCL_TIMEOUT=1800 has no effect: no program reads it"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "TORCH_NCCL_BLOCKING_WAIT=1 blocks the CPU"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "switches error handling off"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "30", "ends ranks that compile or save a checkpoint for longer"),
        ("NCCL_BLOCKING_WAIT", "1", "is the old name of TORCH_NCCL_BLOCKING_WAIT"),
    ],
)
def test_timeouts_that_do_something_else_are_warned_of(name: str, value: str, said: str) -> None:
    outcome = probe_timeout_by_accident(card(environment={name: value}))
    assert outcome.status is Status.WARN
    finding = outcome.to_finding(find_cause("AR510"), node="node01")
    assert said in finding.message
    assert finding.fix
    assert finding.fix.startswith(f"unset {name};")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600"},
        {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "soon"},
    ],
)
def test_usual_timeouts_pass(environment: dict[str, str]) -> None:
    assert probe_timeout_by_accident(card(environment=environment)).status is Status.PASS


@pytest.mark.parametrize("cause", [find_cause("AR501"), find_cause("AR502"), find_cause("AR512")])
def test_what_the_launcher_says_becomes_the_message(cause: Cause) -> None:
    finding = failed(what="train.py: no such file here").to_finding(cause, node="node03")
    assert finding.message == "train.py: no such file here"
    assert finding.cause == cause.label
