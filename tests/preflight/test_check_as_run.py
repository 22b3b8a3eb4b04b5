"""`allranks check` and `allranks run` answer alike: the same facts go through what judges them in each of the two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from seen import card as sound_card
from seen import mesh, terms
from test_fuzz import CARDS

from allranks.causes.book import all_causes
from allranks.causes.cause import Cause
from allranks.causes.probes import checks_of
from allranks.host.node import NodeFacts
from allranks.launch.check.check_outcome import checks, choose_checks, judge_check
from allranks.launch.check.check_step import NOWHERE, Held, hold_alone, look_here
from allranks.launch.plan import Request, plan_job
from allranks.model.card import Facts, Gid, Gpu, Interface, JobDirectory, RdmaPort
from allranks.model.cluster import Cluster, NetworkTable, Node
from allranks.model.errors import AllranksError, Exit
from allranks.model.finding import Finding, Severity
from allranks.model.identity import world_from_env
from allranks.model.world import Launcher
from allranks.preflight.applicant import Applicant
from allranks.preflight.called import Called
from allranks.preflight.judge import Observations, judge
from allranks.preflight.node_entry import Entry
from allranks.report.rundir import RunDir

LO = Interface("lo", ("127.0.0.1",), is_up=True, networks=("127.0.0.0/8",), kind="loopback")
ETH = Interface("eno1", ("10.1.0.3",), is_up=True, networks=("10.1.0.0/16",))
DOWN = Interface("ens1", ("192.168.20.3",), is_up=False, networks=("192.168.20.0/24",), has_carrier=False)
FREE = 1 << 40
SHM = "/dev/shm"
GPU = Gpu(
    index=0, uuid="GPU-0", name="NVIDIA H100 80GB HBM3", pci_bus="00000000:18:00.0", memory_total_mib=81559,
    memory_used_mib=4, fabric_state="Completed", fabric_status="Success",
)  # fmt: skip
ROCE = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "phys_state": "LinkUp", "rate": "400"}
NO_V2 = (Gid(index=0, kind="IB/RoCE v1", gid="0000:0000:0000:0000:0000:ffff:c0a8:1403", netdev="eno1"),)


def any_place(purpose: str, free_bytes: int = FREE) -> JobDirectory:
    return JobDirectory(purpose=purpose, path=purpose, size_bytes=FREE, free_bytes=free_bytes)


def gpu(**values: Any) -> Gpu:
    return Gpu(**{name: getattr(GPU, name) for name in GPU.__struct_fields__} | values)


def rdma(**values: Any) -> dict[str, Any]:
    ports = (RdmaPort(**{**ROCE, "link_layer": "InfiniBand", "has_uverbs": True} | values),)
    return {"gpus": (GPU,), "rdma_ports": ports, "limits": {"nofile": 65536, "memlock_bytes": None}}


TWO = (GPU, gpu(index=1, uuid="GPU-1"))
IN_NO_SUBNET = Cluster(network=NetworkTable(data="192.168.77.0/24", port=0))
# For each cause that both look for on one machine: the facts that show it, or the cluster.toml that does not fit.
SHOWN: dict[str, dict[str, Any] | Cluster] = {
    "AR002": {"gpus": (GPU,), "places": (any_place(SHM, 1 << 20),)},
    "AR003": rdma() | {"limits": {"nofile": 65536, "memlock_bytes": 65536}},
    "AR004": {"limits": {"nofile": 256}},
    "AR005": {"places": (any_place("TMPDIR", 0),)},
    "AR011": {"gpus": TWO, "num_cpus": 1},
    "AR101": {"gpus": (GPU,), "fabric_manager": "inactive"},
    "AR102": {"gpus": (GPU,), "cuda_init": 803},
    "AR103": {"gpus": (GPU,)},  # SLURM promised two
    "AR104": {"gpus": (gpu(processes=("python3 (pid 812)",), memory_used_mib=60000),)},
    "AR105": {"gpus": (gpu(uncorrected_ecc=2),)},
    "AR107": {"gpus": TWO, "environment": {"CUDA_VISIBLE_DEVICES": "0,0"}},
    "AR108": {"gpus": TWO, "environment": {"CUDA_VISIBLE_DEVICES": "0"}},
    "AR112": {"gpus": (gpu(pcie_width=8, pcie_max_width=16),)},
    "AR113": {"gpus": (gpu(nvlinks_active=18), gpu(index=1, uuid="GPU-1", nvlinks_active=17))},
    "AR114": {"gpus": (gpu(throttle_reasons=0x48),)},
    "AR208": IN_NO_SUBNET,
    "AR210": Cluster(network=NetworkTable(data="192.168.20.0/24", port=0)),
    "AR301": rdma(has_uverbs=False),
    "AR302": rdma(error_counters={"symbol_error": 9}),
    "AR306": rdma(link_layer="Ethernet", gids=NO_V2),
    "AR510": {
        "environment": {
            "TORCH_NCCL_BLOCKING_WAIT": "0",
            "NCCL_BLOCKING_WAIT": "0",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        }
    },
}
# Causes with a probe that tells nothing bad of one machine alone, or needs the leader's port or a data network.
OF_SEVERAL = {"AR006", "AR007", "AR207", "AR216", "AR303", "AR304", "AR305"}


def has_probe(cause: Cause) -> bool:
    return checks_of(cause).probe is not None


def test_every_cause_that_both_probe_is_in_the_table() -> None:
    probed = {cause.id for cause in all_causes() if has_probe(cause) and cause.id in checks()}
    assert set(SHOWN) | OF_SEVERAL == probed | {"AR208"}


def machine(case: dict[str, Any] | Cluster, *, promised: int | None) -> tuple[Cluster, NodeFacts, Facts]:
    """One machine's facts, as both read them, and its cluster.toml."""
    cluster, more = (case, {}) if isinstance(case, Cluster) else (Cluster(network=NetworkTable(port=0)), case)
    nics = (LO, ETH, DOWN)
    usual: dict[str, Any] = {
        "host_name": "login", "interfaces": nics, "num_cpus": 8, "limits": {"nofile": 65536, "memlock_bytes": None},
        "places": (any_place(SHM), any_place("TMPDIR"), any_place("HOME")), "driver_version": "580.95.05",
        "fabric_manager": "active", "cuda_init": 0, "python_version": "3.11", "is_clock_synchronised": True,
    }  # fmt: skip
    read = Facts(**usual | more)
    node = NodeFacts(
        host="login", interfaces=nics, num_gpus=len(read.gpus), num_promised_gpus=promised, num_cpus=read.num_cpus
    )
    return cluster, node, read


def run_says(
    cluster: Cluster, node: NodeFacts, read: Facts, *, is_of_a_rank: bool = False
) -> tuple[tuple[Finding, ...], int]:
    """What `run` on this machine finds before it starts anything, and its exit code then; 0: it starts."""
    request = Request(command=("train.py",), num_workers="gpu" if node.num_gpus else None)
    try:
        plan = plan_job(request, world_from_env({}), cluster, node, job="j", origin={})
        run_dir = RunDir(NOWHERE, "j")
        # Under SLURM it makes no directory that is not shared.
        applicant = Applicant(
            plan=replace(plan, launcher=Launcher.SLURM, is_of_a_rank=is_of_a_rank),
            shares_run_dir=False,
            run_dir=run_dir,
            env={},
            card_facts=lambda: read,
            check_signals=lambda: None,
        )
        with Entry(applicant) as entry:
            called = entry.take_part()
    except AllranksError as exc:
        return (exc.finding,) if exc.finding else (), exc.exit_code
    assert isinstance(called, Called)
    called.listener.close()
    return called.judgement.findings, called.judgement.exit_code


def said(findings: tuple[Finding, ...]) -> list[tuple[str, Severity, str | None, str]]:
    return [(each.cause, each.severity, each.node, each.message) for each in findings]


@pytest.mark.parametrize("cause", SHOWN)
def test_check_and_run_say_the_same_of_one_machine(cause: str) -> None:
    here = machine(SHOWN[cause], promised=2 if cause == "AR103" else None)
    checked = judge_check(hold_alone(*here), choose_checks((), ()))
    findings, exit_code = run_says(*here)
    assert [finding.cause_id for finding in findings] == [cause]
    assert said(checked.findings) == said(findings)
    is_fail = any(each.severity is Severity.FAIL for each in findings)
    assert (checked.exit_code == Exit.USER_CODE, exit_code != 0) == (is_fail, is_fail)


def test_what_is_normal_among_ranks_on_one_machine_stops_none_of_them() -> None:
    assert run_says(*machine(SHOWN["AR107"], promised=None), is_of_a_rank=True) == ((), 0)
    findings, _ = run_says(*machine(SHOWN["AR105"], promised=None), is_of_a_rank=True)
    assert [finding.cause_id for finding in findings] == ["AR105"]


def test_where_all_is_well_both_say_so() -> None:
    here = machine({"gpus": (GPU,)}, promised=None)
    assert run_says(*here) == ((), 0)
    checked = judge_check(hold_alone(*here), choose_checks((), ()))
    assert (checked.findings, checked.exit_code) == ((), 0)


@pytest.mark.parametrize(
    "cluster",
    [
        IN_NO_SUBNET,
        Cluster(network=NetworkTable(port=0), node=(Node(name="login", address="192.168.20.9"),)),
        Cluster(
            network=NetworkTable(data="10.1.0.0/16", port=0),
            node=(Node(name="login", address="10.1.0.3", interface="eth7"),),
        ),
    ],
    ids=["its network is not here", "the address is another one", "the interface has another name"],
)
def test_a_machine_that_cluster_toml_does_not_describe_is_refused_by_both(cluster: Cluster) -> None:
    here = machine(cluster, promised=None)
    findings, exit_code = run_says(*here)
    checked = judge_check(hold_alone(*here), choose_checks((), ()))
    assert exit_code == Exit.USAGE
    assert [each.cause for each in checked.findings] == ["AR208 nic-not-found"]
    assert (said(checked.findings), checked.exit_code) == (said(findings), Exit.USER_CODE)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(CARDS, min_size=1, max_size=4), st.booleans())
def test_check_and_run_say_the_same_of_any_nodes(cards, has_sound_ones):
    everybody = dict(enumerate(cards))
    if has_sound_ones:
        everybody |= {index: sound_card(index) for index in range(10, 13)}
    seen = Observations(cards=everybody, results=tuple(mesh(4).values()))
    scope = terms(20)
    ran = judge(seen, scope)
    held = Held(seen=seen, num_nodes=20, node_names=scope.node_names, store_port=scope.store_port)
    checked = judge_check(held, choose_checks((), ()))
    assert checked.findings == ran.findings
    assert (checked.exit_code == Exit.USER_CODE) is not ran.is_go


def test_check_reads_the_environment_that_the_workers_of_run_would_get() -> None:
    without = Cluster(network=NetworkTable(infiniband=False))
    [card] = look_here(without, {"PATH": "/usr/bin:/bin"}).seen.cards.values()
    assert card.facts is not None
    assert card.facts.environment == {"NCCL_IB_DISABLE": "1"}


def test_a_file_that_does_not_fit_ends_check_and_run_from_the_shell(allranks: Any, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('[network]\ndata = "198.51.100.0/24"\n')
    (tmp_path / "train.py").write_text("")
    checked = allranks("check", "--cluster", "cluster.toml", env={"PATH": "/usr/bin:/bin"})
    assert checked.returncode == 1
    assert "AR208 nic-not-found" in checked.stdout
    assert "no problem found" not in checked.stdout
    ran = allranks("run", "--cluster", "cluster.toml", "train.py")
    assert ran.returncode == 2
    assert "(AR208 nic-not-found)" in ran.stderr
    assert ran.stderr.removeprefix("error: [network] data = ").split(";")[0] in " ".join(checked.stdout.split())
