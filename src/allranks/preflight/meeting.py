"""What the agents of one job leave for each other in its run directory: the job's key, and where the leader listens.

    announce_leader(applicant, port, side_port=side_port)      # the leader
    find_announcement(run_dir)                                 # the others, again and again until it is there

Also the leader's nonce: who sees it shares the directory (host.limits reads it).
"""

from __future__ import annotations

import contextlib
import os
import secrets

import msgspec

from allranks.host.limits import NONCE
from allranks.model.errors import SetupError
from allranks.preflight.applicant import Applicant
from allranks.preflight.datapath import LOOPBACK
from allranks.report.rundir import RunDir
from allranks.wire.leader_port import ANNOUNCEMENT, Announcement, decode_announcement
from allranks.wire.secret import Secret

SECRET_FILE = "secret"  # noqa: S105  (a name, not a secret)
MAX_BYTES = 1 << 20


def ensure_secret(run_dir: RunDir) -> Secret:
    """Return the key of the job, written on its first start so that only this user can read it; the leader calls it.

    A requeued job keeps its key: an agent may have read it before its leader comes. Attempts are told apart by number.

    Raises:
        SetupError: the directory cannot be written, or others could read the file.
    """
    if (found := read_secret(run_dir)) is not None:
        return found
    key, path = secrets.token_hex(32), run_dir.path / SECRET_FILE
    try:
        run_dir.hold(make=False).write_whole(SECRET_FILE, key.encode(), mode=0o600)
    except OSError as exc:
        raise SetupError(
            f"{path}: {exc.strerror}; the run directory must be writable; choose another one with --log-dir"
        ) from exc
    return Secret(key.encode(), str(path))


def read_secret(run_dir: RunDir) -> Secret | None:
    """Return the leader's key; None while the file does not exist.

    Raises:
        SetupError: other users could read or replace the file.
    """
    folder = run_dir.look()
    try:
        if folder is None:
            return None
        with folder.open_read(SECRET_FILE) as file:
            key, status = file.read(MAX_BYTES), os.fstat(file.fileno())
    except OSError:
        return None
    path, mode = run_dir.path / SECRET_FILE, status.st_mode & 0o777
    is_own = status.st_uid in (os.geteuid(), 0) or status.st_uid == run_dir.find_own_uid()
    if not is_own or mode & 0o077:
        raise SetupError(f"{path}: owner {status.st_uid}, mode {mode:o}; expected owner {os.geteuid()}, mode 0600")
    return Secret(key, str(path))


def write_nonce(run_dir: RunDir) -> str:
    """Put something into the run directory that the other nodes must see, and return it."""
    nonce = secrets.token_hex(8)
    with contextlib.suppress(OSError):
        run_dir.hold(make=False).write_whole(NONCE, nonce.encode())
    return nonce


def announce_leader(applicant: Applicant, port: int, *, side_port: int) -> None:
    """Write into the run directory that this node leads."""
    plan = applicant.plan
    announcement = Announcement(
        job=plan.job,
        attempt=applicant.run_dir.attempt,
        host=plan.facts.host,
        addresses=plan.reachable_addresses or (LOOPBACK,),
        port=port,
        side_port=side_port,
    )
    with contextlib.suppress(OSError):  # the others have the scheduler's names, or know this agent
        applicant.run_dir.hold(make=False).write_whole(ANNOUNCEMENT, msgspec.json.encode(announcement))


def find_announcement(run_dir: RunDir, *, left_over: Announcement | None = None) -> Announcement | None:
    """Return the leader's announcement; None if there is none yet, or it is unreadable, or it is the one left over."""
    folder, found = run_dir.look(), None
    with contextlib.suppress(OSError):
        found = decode_announcement(folder.read(ANNOUNCEMENT, at_most=MAX_BYTES)) if folder is not None else None
    return None if found == left_over else found


def find_left_over(run_dir: RunDir) -> Announcement | None:
    """Return the announcement of an earlier start of this job that has ended: nobody listens there anymore."""
    if (found := find_announcement(run_dir)) is None:
        return None
    before = RunDir(run_dir.root, run_dir.path.name)
    before.attempt = found.attempt
    last = (before.read_events() or [{}])[-1]
    return found if last.get("event") == "ended" and not last.get("is_cut_off") else None
