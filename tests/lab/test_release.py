"""Does the lab find Debian's mirror and keys, and do its scripts start the right programs? Nothing is downloaded."""

from __future__ import annotations

import stat
import struct
import subprocess
from pathlib import Path

import pytest

from allranks.lab.accounting import render_slurmdbd_conf, use_accounting
from allranks.lab.faulty_job import complains
from allranks.lab.init import MOUNTS_FILE
from allranks.lab.release import (
    CLIENTS,
    DAEMONS,
    RELEASES,
    Mirror,
    cache_dir,
    check_place,
    daemon_command,
    find_loader,
    parse_index_targets,
    parse_signed_by,
    prepare_root,
    redirect,
    tool_path,
    write_mounts,
    write_programs,
)
from allranks.lab.slurm_daemons import TASK_PROLOG
from allranks.model.errors import SetupError

TARGETS = """\
MetaKey: main/binary-amd64/Packages
Codename: bookworm-security
Label: Debian-Security
Origin: Debian
Repo-URI: http://mirror.example/debian-security/
Sourcesentry: /etc/apt/sources.list.d/debian.sources:2

MetaKey: main/binary-amd64/Packages
Codename: bookworm
Label: Debian
Origin: Debian
Repo-URI: http://mirror.example/debian/
Sourcesentry: /etc/apt/sources.list.d/debian.sources:1
"""
SOURCES = """\
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
"""
LIST = """\
# Debian
deb [arch=amd64 signed-by=/keys/debian.gpg] http://mirror.example/debian bookworm main
deb http://mirror.example/debian bookworm-updates main
"""


def make_elf(
    *, interpreter: bytes = b"/lib64/ld-linux-x86-64.so.2", path: bytes = b"/usr/lib/x86_64-linux-gnu/slurm-wlm"
) -> bytes:
    """A program with nothing but what tells where its loader and its libraries are."""
    strings = b"\0libslurmfull.so\0" + path + b"\0"
    dynamic = struct.pack("<qQqQqQ", 5, 0x400000 + 0x200, 29, strings.index(path), 0, 0)
    header = b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<Q", 64)
    header = header.ljust(54, b"\0") + struct.pack("<HH", 56, 3)
    segments = [(3, 0x180, len(interpreter) + 1), (2, 0x1C0, len(dynamic)), (1, 0x200, len(strings))]
    table = b"".join(
        struct.pack("<IIQQQQQQ", kind, 0, offset, 0x400000 + offset, 0, length, length, 8)
        for kind, offset, length in segments
    )
    image = (header.ljust(64, b"\0") + table).ljust(0x180, b"\0") + interpreter + b"\0"
    return image.ljust(0x1C0, b"\0") + dynamic.ljust(0x40, b"\0") + strings


def make_root(path: Path, *, is_merged: bool = True) -> Path:
    """What mmdebstrap leaves: daemons without their alternatives, a loader with a version, plugins."""
    libraries = path / ("usr/lib" if is_merged else "lib") / "x86_64-linux-gnu"
    plugins = path / "usr/lib/x86_64-linux-gnu/slurm-wlm"
    for directory in (libraries, plugins, path / "usr/sbin", path / "usr/bin", path / "var/cache"):
        directory.mkdir(parents=True)
    (libraries / "ld-2.31.so").touch()
    (libraries / "ld-linux-x86-64.so.2").symlink_to("ld-2.31.so")
    (plugins / "libslurmfull.so").touch()
    for tool in (*DAEMONS, *CLIENTS):
        name = f"{tool}-wlm" if tool in ("slurmctld", "slurmd", "slurmstepd") else tool
        (path / tool_path(tool).relative_to("/").parent / name).write_bytes(make_elf())
    return path


def test_the_mirror_is_debians_and_not_the_one_of_its_security_updates() -> None:
    assert parse_index_targets(TARGETS) == Mirror(
        "http://mirror.example/debian/", "/etc/apt/sources.list.d/debian.sources:1"
    )
    assert parse_index_targets("Origin: Ubuntu\nLabel: Ubuntu\nRepo-URI: http://mirror.example/ubuntu/\n") is None
    assert parse_index_targets("") is None


@pytest.mark.parametrize(
    ("text", "number", "is_list", "keyring"),
    [
        (SOURCES, 1, False, "/usr/share/keyrings/debian-archive-keyring.gpg"),
        (SOURCES, 2, False, ""),
        (SOURCES, 3, False, ""),
        (LIST, 2, True, "/keys/debian.gpg"),
        (LIST, 3, True, ""),
        (LIST, 0, True, ""),
    ],
)
def test_the_keyring_is_that_of_the_entry(text: str, number: int, is_list: bool, keyring: str) -> None:
    assert parse_signed_by(text, number, is_list=is_list) == keyring


def test_the_cache_is_where_xdg_says() -> None:
    assert cache_dir({"XDG_CACHE_HOME": "/x", "HOME": "/home/a"}) == Path("/x/allranks/slurm")
    assert cache_dir({"HOME": "/home/a"}) == Path("/home/a/.cache/allranks/slurm")


def test_a_program_gets_another_loader_and_path_and_nothing_else_moves() -> None:
    before = make_elf()
    after = redirect(before, Path("/etc/slurm/release/ld.so"), Path("/etc/slurm/release/libs"))
    assert len(after) == len(before)
    assert b"/etc/slurm/release/ld.so\0" in after
    assert b"/etc/slurm/release/libs\0" in after
    assert b"/lib64" not in after
    assert b"slurm-wlm" not in after
    assert b"\0libslurmfull.so\0" in after
    assert struct.unpack_from("<q", after, 0x1C0 + 16) == (15,), "DT_RPATH, also for the libraries of libraries"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"#!/bin/sh\n", "expected a 64-bit little-endian ELF program"),
        (make_elf(interpreter=b"/lib/ld.so"), "no room for /etc/slurm/release/ld.so: expected at most 10 characters"),
        (make_elf(path=b"/usr/lib"), "no room for /etc/slurm/release/libs: expected at most 8 characters"),
        (make_elf().replace(struct.pack("<q", 29), struct.pack("<q", 30)), "expected a DT_RUNPATH"),
        (
            make_elf().replace(struct.pack("<II", 3, 0), struct.pack("<II", 4, 0)),
            "expected a dynamically linked program",
        ),
    ],
    ids=["a script", "a short loader", "a short path", "no path", "static"],
)
def test_a_program_that_cannot_be_changed_is_refused(program: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        redirect(program, Path("/etc/slurm/release/ld.so"), Path("/etc/slurm/release/libs"))


@pytest.mark.parametrize("is_merged", [True, False])
def test_a_root_keeps_only_what_the_programs_need(is_merged: bool, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", is_merged=is_merged)
    write_programs(root)
    assert {path.name for path in root.iterdir()} - {"lib"} == {"ld.so", "libs", "programs", "usr"}
    assert [path.name for path in (root / "usr").iterdir()] == ["lib"]
    assert (root / "ld.so").resolve().name == "ld-2.31.so"
    assert {path.name for path in (root / "libs").iterdir()} == {
        "ld-2.31.so", "ld-linux-x86-64.so.2", "libslurmfull.so",
    }  # fmt: skip
    assert all(path.exists() for path in (root / "libs").iterdir()), "links lead to files of the root"
    assert {path.name for path in (root / "programs").iterdir()} == {*DAEMONS, *CLIENTS}
    assert stat.S_IMODE((root / "programs/srun").stat().st_mode) == 0o755


def test_the_loader_is_a_file_and_never_a_link(tmp_path: Path) -> None:
    assert find_loader(make_root(tmp_path / "root")).name == "ld-2.31.so"
    with pytest.raises(SetupError, match="no dynamic loader"):
        find_loader(tmp_path / "empty")


def test_every_program_is_mounted_over_the_machines_own_after_the_root(tmp_path: Path) -> None:
    root, lab = make_root(tmp_path / "root"), tmp_path / "lab"
    (lab / "slurm").mkdir(parents=True)
    assert daemon_command(lab, "slurmdbd") == "slurmdbd"
    write_mounts(root, lab)
    mounts = [line.split("\t") for line in (lab / MOUNTS_FILE).read_text().splitlines()]
    plugins = "usr/lib/x86_64-linux-gnu/slurm-wlm"
    assert mounts[:2] == [[str(root), "/etc/slurm/release"], [f"/etc/slurm/release/{plugins}", f"/{plugins}"]]
    assert ["/etc/slurm/release/programs/srun", "/usr/bin/srun"] in mounts
    assert ["/etc/slurm/release/programs/slurmstepd", "/usr/sbin/slurmstepd"] in mounts
    assert (lab / "slurm/release").is_dir(), "the place of the first mount"
    assert daemon_command(lab, "slurmdbd") == "/etc/slurm/release/programs/slurmdbd"


def test_a_machine_without_the_directory_of_slurm_s_configuration_is_refused(tmp_path: Path) -> None:
    seen = tmp_path / "slurm/release"
    with pytest.raises(SetupError, match=f"{tmp_path}/slurm: no such directory"):
        check_place(seen)
    seen.parent.mkdir()
    check_place(seen)


def test_without_mmdebstrap_the_command_that_installs_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="apt-get install mmdebstrap"):
        prepare_root("24.11", env={"XDG_CACHE_HOME": str(tmp_path)}, say=print)


def test_a_root_in_the_cache_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    made = tmp_path / "allranks/slurm/24.11"
    made.mkdir(parents=True)
    assert prepare_root("24.11", env={"XDG_CACHE_HOME": str(tmp_path)}, say=print) == made


def test_every_release_is_one_of_debians() -> None:
    assert RELEASES == {"20.11": "bullseye", "22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}


def test_accounting_replaces_the_line_that_turns_it_off() -> None:
    conf = "ClusterName=a\nAccountingStorageType=accounting_storage/none\nJobCompType=jobcomp/none\n"
    assert use_accounting(conf, "node01", Path("/lab")) == (
        "ClusterName=a\nAccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=node01\n"
        "AccountingStoragePass=/lab/munge.socket\nJobCompType=jobcomp/none\n"
    )
    assert "StoragePass=secret\n" in render_slurmdbd_conf("node01", Path("/lab"), password="secret")


@pytest.mark.parametrize(("step", "printed"), [("0", "export MARK=1\n"), ("batch", ""), ("-5", ""), (None, "")])
def test_faults_are_for_tasks_and_not_for_the_batch_script(step: str | None, printed: str, tmp_path: Path) -> None:
    # From 26.05 on, SLURM_STEP_ID is -5 in a batch script.
    prolog = tmp_path / "slurm/task_prolog"
    fault = tmp_path / "nodes/node01/environment/fault"
    for path, text in ((prolog, TASK_PROLOG), (fault, "MARK=1\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    env = {"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "node01"} | ({"SLURM_STEP_ID": step} if step else {})
    told = subprocess.run(["/bin/sh", prolog], env=env, capture_output=True, text=True, check=True)
    assert told.stdout == printed


@pytest.mark.parametrize("start", ["slurmstepd: error:", "[2026-11-23T14:03:24.131] error:"])
def test_what_slurm_says_of_an_ended_step_is_no_complaint_of_torchrun(start: str) -> None:
    # SLURM writes the second form from 25.05 on.
    assert not complains(f"{start} *** STEP 7.0 ON node01 CANCELLED AT 2026-11-23T14:03:24 DUE TO TASK FAILURE ***")
    assert complains("RuntimeError: the client socket has failed to connect")
