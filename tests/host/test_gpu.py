"""GPUs as the driver's /proc tree shows them, narrowed by CUDA_VISIBLE_DEVICES; and as nvidia-smi does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fake_nvidia_smi import RECORDED, install, install_script
from hypothesis import given
from hypothesis import strategies as st

from allranks.host.gpu import (
    QUERY_FIELDS,
    Details,
    GpuAnswer,
    count_gpus,
    find_unknown_fields,
    parse_gpu_processes,
    parse_gpus,
    parse_nvlinks,
    parse_remapped_rows,
    read_driver_version,
    read_gpu_processes,
    read_gpus,
    read_nvlinks,
    read_remapped_rows,
    with_details,
    without_fields,
)
from allranks.model.card import Gpu

UUIDS = (
    "GPU-1b8f5e7c-93d2-4c07-8a51-5d2f3a1c9b40",
    "GPU-77c0a9d3-0f5e-4b8a-b1c6-2e94d7f01a65",
    "GPU-e04d2b16-6a7f-45c9-9d38-c8b0f12e7a93",
    "GPU-f9a3c581-2e64-4d1b-87f0-3b5d6e8a0c27",
)
INFORMATION = """\
Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t {irq}
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.74.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {location}
Device Minor: \t {minor}
GPU Firmware: \t 550.90.07
GPU Excluded:\t No
"""


def make_machine(root: Path, num_gpus: int) -> Path:
    for minor, uuid in enumerate(UUIDS[:num_gpus]):
        location = f"0000:{0x1B + 16 * minor:02x}:00.0"
        directory = root / "proc/driver/nvidia/gpus" / location
        directory.mkdir(parents=True)
        text = INFORMATION.format(irq=120 + minor, uuid=uuid, location=location, minor=minor)
        (directory / "information").write_text(text)
        device = root / f"dev/nvidia{minor}"
        device.parent.mkdir(exist_ok=True)
        device.touch()
    return root


@pytest.mark.parametrize("num_gpus", [0, 1, 4])
def test_all_gpus_of_the_driver_count(tmp_path, num_gpus):
    assert count_gpus({}, root=make_machine(tmp_path, num_gpus)) == num_gpus


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("", 0),
        ("0", 1),
        ("3", 1),
        ("4", 0),
        ("1,0", 2),
        ("0,1,2,3", 4),
        (" 0 , 2 ", 2),
        ("0,7,1", 1),
        ("7,0,1", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,,1", 1),
        ("0,0", 0),
        ("MIG-5b8e9d2c,MIG-0a477e1f", 1),
        ("NoDevFiles", 0),
        ("GPU-1b8f5e7c-93d2-4c07-8a51-5d2f3a1c9b40", 1),
        ("GPU-1b8f5e7c", 1),
        ("GPU-1b8f,GPU-77c0", 2),
        ("GPU-e0,GPU-0000,GPU-f9", 1),
        ("gpu-1b8f5e7c", 0),
        ("MIG-5b8e9d2c-0a47-5f61-9c3d-7e1f2a4b6c80", 1),
    ],
)
def test_cuda_visible_devices_narrows_the_count(tmp_path, visible, count):
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}, root=make_machine(tmp_path, 4)) == count


@pytest.mark.parametrize("visible", ["0", "0,1", "", "GPU-1b8f5e7c", "MIG-5b8e9d2c"])
def test_the_variable_adds_no_gpu_to_a_node_without_one(tmp_path, visible):
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}, root=make_machine(tmp_path, 0)) == 0


def test_a_gpu_whose_device_file_the_container_hides_does_not_count(tmp_path):
    root = make_machine(tmp_path, 4)
    (root / "dev/nvidia1").unlink()
    (root / "dev/nvidia3").unlink()
    assert count_gpus({}, root=root) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2"}, root=root) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "GPU-77c0"}, root=root) == 0


def test_a_gpu_that_fell_off_the_bus_does_not_count(tmp_path):
    root = make_machine(tmp_path, 2)
    (root / "proc/driver/nvidia/gpus/0000:1b:00.0/information").write_text("Model: \t\t Unknown\n")
    assert count_gpus({}, root=root) == 1


def test_a_torn_information_file_does_not_count(tmp_path):
    root = make_machine(tmp_path, 2)
    (root / "proc/driver/nvidia/gpus/0000:1b:00.0/information").write_text("")
    assert count_gpus({}, root=root) == 1


# --- nvidia-smi -------------------------------------------------------------------------------------------------------

A100 = ("GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77", "GPU-1b8f5e7c-93d2-4c07-8a51-5d2f3a1c9b40")
H100 = ("GPU-e04d2b16-6a7f-45c9-9d38-c8b0f12e7a93", "GPU-f9a3c581-2e64-4d1b-87f0-3b5d6e8a0c27")


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def asked(directory: Path) -> list[list[str]]:
    return [line.split(",") for line in (directory / "asked").read_text().splitlines()]


def test_driver_470_is_asked_until_it_knows_all_fields(tmp_path):
    answer = read_gpus(deadline_s=30, env=install(tmp_path, "470-a100"))
    assert (answer.driver_version, answer.problem) == ("470.57.02", "")
    assert answer.gpus[1] == Gpu(
        index=1,
        uuid=A100[1],
        name="A100-SXM4-40GB",
        pci_bus="00000000:0F:00.0",
        vbios="92.00.19.00.01",
        memory_total_mib=40536,
        memory_used_mib=0,
        uncorrected_ecc=2,
        has_ecc=True,
        compute_mode="Default",
        mig_mode="Disabled",
        pcie_width=8,
        pcie_max_width=16,
        throttle_reasons=1,
    )
    # event reasons, recovery action, the whole fabric family: then it answers.
    assert len(asked(tmp_path)) == 4
    assert "clocks_throttle_reasons.active" in asked(tmp_path)[-1]


def test_driver_535_on_a_t4_has_no_fabric_and_no_mig(tmp_path):
    answer = read_gpus(deadline_s=30, env=install(tmp_path, "535-t4"))
    (gpu,) = answer.gpus
    assert (gpu.mig_mode, gpu.fabric_status, gpu.throttle_reasons) == (None, None, 1)
    assert answer.problem == ""


def test_driver_550_shows_a_fabric_that_is_not_ready(tmp_path):
    answer = read_gpus(deadline_s=30, env=install(tmp_path, "550-h100"))
    assert [(gpu.fabric_state, gpu.fabric_status) for gpu in answer.gpus] == [
        ("Completed", "Success"),
        ("In Progress", None),
    ]
    assert [gpu.memory_used_mib for gpu in answer.gpus] == [1, 14337]


def test_driver_570_answers_at_once_and_asks_for_a_reset(tmp_path):
    answer = read_gpus(deadline_s=30, env=install(tmp_path, "570-gb200"))
    assert len(asked(tmp_path)) == 1
    assert [gpu.recovery_action for gpu in answer.gpus] == ["None", "Reset"]
    assert [gpu.compute_mode for gpu in answer.gpus] == ["Default", "Exclusive_Process"]
    assert [(gpu.fabric_status, gpu.fabric_clique) for gpu in answer.gpus] == [
        ("Success", "32766"),
        ("Insufficient Resources", "0"),
    ]
    assert answer.gpus[0].fabric_cluster == "3c5e8a0c-27b5-4d6e-8a0c-27f9a3c5812e"


def test_without_nvidia_smi_there_is_a_reason(tmp_path):
    assert read_gpus(deadline_s=5, env={"PATH": str(tmp_path)}) == GpuAnswer(problem="nvidia-smi: not installed")


def test_a_hanging_nvidia_smi_is_not_waited_for(tmp_path):
    env = install(tmp_path, "550-h100", delay_s=600)
    assert read_gpus(deadline_s=0.5, env=env) == GpuAnswer(problem="nvidia-smi: no answer within 0.5 s")


def test_one_that_refuses_every_field_is_given_up(tmp_path):
    text = '#!/bin/sh\nf="${1#--query-gpu=}"; echo "Field \\"${f%%,*}\\" is not a valid field to query."; exit 2\n'
    answer = read_gpus(deadline_s=30, env=install_script(tmp_path, "nvidia-smi", text))
    assert answer.gpus == ()
    assert answer.problem.startswith("nvidia-smi: Field ")


@pytest.mark.parametrize(
    ("file", "rc", "problem"),
    [
        (
            "error-6-no-devices.txt",
            6,
            "nvidia-smi: No devices were found; a query to find an object was unsuccessful",
        ),
        (
            "error-9-no-driver.txt",
            9,
            "nvidia-smi: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
            "the latest NVIDIA driver is installed and running.; the NVIDIA driver is not loaded",
        ),
        (
            "error-15-off-the-bus.txt",
            15,
            "nvidia-smi: Unable to determine the device handle for GPU0000:5D:00.0: GPU is lost.  Reboot the system to "
            "recover this GPU; a GPU has fallen off the bus or is inaccessible",
        ),
        (
            "error-18-mismatch.txt",
            18,
            "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch; NVML library version: 550.90; "
            "exit status 18",
        ),
    ],
)
def test_a_query_that_fails_says_why(file, rc, problem):
    assert parse_gpus(recorded(file), QUERY_FIELDS, rc=rc) == GpuAnswer(problem=problem)


FIELDS = ("index", "uuid", "name", "memory.used", "ecc.mode.current")
ROW = f"0, {H100[0]}, NVIDIA H100 80GB HBM3, 1, Enabled"


def test_rows_beside_a_warning_count():
    text = f"{ROW}\nWARNING: infoROM is corrupted at gpu 0000:00:1E.0\n"
    answer = parse_gpus(text, FIELDS, rc=14)
    assert [gpu.index for gpu in answer.gpus] == [0]
    assert answer.problem == (
        "nvidia-smi: WARNING: infoROM is corrupted at gpu 0000:00:1E.0; the infoROM of a GPU is corrupted"
    )


@pytest.mark.parametrize("words", ["GPU is lost", "Unknown Error", "GPU requires reset"])
def test_a_gpu_that_cannot_be_read_is_there_with_the_reason(words):
    answer = parse_gpus(f"{ROW}\n1, {H100[1]}, NVIDIA H100 80GB HBM3, [{words}], [{words}]\n", FIELDS)
    assert [(gpu.index, gpu.memory_used_mib, gpu.has_ecc) for gpu in answer.gpus] == [(0, 1, True), (1, None, None)]
    assert answer.problem == f"nvidia-smi: GPU 1: {words}"


@pytest.mark.parametrize("words", ["[N/A]", "N/A", "[Not Supported]", "[Insufficient Permissions]"])
def test_what_a_gpu_does_not_have_is_no_problem(words):
    answer = parse_gpus(f"0, {H100[0]}, NVIDIA H100 80GB HBM3, 1, {words}\n", FIELDS)
    assert (answer.gpus[0].has_ecc, answer.problem) == (None, "")


def test_silence_is_a_problem():
    assert parse_gpus("", FIELDS) == GpuAnswer(problem="nvidia-smi: it printed nothing")


@given(st.text(), st.integers(), st.text())
def test_any_answer_of_nvidia_smi_can_be_read(text, rc, stderr):
    for answer in (
        parse_gpus(text, FIELDS, rc=rc, stderr=stderr),
        parse_gpus(",".join([text] * len(FIELDS)), FIELDS, rc=rc),
        parse_gpus(f"0, {H100[0]}, {text}, {text}, {text}", FIELDS),
    ):
        assert len(answer.problem) <= 512
    parse_remapped_rows(text)
    parse_remapped_rows(f"{H100[0]}, {text}, {text}")
    parse_gpu_processes(f"{H100[0]}, 812, {text}, {text}\n{text}", is_own=lambda pid: False)
    parse_nvlinks(f"GPU 0: x (UUID: y)\n Link 0: {text}\n{text}")
    find_unknown_fields(text)


@given(st.lists(st.sampled_from(QUERY_FIELDS)), st.sets(st.sampled_from(QUERY_FIELDS)))
def test_fields_only_become_fewer(fields, unknown):
    left = without_fields(fields, unknown)
    assert len(left) <= len(fields)
    assert not set(left) & unknown


@pytest.mark.parametrize(
    ("file", "rows"),
    [
        ("470-a100.remapped.txt", {A100[0]: (False, False), A100[1]: (True, False)}),
        ("535-t4.remapped.txt", {}),
        ("550-h100.remapped.txt", {H100[0]: (False, False), H100[1]: (False, True)}),
        ("error-9-no-driver.txt", {}),
    ],
)
def test_remapped_rows_are_told_by_uuid(file, rows):
    assert parse_remapped_rows(recorded(file)) == rows


def test_foreign_processes_are_named():
    assert parse_gpu_processes(recorded("550-h100.apps.txt"), is_own=lambda pid: False) == {
        H100[1]: ("python3 (pid 3999999, 14336 MiB)", "a process (pid 3999998)")
    }


def test_own_processes_are_not_foreign(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as child:
        (tmp_path / "apps.txt").write_text(f"{H100[0]}, {child.pid}, sleep, 10\n{H100[0]}, 1, init, 10\n")
        env = install(tmp_path, "570-gb200")
        details = read_gpu_processes(deadline_s=30, env=env)
        child.kill()
    assert details == Details({H100[0]: ("init (pid 1, 10 MiB)",)})


def test_links_that_are_up_are_counted():
    assert parse_nvlinks(recorded("550-h100.nvlink.txt")) == {H100[0]: 3, H100[1]: 2}


def test_details_find_their_gpu(tmp_path):
    env = install(tmp_path, "550-h100")
    gpus = with_details(
        read_gpus(deadline_s=30, env=env).gpus,
        remapped=read_remapped_rows(deadline_s=30, env=env).by_uuid,
        processes=read_gpu_processes(deadline_s=30, env=env).by_uuid,
        nvlinks=read_nvlinks(deadline_s=30, env=env).by_uuid,
    )
    assert [(g.remap_pending, g.remap_failed, len(g.processes), g.nvlinks_active) for g in gpus] == [
        (False, False, 0, 3),
        (False, True, 2, 2),
    ]


def test_a_detail_that_is_not_answered_says_why(tmp_path):
    env = install_script(tmp_path, "nvidia-smi", "#!/bin/sh\nexit 15\n")
    assert read_nvlinks(deadline_s=30, env=env) == Details(
        problem="nvidia-smi: a GPU has fallen off the bus or is inaccessible"
    )


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n", "550.90.07"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n", "570.124.06"),
        ("", None),
    ],
)
def test_the_driver_s_version_needs_no_tool(tmp_path, text, version):
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert read_driver_version(root=tmp_path) == version
    assert read_driver_version(root=tmp_path / "other") is None
