"""Do all nodes run the same code, with the same environment and software, and with sane timeouts?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allranks.causes.outcome import PASSED, Alike, Checks, Outcome, Surveyed, unknown, warned
from allranks.causes.probes.cards import most_common, with_facts
from allranks.model.card import MAX_CODE_FILES, WIRE_FLAGS, Card
from allranks.model.finding import Confidence, Severity, Status
from allranks.model.hostlist import fold_hosts

# What must be the same on all nodes: environment, NCCL, software. The majority value is the reference.

_OWN = re.compile(
    r"(?:NCCL|GLOO|UCX|FI)_.*(?:IFNAME|IFACE|NET_DEVICES)|NCCL_HOSTID|(?:CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES"
    r"|NCCL_DEBUG(?:_SUBSYS|_FILE|_TIMESTAMP\w*)?|TORCHELASTIC_.*|.*_(?:DIR|HOME|CACHE)"
)
"""Variables that each node may have its own value of: names of devices, what is logged, caches."""

_BREAKING = re.compile(
    r"NCCL_(?:ALGO|PROTO|IB_.*|NET|NET_.*|P2P_.*|SHM_DISABLE|CROSS_NIC)|GLOO_DEVICE_TRANSPORT|NCCL configuration files"
    r"|--compress|--bucket-mb"
)
"""Variables by which two sides of a connection must agree."""

_NODE_BOUND = {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX"}
"""Of those, the ones that follow the node's own devices and may differ for a good reason."""


def collect_env_drift(card: Card) -> Alike:
    """The variables of NCCL, Gloo, PyTorch and CUDA must be equal on all nodes; "not set" counts as a value.

    A variable that a node lacks stands in no key of it: who compares the nodes reads that as not set.
    """
    if card.facts is None or "environment" in card.facts.unread:
        return None
    values: dict[str, str | None] = {
        WIRE_FLAGS.get(name, name): value for name, value in card.facts.environment.items() if not _OWN.fullmatch(name)
    }
    if "nccl_conf" in card.facts.unread:
        values["NCCL configuration files"] = None
    elif card.facts.nccl_conf is not None:
        values["NCCL configuration files"] = f"sha256 {card.facts.nccl_conf[:12]}"
    return values


def weigh_env_drift(key: str) -> Severity:
    """What both sides of a connection must agree on fails; the rest warns."""
    return Severity.FAIL if _BREAKING.fullmatch(key) and key not in _NODE_BOUND else Severity.WARN


def collect_nccl_version_mismatch(card: Card) -> Alike:
    """The NCCL that PyTorch would load, and NCCL's network plugin, must be equal on all nodes."""
    facts = card.facts
    if facts is None:
        return None
    # A PyTorch with CUDA always has NCCL, though its version cannot always be seen from outside.
    is_hidden = "nccl_version" in facts.unread or facts.torch_cuda is not None
    return {
        "NCCL": facts.nccl_version or (None if is_hidden else "none"),
        "NCCL network plugin": None if "net_plugin" in facts.unread else facts.net_plugin or "none",
    }


def collect_software_differs(card: Card) -> Alike:
    """PyTorch with its CUDA, Python and allranks must be equal; other packages, glibc and patch levels warn."""
    facts = card.facts
    if facts is None or "packages" in facts.unread:
        return None
    has_torch = "torch" in facts.packages and "torch_cuda" not in facts.unread
    values: dict[str, str | None] = {
        "torch": facts.packages.get("torch", "not installed"),
        "CUDA of torch": facts.torch_cuda or "none" if has_torch else None,
        "Python": facts.python_version.rpartition(".")[0] or None,
        "allranks": facts.allranks_version or None,
        "patch level of Python": facts.python_version or None,
        "glibc": facts.glibc_version,
    }
    for name, version in facts.packages.items():
        if name != "torch" and not name.startswith("nvidia-nccl"):  # NCCL is AR504's
            values[name] = version
    return values


def weigh_software_differs(key: str) -> Severity:
    """PyTorch, its CUDA, Python and allranks must be equal; the rest warns."""
    return Severity.FAIL if key in {"torch", "CUDA of torch", "Python", "allranks"} else Severity.WARN


# Would all nodes run the same code? The script must be the same on all nodes; the modules beside it should be.

SCRIPT = "the training script"

ABSENT = "missing"

MAX_NAMED = 4
"""Files that a message names."""

MAX_SHOWN = 8
"""Files whose hashes stand in the evidence."""


@dataclass(frozen=True, slots=True)
class _Difference:
    """One file that is not the same on all nodes."""

    digests: Mapping[str, str]
    """By node."""
    usual: str | None
    """What more than half of them have."""

    @property
    def culprits(self) -> tuple[str, ...]:
        return tuple(host for host, digest in self.digests.items() if self.usual is None or digest != self.usual)

    def __str__(self) -> str:
        hosts: dict[str, list[str]] = {}
        for host, digest in self.digests.items():
            hosts.setdefault(digest, []).append(host)
        parts = sorted(hosts.items(), key=lambda part: -len(part[1]))[:4]
        return "; ".join(f"{fold_hosts(names)} {digest}" for digest, names in parts)


def collect_code_differs(card: Card) -> Alike:
    """The bytes of the training script must be equal on all nodes."""
    facts = card.facts
    if facts is None or (facts.code is None and "code" not in facts.unread):
        return None
    return {SCRIPT: None if facts.code is None else f"sha256 {facts.code.digest[:12]}"}


def survey_code_differs(cards: Sequence[Card]) -> Surveyed:
    """Warns if a .py file beside the script differs, or is missing on some nodes."""
    beside = {
        card.host: facts.code.beside
        for card, facts in with_facts(cards)
        if facts.code is not None and facts.code.beside is not None
    }
    if len({tuple(files.items()) for files in beside.values()}) < 2:
        return []  # as on most jobs: no file is looked at
    groups: dict[tuple[tuple[str, ...], bool], dict[str, _Difference]] = {}
    for name in sorted({name for files in beside.values() for name in files}):
        found = _compare_file(name, beside)
        if found is not None:
            groups.setdefault((found.culprits, found.usual is None), {})[name] = found
    return [(hosts, _outcome(hosts, files)) for (hosts, _), files in groups.items()]


def _compare_file(name: str, beside: Mapping[str, Mapping[str, str | None]]) -> _Difference | None:
    """What the nodes have under this name, as far as each of them looked; None where it is one and the same."""
    digests = {}
    for host, files in beside.items():
        # A list at its end says nothing of further names.
        is_cut = name not in files and len(files) >= MAX_CODE_FILES
        digest = files.get(name, ABSENT)
        if digest is not None and not is_cut:
            digests[host] = digest if digest == ABSENT else digest[:12]
    if len(set(digests.values())) < 2:
        return None
    return _Difference(digests, most_common(digests.values()))


def _outcome(hosts: Sequence[str], files: Mapping[str, _Difference]) -> Outcome:
    names = [*files]
    more = [f"and {len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    first = files[names[0]]
    is_decided = first.usual is not None
    num_usual = len(first.digests) - len(hosts)
    folded = fold_hosts(list(hosts))
    values = {
        "what": f"code beside the script ({', '.join(names[:MAX_NAMED] + more)})",
        "usual": f"{num_usual} of {len(first.digests)} nodes have the same"
        if is_decided
        else "no version has a majority",
        "odd": f"{folded} {'differs' if len(hosts) == 1 else 'differ'}" if is_decided else f"{folded} differ",
    }
    return Outcome(
        Status.WARN,
        values=values,
        evidence=tuple(f"{name}: {files[name]}" for name in names[:MAX_SHOWN]),
        confidence=Confidence.CERTAIN if is_decided else Confidence.UNDECIDED,
    )


# Do variables change the timeouts of collectives by accident?


def probe_timeout_by_accident(card: Card) -> Outcome:
    """Warns about variables that shorten or disable the timeout of collectives, or have no effect."""
    if card.facts is None:
        return unknown("this node reported no facts")
    said = [
        (name, value, why)
        for name, value in sorted(card.facts.environment.items())
        if (why := _surprise(name, value)) is not None
    ]
    if not said:
        return PASSED
    name, value, why = said[0]
    return warned(*(f"{n}={v}: {w}" for n, v, w in said), what=f"{name}={value} {why}", variable=name)


_DEAD_NAMES = {
    "NCCL_TIMEOUT": "has no effect: no program reads it",
    "NCCL_BLOCKING_WAIT": "is the old name of TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "is the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "is the old name of TORCH_NCCL_DESYNC_DEBUG",
}


def _surprise(name: str, value: str) -> str | None:
    """What this variable does that few expect; None where it does nothing of the kind."""
    if name in _DEAD_NAMES:
        return _DEAD_NAMES[name]
    if name == "TORCH_NCCL_BLOCKING_WAIT" and value not in ("", "0"):
        return "blocks the CPU in each collective and switches the watchdog's error handling off"
    if name == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and value == "0":
        return "switches error handling off: a rank whose peer died waits forever"
    if name == "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" and value.isdecimal() and int(value) < 60:
        return "ends ranks that compile or save a checkpoint for longer than that"
    return None


CHECKS = {
    "AR503": Checks(alike=collect_env_drift, severity_of=weigh_env_drift),
    "AR504": Checks(alike=collect_nccl_version_mismatch),
    "AR505": Checks(alike=collect_software_differs, severity_of=weigh_software_differs),
    "AR510": Checks(probe=probe_timeout_by_accident),
    "AR513": Checks(alike=collect_code_differs, survey=survey_code_differs),
}
