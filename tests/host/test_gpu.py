"""GPUs as the driver's /proc tree shows them, narrowed by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.host.gpu import count_gpus

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


@pytest.mark.gpu
def test_this_machines_gpus_are_seen():
    assert count_gpus({}) >= 1
