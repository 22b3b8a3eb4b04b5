"""The job's key: its source, and how two agents prove to each other that they have it.

The group of a job is closed. The key comes from the first of: $ALLRANKS_SECRET; a 0600 file in the run directory,
which all nodes of a SLURM job share; munge, if a SLURM node does not see that file (credentials instead of a key);
the `--rdzv-id` name, which is as weak as it is easy to guess. Without any of them the group is open, and the caller
prints that. A run on one machine needs no key.

The `--rdzv-id` name is never sent. Groups are distinguished by a one-way value derived from it (`group_name`), and each
guess at the name costs an eavesdropper NAME_ROUNDS rounds of HMAC.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from allranks.wire.protocol import Join, Message, Welcome

SECRET_VARIABLE = "ALLRANKS_SECRET"  # noqa: S105  (a name, not a secret)


@dataclass(frozen=True, slots=True)
class Secret:
    """The job's key and its source. Never printed."""

    key: bytes = field(repr=False)
    """Empty: munge credentials stand for one."""
    source: str
    munge_socket: str | None = field(default=None, repr=False)
    """Where munged listens, if not where it usually does."""


NAME_ROUNDS = 100_000
"""About 30 ms, once for each agent."""


def secret_from_user(env: Mapping[str, str], rdzv_id: str | None) -> Secret | None:
    """Return the key that `submit` or the user set in the environment, else one that is derived from the group's name.

    The derived one is as hard to guess as the name.
    """
    if value := env.get(SECRET_VARIABLE):
        return Secret(value.encode(), f"${SECRET_VARIABLE}")
    return Secret(_stretch(rdzv_id), "--rdzv-id") if rdzv_id else None


def group_name(rdzv_id: str) -> str:
    """Return the group's name on the wire, in place of its `--rdzv-id`, which may be its key."""
    return f"rdzv-{hmac.digest(_stretch(rdzv_id), b'group name', 'sha256').hex()[:16]}"


@functools.lru_cache(maxsize=8)
def _stretch(rdzv_id: str) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", rdzv_id.encode("utf-8", "surrogateescape"), b"allranks rdzv-id", NAME_ROUNDS)


OPEN_GROUP = Secret(b"allranks open group", "none")
MUNGE_S = 2.0
"""Deadline of one credential; it takes milliseconds."""
LEADERS_MUNGE_S = 2 * MUNGE_S
"""The leader reads the agent's credential, and makes its own."""


def prove_join(secret: Secret, join: Join, *, leader_nonce: bytes) -> Join:
    """Return a Join with the proof that its agent belongs to this job: HMAC, or a munge credential."""
    return msgspec.structs.replace(join, proof=_prove(secret, _words("join", join, leader_nonce)))


def answer_join(secret: Secret, join: Join, *, leader_nonce: bytes) -> Welcome | None:
    """Return the answer that proves the leader to an agent of this job; None to any other. With munge this may block.

    A munge credential of this user is valid whatever the leader's key, and is answered with one.
    """
    if not _is_proof(secret, join.proof, _words("join", join, leader_nonce)):
        return None
    secret = Secret(b"", "munge", secret.munge_socket) if is_munge_proof(join.proof) else secret
    return Welcome(proof=_prove(secret, _words("welcome", join, leader_nonce)))


def is_welcome(secret: Secret, answer: Message, join: Join, *, leader_nonce: bytes) -> bool:
    """Whether the answer to a Join proves the leader."""
    return isinstance(answer, Welcome) and _is_proof(secret, answer.proof, _words("welcome", join, leader_nonce))


def _words(role: str, join: Join, leader_nonce: bytes) -> bytes:
    """What a proof is about: all that the agent says, and the leader's nonce. Each part has its length before it."""
    return msgspec.msgpack.encode((role, leader_nonce, msgspec.structs.replace(join, proof=b"")))


def is_munge_proof(proof: bytes) -> bool:
    """Whether a proof is a munge credential."""
    return proof.startswith(b"MUNGE:")


def secret_from_munge(socket: str | None) -> Secret | None:
    """Return a Secret that uses munge credentials; None if this machine has no munge."""
    return Secret(b"", "munge", socket) if shutil.which("munge") and shutil.which("unmunge") else None


def _prove(secret: Secret, words: bytes) -> bytes:
    if secret.key:
        return hmac.digest(secret.key, words, "sha256")
    return _munge("munge", hashlib.sha256(words).hexdigest(), secret.munge_socket).strip().encode()


def _is_proof(secret: Secret, proof: bytes, words: bytes) -> bool:
    if is_munge_proof(proof):
        # unmunge fails for a forged, expired or replayed credential; who made it must be this user.
        read = _munge("unmunge", proof.decode(errors="replace"), secret.munge_socket)
        uid = re.search(r"^UID:.*\((\d+)\)\s*$", read, re.MULTILINE)
        is_own = uid is not None and int(uid[1]) in (os.geteuid(), 0)
        return is_own and read.rstrip().endswith(hashlib.sha256(words).hexdigest())
    return bool(secret.key) and hmac.compare_digest(_prove(secret, words), proof)


def _munge(command: str, text: str, socket: str | None) -> str:
    words = [command, *([f"--socket={socket}"] if socket else [])]
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=MUNGE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
