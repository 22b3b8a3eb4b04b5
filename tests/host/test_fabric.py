"""Fabric manager, cuInit and Xid lines, from what the tools say."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from fake_nvidia_smi import install_script
from hypothesis import given
from hypothesis import strategies as st

from allranks.host.fabric import (
    ValueOrProblem,
    parse_cuda,
    parse_unit,
    read_fabric_manager,
    read_fabric_manager_version,
    read_xids,
    select_xids,
    try_cuda,
)
from allranks.host.programs import Ran

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
LOST = "NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("ran", "answer"),
    [
        (Ran(0, "LoadState=loaded\nActiveState=active\n"), ValueOrProblem("active")),
        (Ran(0, "LoadState=loaded\nActiveState=inactive\n"), ValueOrProblem("inactive")),
        (Ran(0, "LoadState=loaded\nActiveState=failed\n"), ValueOrProblem("failed")),
        (Ran(0, "LoadState=not-found\nActiveState=inactive\n"), ValueOrProblem()),
        (
            Ran(1, "", "System has not been booted with systemd as init system (PID 1). Can't operate.\nmore\n"),
            ValueOrProblem(
                problem="systemctl: System has not been booted with systemd as init system (PID 1). Can't operate."
            ),
        ),
        (Ran(None, problem="systemctl: not installed"), ValueOrProblem(problem="systemctl: not installed")),
        (Ran(0, ""), ValueOrProblem(problem="systemctl: exit status 0")),
    ],
)
def test_the_unit_s_state_is_systemd_s_word(ran, answer):
    assert parse_unit(ran) == answer


def test_systemctl_is_asked_for_the_unit(tmp_path):
    text = """\
#!/bin/sh
[ "$1 $2" = "show nvidia-fabricmanager.service" ] && echo LoadState=loaded && echo ActiveState=failed
"""
    env = install_script(tmp_path, "systemctl", text)
    assert read_fabric_manager(deadline_s=20, env=env) == ValueOrProblem("failed")


def test_the_version_of_the_fabric_manager_is_read(tmp_path):
    env = install_script(tmp_path, "nv-fabricmanager", "#!/bin/sh\necho Fabric Manager version is : 550.90.07\n")
    assert read_fabric_manager_version(deadline_s=20, env=env) == ValueOrProblem("550.90.07")
    env = install_script(tmp_path, "nv-fabricmanager", "#!/bin/sh\necho failed to start >&2; exit 1\n")
    assert read_fabric_manager_version(deadline_s=20, env=env) == ValueOrProblem(
        problem="nv-fabricmanager: failed to start"
    )


@pytest.mark.parametrize(
    ("ran", "answer"),
    [
        (Ran(0, "rc 0\n"), (0, "")),
        (Ran(0, "rc 802\n"), (802, "")),
        (
            Ran(0, "no libcuda.so.1: cannot open shared object file: No such file or directory\n"),
            (None, "libcuda.so.1: not installed"),
        ),
        (Ran(0, "no libcuda.so.1: file too short\n"), (None, "libcuda.so.1: file too short")),
        (Ran(-11, ""), (None, "cuInit: ended by signal 11")),
        (Ran(None, problem="python3: no answer within 3 s"), (None, "cuInit: no answer within 3 s")),
        (Ran(None, problem="python3: not installed"), (None, "python3: not installed")),
        (Ran(0, "rc \u0662\n"), (None, "cuInit: rc \u0662")),
    ],
)
def test_cuda_says_a_number_or_why_not(ran, answer):
    assert parse_cuda(ran) == answer


def test_a_library_that_cannot_be_loaded_is_told_from_none(tmp_path):
    (tmp_path / "libcuda.so.1").touch()
    rc, problem = try_cuda(deadline_s=20, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert rc is None
    assert problem.endswith("file too short")


@pytest.mark.parametrize(
    ("line", "is_there"),
    [
        (f"2026-11-21T11:30:00,123456+00:00 {LOST}", True),
        (f"2026-11-21T13:30:00,123456+02:00 {LOST}", True),
        (f"2026-11-21T09:30:00,123456+00:00 {LOST}", False),
        (f"2026-11-21T11:30:00+00:00 node03 kernel: {LOST}", True),
        (f"[ 4711.0] {LOST}", True),
        ("2026-11-21T11:30:00,1+00:00 nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32", True),
        ("2026-11-21T11:30:00,1+00:00 NVRM: loading NVIDIA UNIX x86_64 Kernel Module", False),
        ("", False),
    ],
)
def test_xids_of_the_last_two_hours_are_kept(line, is_there):
    assert select_xids(f"other\n{line}\n", now=NOW) == ((line,) if is_there else ())


def test_the_newest_xids_are_kept():
    text = "\n".join(f"2026-11-21T11:30:00,{i:06}+00:00 {LOST}" for i in range(100))
    xids = select_xids(text, now=NOW)
    assert len(xids) == 20
    assert xids[-1].startswith("2026-11-21T11:30:00,000099")


def test_a_kernel_log_that_may_not_be_read_is_not_an_empty_one(tmp_path):
    env = install_script(tmp_path, "dmesg", "#!/bin/sh\necho dmesg: read kernel buffer failed >&2; exit 1\n")
    assert read_xids(deadline_s=20, env=env) == ((), "no permission")
    install_script(tmp_path, "journalctl", "#!/bin/sh\necho -- No entries --\n")
    assert read_xids(deadline_s=20, env=env) == ((), "no permission")
    install_script(tmp_path, "journalctl", "#!/bin/sh\necho 2026-11-21T11:30:00+00:00 node03 kernel: eth0: up\n")
    assert read_xids(deadline_s=20, env=env) == ((), "")


def test_the_kernel_log_is_read(tmp_path):
    env = install_script(tmp_path, "dmesg", f'#!/bin/sh\necho "2999-01-01T00:00:00,0+00:00 {LOST}"\n')
    assert read_xids(deadline_s=20, env=env) == ((f"2999-01-01T00:00:00,0+00:00 {LOST}",), "")


@given(st.text(), st.integers() | st.none())
def test_any_answer_can_be_read(text, rc):
    parse_unit(Ran(rc, text, text))
    parse_cuda(Ran(rc, text, text))
    select_xids(f"{text} {LOST}", now=NOW)
