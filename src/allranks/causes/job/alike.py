"""What must be the same on all nodes: environment, NCCL, software. The majority value is the reference."""

from __future__ import annotations

import re
from collections.abc import Mapping

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Severity

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

WIRE_FLAGS = {"ALLRANKS_COMPRESS": "--compress", "ALLRANKS_BUCKET_MB": "--bucket-mb"}
"""What becomes of these flags of `allranks run` in a worker: its DDP sends other bytes, in other pieces."""

_NODE_BOUND = {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX"}
"""Of those, the ones that follow the node's own devices and may differ for a good reason."""


class EnvDrift(Cause, id="AR503"):
    """The environment differs between nodes.

    ## What it means
    A variable that configures NCCL, Gloo, CUDA or PyTorch has another value on this node than on most, or is set only
    on some nodes. The NCCL configuration files (`/etc/nccl.conf`, `~/.nccl.conf`) are compared too, and so are
    `--compress` and `--bucket-mb` of `allranks run`.

    ## Why it breaks the job
    NCCL does not compare settings between ranks. If two sides choose different algorithms, protocols or transports,
    each waits for data that the other never sends, without an error. Another LD_LIBRARY_PATH loads other libraries.

    ## Example
    From NVIDIA/nccl#969; closed as "environment configure error":

        NCCL WARN NET/IB : req 0/1 tag 0 peer 10.10.23.6<58683> collective mismatch error, local size 496640 remote size 65536

    ## Fix
    Find out where the odd node sets it:

        srun --ntasks-per-node=1 bash -c 'hostname; env | grep -E "^(NCCL|GLOO|TORCH|CUDA|UCX|FI)_|^LD_"; cat /etc/nccl.conf ~/.nccl.conf'

    Common places are /etc/environment, /etc/profile.d, a module that only that node loads, and /etc/nccl.conf. Set the
    variable in one place for all nodes: the batch script. `sbatch` passes the submitting shell's variables to the job
    (`--export`); a login shell on the node may override them.

    ## Source
    NCCL user guide, "Environment variables": https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    (2.30).
    """  # noqa: E501  (a real line, a command)

    message = "{what} differs: {usual}; {odd}"
    fix = (
        "set {what} once for all nodes, in the batch script; on {node}, check the command, /etc/environment, "
        "/etc/profile.d and /etc/nccl.conf"
    )
    exit_code = Exit.NODE_FAULT
    told = "the two sides of a connection use different settings: the environment differs between nodes"
    also = ("AR504", "AR410", "AR590")
    signs = (
        # Ray, check_version_info: "Version mismatch: The cluster was started with: ..." over several lines.
        Sign(r"This process on node (?P<node>[^ ]{1,200}) was started with:", blames=Blames.NAMED),
        Sign(r"Version mismatch: The cluster was started with:", blames=Blames.NOBODY),
    )
    hits = (
        "This process on node 10.0.0.7 was started with:",
        "RuntimeError: Version mismatch: The cluster was started with:",
    )
    misses = (
        "n1:1:1 [0] NCCL INFO NCCL_PROTO set by environment to Simple",
        "n1:1:1 [0] NCCL INFO ENV/Plugin: Could not find: libnccl-env.so",
    )

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
        """The variables of NCCL, Gloo, PyTorch and CUDA must be equal on all nodes; "not set" counts as a value.

        A variable that a node lacks stands in no key of it: who compares the nodes reads that as not set.
        """
        if card.facts is None or "environment" in card.facts.unread:
            return None
        values: dict[str, str | None] = {
            WIRE_FLAGS.get(name, name): value
            for name, value in card.facts.environment.items()
            if not _OWN.fullmatch(name)
        }
        if "nccl_conf" in card.facts.unread:
            values["NCCL configuration files"] = None
        elif card.facts.nccl_conf is not None:
            values["NCCL configuration files"] = f"sha256 {card.facts.nccl_conf[:12]}"
        return values

    @classmethod
    def severity_of(cls, key: str) -> Severity:
        """What both sides of a connection must agree on fails; the rest warns."""
        return Severity.FAIL if _BREAKING.fullmatch(key) and key not in _NODE_BOUND else Severity.WARN


class NcclVersionMismatch(Cause, id="AR504"):
    """NCCL or its network plugin differs between nodes.

    ## What it means
    This node would load another version of NCCL than the others. Or it has a network plugin (`libnccl-net.so`) that
    they lack, or lacks the one that they have.

    ## Why it breaks the job
    With two versions, NCCL fails with "invalid usage" and names the odd rank only by number. With two plugins it prints
    nothing: each side waits on its own transport.

    ## Example
    From NCCL 2.30, src/init.cc; a plugin on some nodes only: NVIDIA/nccl#1634:

        init.cc:1039 NCCL WARN Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22703

    ## Fix
    Show what each node loads:

        srun --ntasks-per-node=1 python -c 'import os, torch; print(os.uname().nodename, torch.cuda.nccl.version())'
        ldconfig -p | grep nccl; echo $LD_LIBRARY_PATH

    Use one environment for all nodes, on the shared file system or in one image. To run without the plugin, set
    `NCCL_NET_PLUGIN=none` on all nodes.

    ## Source
    NCCL user guide, NCCL_NET_PLUGIN: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (2.30).
    """

    message = "{what} differs: {usual}; {odd}"
    fix = "use one environment on all nodes; on {node}: ldconfig -p | grep nccl; echo $LD_LIBRARY_PATH"
    exit_code = Exit.NODE_FAULT
    told = "the ranks use different versions of NCCL"
    also = ("AR503", "AR410")
    signs = (
        # NCCL, src/init.cc (2.4 to 2.30): first the other rank, then the one that speaks.
        Sign(
            r"Mismatched NCCL version detected : rank (?P<rank>[0-9]+) version (?P<version>[0-9]+) rank [0-9]+ version "
            r"(?P<own_version>[0-9]+)",
            blames=Blames.NAMED,
        ),
        Sign(r"Error: NCCL version mismatch", Role.LIKELY),
        # A libtorch that was built for a newer NCCL than the one that LD_LIBRARY_PATH brings.
        Sign(r"undefined symbol: (?P<thing>p?nccl[A-Z][A-Za-z0-9_]+)", Role.LIKELY, confidence=Confidence.LIKELY),
    )
    hits = (
        "RuntimeError: Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22703",
        "n2:812:812 [0] init.cc:1039 NCCL WARN Mismatched NCCL version detected : rank 1 version 22705 rank 0 "
        "version 22703",
        "RuntimeError: NCCL version mismatch",
        "ImportError: /opt/venv/lib/python3.10/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: "
        "ncclCommRegister",
    )
    misses = (
        "init.cc:1247 NCCL WARN Mismatched collective detected, please check your collective calls",
        "NCCL version 2.18.1+cuda12.1",
        "n1:1:1 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.",
    )
    no_fault_yet = "the lab's nodes have one PyTorch, built without NCCL"

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
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


class SoftwareDiffers(Cause, id="AR505"):
    """PyTorch, Python or another package differs between nodes.

    ## What it means
    This node would run the job with another version than most nodes.

    ## Why it breaks the job
    Two versions of PyTorch may order their collectives differently, or divide gradients into different buckets: the job
    hangs in the first step, or fails with sizes that do not match. An older Python cannot read objects that a newer one
    pickled. Often the node uses another environment: a file system is not mounted, or a local copy is outdated.

    ## Example
    A finding of allranks:

        AR505 software-differs   node04   torch differs: 5 of 6 nodes have 2.13.0; node04 has 2.4.0

    ## Fix
    Show what each node runs:

        srun --ntasks-per-node=1 bash -c 'hostname; which python; python -c "import torch; print(torch.__version__, torch.__file__)"'

    Use one environment for all nodes, on the shared file system or in one image, and the same `source .../activate` in
    the batch script. If the node has a local copy, recreate it.

    ## Source
    PyTorch, DistributedDataParallel, "Internal design" (buckets in the order of the parameters, equal on all ranks):
    https://docs.pytorch.org/docs/stable/notes/ddp.html (2.13).
    """  # noqa: E501  (a command)

    message = "{what} differs: {usual}; {odd}"
    fix = (
        "use one environment on all nodes; on {node}: which python, and check that its file system is mounted (findmnt)"
    )
    exit_code = Exit.NODE_FAULT

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
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

    @classmethod
    def severity_of(cls, key: str) -> Severity:
        """PyTorch, its CUDA, Python and allranks must be equal; the rest warns."""
        return Severity.FAIL if key in {"torch", "CUDA of torch", "Python", "allranks"} else Severity.WARN
