"""Are GPUs judged right, and is a node without one never blamed? None of this ran on hardware."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.causes.book import all_causes, find_cause
from allranks.causes.cause import Cause
from allranks.causes.outcome import Outcome
from allranks.causes.probes.gpu import (
    collect_gpu_software_differs,
    probe_driver_cuda_mismatch,
    probe_duplicate_gpu,
    probe_fabric_manager,
    probe_gpu_binding,
    probe_gpu_busy,
    probe_gpu_hardware,
    probe_gpu_missing,
    probe_gpu_throttled,
    probe_nvlink_degraded,
    probe_pcie_degraded,
    survey_duplicate_gpu,
    survey_gpu_missing,
    weigh_gpu_software_differs,
)
from allranks.model.card import Card, Facts, Gpu, Interface
from allranks.model.finding import Severity, Status
from cards import make_card, probe, survey

DRIVER = "580.95.05"


def gpu(index: int = 0, **values: Any) -> Gpu:
    usual = {
        "uuid": f"GPU-{index:04}",
        "name": "NVIDIA H100 80GB HBM3",
        "pci_bus": f"00000000:{index + 0x18:02X}:00.0",
        "memory_total_mib": 81559,
        "memory_used_mib": 4,
        "fabric_state": "Completed",
        "fabric_status": "Success",
    }
    return Gpu(index=index, **usual | values)


def card(
    *gpus: Gpu,
    host: str = "node01",
    num_workers: int = 1,
    promised: int | None = None,
    backend: str = "auto",
    **facts: Any,
) -> Card:
    usual = {"driver_version": DRIVER, "fabric_manager": "active", "fabric_manager_version": DRIVER, "cuda_init": 0}
    return make_card(
        host=host,
        num_workers=num_workers,
        num_gpus=len(gpus),
        num_promised_gpus=promised,
        wanted_backend=backend,
        facts=Facts(gpus=gpus, **(usual if gpus else {}) | facts),
    )


def shown(cause: Cause, outcome: Outcome) -> str:
    return outcome.to_finding(cause, node="node01").message


GPU_CAUSES = [cause for cause in all_causes() if cause.id[2] == "1" and probe(cause, card(gpu())) is not None]


@pytest.mark.parametrize("cause", GPU_CAUSES, ids=lambda cause: cause.id)
def test_a_node_without_gpu_is_skipped_whatever_slurm_promised(cause: Cause) -> None:
    bare = card(promised=1, unread={"gpus": "nvidia-smi: not installed"}, environment={"CUDA_VISIBLE_DEVICES": "0"})
    outcome = probe(cause, bare)
    assert outcome is not None
    assert (outcome.status, outcome.note) == (Status.SKIP, "no NVIDIA GPU")
    assert list(survey(cause, [bare, card(gpu(), host="b"), card(gpu(1), host="c")]) or []) == []


@pytest.mark.parametrize("cause", GPU_CAUSES, ids=lambda cause: cause.id)
def test_a_driver_that_does_not_answer_is_unknown(cause: Cause) -> None:
    outcome = probe(cause, card(unread={"gpus": "nvidia-smi: no answer within 15 s"}))
    assert outcome is not None
    assert (outcome.status, outcome.note) == (Status.UNKNOWN, "nvidia-smi: no answer within 15 s")


@pytest.mark.parametrize("cause", GPU_CAUSES, ids=lambda cause: cause.id)
def test_a_healthy_node_is_fine(cause: Cause) -> None:
    healthy = card(
        *[gpu(index, pcie_width=16, pcie_max_width=16, nvlinks_active=18, throttle_reasons=1) for index in range(8)]
    )
    outcome = probe(cause, healthy)
    assert outcome is not None
    assert outcome.status is Status.PASS
    assert cause.never_on_hardware


# Fabric manager and driver


@pytest.mark.parametrize(
    ("node", "what"),
    [
        (card(gpu(), cuda_init=802), "CUDA fails to start: system not yet initialized (802)"),
        (card(cuda_init=802), "CUDA fails to start: system not yet initialized (802)"),
        (card(gpu(), fabric_manager="inactive"), "nvidia-fabricmanager is inactive"),
        (card(gpu(fabric_state=None), fabric_manager="failed", cuda_init=None), "nvidia-fabricmanager is failed"),
        (card(gpu(fabric_state="In Progress", fabric_status=None)), "the fabric of GPU 0 is not ready: In Progress"),
        (
            card(gpu(), gpu(1, fabric_status="Insufficient Resources", fabric_clique="0", fabric_cluster="0000")),
            "the fabric of GPU 1 is not ready: Completed / Insufficient Resources",
        ),
        (card(gpu(), fabric_manager_version="570.86.15"), f"fabric manager 570.86.15 does not match driver {DRIVER}"),
    ],
)
def test_a_fabric_that_is_not_ready_fails(node: Card, what: str) -> None:
    outcome = probe_fabric_manager(node)
    assert outcome.status is Status.FAIL
    assert shown(find_cause("AR101"), outcome) == what


@pytest.mark.parametrize(
    ("node", "status"),
    [
        (card(gpu(name="NVIDIA H100 PCIe", fabric_state="N/A"), fabric_manager="failed"), Status.SKIP),
        (card(gpu(name="NVIDIA A100-SXM4-80GB", fabric_state="N/A"), fabric_manager="inactive"), Status.PASS),
        (card(gpu(), fabric_manager=None, fabric_manager_version=None), Status.PASS),
        (card(gpu(), fabric_manager_version=f"{DRIVER}-1"), Status.PASS),
        (card(gpu(fabric_state="[N/A]", name="NVIDIA L40S"), fabric_manager=None), Status.SKIP),
    ],
)
def test_a_fabric_manager_that_nobody_needs_is_no_alarm(node: Card, status: Status) -> None:
    assert probe_fabric_manager(node).status is status


@pytest.mark.parametrize(
    ("node", "status"),
    [
        (card(gpu(), cuda_init=803), Status.FAIL),
        (card(cuda_init=804), Status.FAIL),
        (card(gpu(), torch_cuda="13.0", driver_version="570.86.15"), Status.FAIL),
        (card(gpu(), torch_cuda="12.8", driver_version="535.104.05"), Status.PASS),
        (
            card(
                gpu(),
                torch_cuda="13.0",
                driver_version="570.86.15",
                environment={"LD_LIBRARY_PATH": "/usr/local/cuda/compat"},
            ),
            Status.PASS,
        ),
        (card(gpu(), torch_cuda="14.1"), Status.PASS),
        (card(gpu(), cuda_init=999), Status.UNKNOWN),
        (card(gpu(), cuda_init=802), Status.PASS),
    ],
)
def test_driver_and_cuda_must_fit(node: Card, status: Status) -> None:
    assert probe_driver_cuda_mismatch(node).status is status


# How many


def test_fewer_gpus_than_promised_fail() -> None:
    outcome = probe_gpu_missing(card(*map(gpu, range(7)), promised=8))
    assert shown(find_cause("AR103"), outcome) == "the node shows 7 of 8 GPUs (allocated by SLURM)"
    assert probe_gpu_missing(card(*map(gpu, range(8)), promised=4)).status is Status.PASS


def test_no_gpu_at_all_although_nvidia_smi_works_fails() -> None:
    outcome = probe_gpu_missing(card(promised=8, unread={"gpus": "nvidia-smi: No devices were found"}))
    assert shown(find_cause("AR103"), outcome) == "the node shows 0 of 8 GPUs (allocated by SLURM)"


def test_slices_are_not_counted() -> None:
    assert probe_gpu_missing(card(gpu(mig_mode="Enabled"), promised=7)).status is Status.SKIP


def test_a_node_with_fewer_gpus_than_most_is_named() -> None:
    usual = [card(*map(gpu, range(8)), host=host) for host in "abc"]
    [(hosts, outcome)] = survey_gpu_missing([*usual, card(*map(gpu, range(7)), host="odd")])
    assert hosts == ("odd",)
    assert shown(find_cause("AR103"), outcome) == "the node shows 7 of 8 GPUs (3 of 4 nodes show 8)"
    # SLURM promised one of the eight, and does not hide the others.
    assert [hosts for hosts, _ in survey_gpu_missing([*usual, card(*map(gpu, range(7)), host="odd", promised=1)])] == [
        ("odd",)
    ]


def test_a_node_that_has_what_slurm_promised_is_not_blamed() -> None:
    usual = [card(*map(gpu, range(8)), host=host, promised=8) for host in "abc"]
    assert list(survey_gpu_missing([*usual, card(*map(gpu, range(4)), host="small", promised=4)])) == []


# Whose


def test_foreign_processes_are_warned_of_and_much_memory_fails() -> None:
    who = ("python3 (pid 812, 14336 MiB)",)
    outcome = probe_gpu_busy(card(gpu(), gpu(1, processes=who, memory_used_mib=14340)))
    assert (outcome.status, outcome.evidence) == (Status.WARN, who)
    assert (
        shown(find_cause("AR104"), outcome) == "14340 MiB of 81559 MiB of GPU 1 (00000000:19:00.0) are already in use"
    )
    assert probe_gpu_busy(card(gpu(processes=who, memory_used_mib=60000))).status is Status.FAIL


def test_memory_that_nobody_owns_is_warned_of() -> None:
    outcome = probe_gpu_busy(card(gpu(memory_used_mib=60000)))
    assert outcome.status is Status.WARN
    assert shown(find_cause("AR104"), outcome).endswith("in use; no process visible here owns them")


def test_gpus_that_are_hidden_from_the_job_may_be_busy() -> None:
    busy = gpu(1, processes=("python3 (pid 812)",), memory_used_mib=60000)
    assert probe_gpu_busy(card(gpu(), busy, environment={"CUDA_VISIBLE_DEVICES": "0"})).status is Status.PASS
    assert probe_gpu_busy(card(gpu(), busy, environment={"CUDA_VISIBLE_DEVICES": "GPU-0001"})).status is Status.FAIL


def test_a_gpu_named_twice_fails() -> None:
    outcome = probe_duplicate_gpu(card(gpu(), gpu(1), environment={"CUDA_VISIBLE_DEVICES": "1, 1"}))
    assert shown(find_cause("AR107"), outcome) == "CUDA_VISIBLE_DEVICES=1, 1 lists 1 twice, so CUDA hides all GPUs"


def test_one_gpu_on_two_nodes_fails() -> None:
    [(hosts, outcome)] = survey_duplicate_gpu([card(gpu(), gpu(1), host="a"), card(gpu(), gpu(1), host="b")])
    assert (hosts, outcome.status) == (("a", "b"), Status.FAIL)
    assert shown(find_cause("AR107"), outcome) == "2 nodes show the same GPU, GPU-0000"


def test_two_agents_that_see_the_same_gpus_are_warned_of() -> None:
    nic = Interface(name="eth0", addresses=("10.0.0.1",), is_up=True)
    same = {"host_name": "a", "boot_id": "b1", "interfaces": (nic,)}
    [(_, outcome)] = survey_duplicate_gpu([card(gpu(), host="a.0", **same), card(gpu(), host="a.1", **same)])
    assert outcome.status is Status.WARN


def test_a_variable_that_hides_gpus_from_workers_is_warned_of() -> None:
    narrow = {"environment": {"CUDA_VISIBLE_DEVICES": "0"}, "num_workers": 2}
    outcome = probe_gpu_binding(card(gpu(), gpu(1), **narrow))
    assert shown(find_cause("AR108"), outcome) == "CUDA_VISIBLE_DEVICES=0 shows only 1 of 2 GPUs to 2 workers"
    assert probe_gpu_binding(card(gpu(), gpu(1), backend="gloo", **narrow)).status is Status.SKIP
    assert probe_gpu_binding(card(gpu(), **narrow)).status is Status.PASS


# Health


@pytest.mark.parametrize(
    ("node", "status", "message"),
    [
        (
            card(gpu(3, uncorrected_ecc=2)),
            Status.FAIL,
            "GPU 3 (00000000:1B:00.0): 2 uncorrected memory errors since the driver was loaded",
        ),
        (
            card(gpu(remap_failed=True)),
            Status.FAIL,
            "GPU 0 (00000000:18:00.0): a bad memory row could not be remapped: replace the card",
        ),
        (
            card(gpu(remap_pending=True)),
            Status.WARN,
            "GPU 0 (00000000:18:00.0): a bad memory row will be remapped at the next reset",
        ),
        (
            card(gpu(recovery_action="Reboot")),
            Status.FAIL,
            "GPU 0 (00000000:18:00.0): the driver requests: Reboot",
        ),
        (
            card(gpu(pci_bus=None), xids=("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus",)),
            Status.FAIL,
            "GPU at 0000:44:00: Xid 79: the GPU fell off the bus",
        ),
        (
            card(gpu(), xids=("NVRM: Xid (PCI:0000:18:00): 48, pid=1, DBE",)),
            Status.FAIL,
            "GPU 0 (00000000:18:00.0): Xid 48: uncorrectable memory error",
        ),
        (
            card(gpu(), xids=("NVRM: Xid (PCI:0000:18:00 GPU-I:05 GPU-CI:00): 48, pid=1, DBE",)),
            Status.FAIL,
            "GPU 0 (00000000:18:00.0): Xid 48: uncorrectable memory error",
        ),
    ],
)
def test_a_broken_gpu_is_named(node: Card, status: Status, message: str) -> None:
    outcome = probe_gpu_hardware(node)
    assert outcome.status is status
    assert shown(find_cause("AR105"), outcome) == message


@pytest.mark.parametrize(
    "node",
    [
        card(gpu(), xids=("NVRM: Xid (PCI:0000:18:00): 13, pid=1, Graphics Exception",)),
        card(gpu(), xids=("not an Xid",)),
        card(gpu(recovery_action="None", uncorrected_ecc=0, remap_pending=False, remap_failed=False)),
        card(
            gpu(),
            gpu(1),
            xids=("NVRM: Xid (PCI:0000:19:00): 48, pid=1, DBE",),
            environment={"CUDA_VISIBLE_DEVICES": "0"},
        ),
    ],
)
def test_what_is_no_fault_of_this_job_s_gpus_passes(node: Card) -> None:
    assert probe_gpu_hardware(node).status is Status.PASS


def test_a_broken_gpu_that_is_hidden_from_the_job_is_warned_of() -> None:
    outcome = probe_gpu_hardware(card(gpu(), gpu(1, uncorrected_ecc=3), environment={"CUDA_VISIBLE_DEVICES": "0"}))
    assert outcome.status is Status.WARN


def test_lost_lanes_and_links_and_heat_are_warned_of() -> None:
    slow = probe_pcie_degraded(card(gpu(pcie_width=8, pcie_max_width=16)))
    assert shown(find_cause("AR112"), slow) == "the PCIe link of GPU 0 (00000000:18:00.0) has 8 of 16 lanes"
    assert probe_pcie_degraded(card(gpu())).status is Status.SKIP
    fewer = probe_nvlink_degraded(card(gpu(nvlinks_active=18), gpu(1, nvlinks_active=17)))
    assert (
        shown(find_cause("AR113"), fewer)
        == "GPU 1 (00000000:19:00.0) has 17 active NVLinks; others of its model in the node have 18"
    )
    assert probe_nvlink_degraded(card(gpu(), gpu(1))).status is Status.SKIP
    hot = probe_gpu_throttled(card(gpu(throttle_reasons=0x48)))
    assert shown(find_cause("AR114"), hot).endswith("hardware slowdown, too hot (hardware thermal slowdown)")
    assert probe_gpu_throttled(card(gpu(throttle_reasons=0x04))).status is Status.PASS
    assert {slow.status, fewer.status, hot.status} == {Status.WARN}


def test_models_drivers_and_modes_are_compared() -> None:
    values = collect_gpu_software_differs(card(gpu(vbios="96.00", compute_mode="Default", mig_mode="Disabled"), gpu(1)))
    assert values == {
        "GPU model": "NVIDIA H100 80GB HBM3",
        "GPU driver": DRIVER,
        "MIG mode": "Disabled, N/A",
        "compute mode": "Default, N/A",
        "VBIOS": None,
    }
    assert [key for key in values if weigh_gpu_software_differs(key) is Severity.WARN] == ["compute mode", "VBIOS"]
    assert collect_gpu_software_differs(card()) is None
