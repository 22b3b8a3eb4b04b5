"""Can the job write to the run directory, TMPDIR and HOME, and is the run directory shared?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from allranks.causes.cause import PASSED, Cause, Outcome, failed, skipped, unknown, warned
from allranks.causes.node.limits import GIB, MIB, size_text
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card, Place
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_PATH = r"(?P<thing>[\w.~-]{0,200}/[\w./-]{1,300}\w)"
_WRITTEN_TO = ("run directory", "TMPDIR", "HOME")
FILES_OF_RANK, FILES_OF_NODE = 4, 12
"""That a job makes in its run directory, at least."""
FEW_INODES = 1000


class DiskFull(Cause, id="AR005"):
    """A disk that the job writes to is full.

    ## What it means
    The run directory, TMPDIR or HOME has almost no free space, no inodes for more files, or its quota is used up.

    ## Why it breaks the job
    The first write that does not fit fails and ends a rank. It may be a log line, a compiled kernel in TMPDIR or
    `~/.cache`, or most often the checkpoint, which is then incomplete. The other ranks wait for it in a collective.

    ## Example
    CPython's text for ENOSPC:

        OSError: [Errno 28] No space left on device

    ## Fix
    Find out which file system is full, and with what:

        df -h "$TMPDIR" "$HOME"; df -i "$TMPDIR"; du -xsh "$TMPDIR"/* | sort -h | tail

    On a file system with quotas, use `quota -s`, or `lfs quota -h -u $USER DIRECTORY` on Lustre. Leftover files of
    earlier jobs in TMPDIR often fill a node's local disk. To continue at once, set another TMPDIR, use `--log-dir` on
    another file system, or exclude that node.

    ## Source
    statvfs(3) and errno(3), Linux man-pages 6.9. Kubernetes, pkg/kubelet/eviction/helpers.go.
    """

    message = "{place} ({path}) has {free} left"
    told = "a disk is full, or a quota is used up"
    fix = "on {node}: df -h {path}; remove old files there, or use another place (TMPDIR, --log-dir)"
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.ENDS_RANKS, Trait.FILLS_A_DIRECTORY})
    signs = (
        # A path in /dev/shm is another cause.
        Sign(
            r"\[[Ee]rrno 28\] No space left on device(?:$|[^:]|: [^'\"]|"
            r": (?:['\"][^'\"]{1,300}['\"] -> )?['\"](?P<thing>(?:[^/'\"]|/[^d'\"]|/d[^e'\"]|/de[^v'\"])[^'\"]{0,300}))"
        ),
        Sign(r"\[Errno 122\] Disk quota exceeded(?:: '(?P<thing>[^']{1,300}))?"),
        Sign(
            r"(?:write error|write failed|writing|write|cannot (?:create|write|mkdir).{1,200}): No space left on device"
        ),
        Sign(r"(?::|failed with) Disk quota exceeded"),
        Sign(r"failed with (?:strerror: )?No space left on device"),
        Sign(r"\[No space left on device\]"),
        Sign(r"error (?:writing to|closing) (?P<thing>[^:]{1,300}): No space left on device"),
        Sign(r"OperationalError: database or disk is full"),
        Sign(r"Not enough free space to write [0-9]+ bytes"),
        Sign(r"Not enough disk space\. Needed:"),
        Sign(r"errno = (?:28|122), error message = "),
        Sign(r"kind: StorageFull"),
        Sign(r"(?:No space left on device|Disk quota exceeded) \(os error (?:28|122)\)"),
        Sign(r"PytorchStreamWriter failed writing file", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"unexpected pos [0-9]+ vs [0-9]+", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"basic_ios::clear: iostream error", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(r"LustreError: .{0,200}\brc = -(?:28|122)\b", Role.LIKELY),
        Sign(r"OSError: [0-9]+ requested and [0-9]+ written", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"write error: wrote [0-9]+ blocks instead of [0-9]+", Role.LIKELY, confidence=Confidence.LIKELY),
        # Kubernetes evicts (pkg/kubelet/eviction/helpers.go).
        Sign(r"The node was low on resource: ephemeral-storage", blames=Blames.NOBODY),
        Sign(r"The node had condition: \[DiskPressure\]", blames=Blames.NOBODY),
        Sign(r"ephemeral local storage usage exceeds the total limit of containers", blames=Blames.NOBODY),
        Sign(r"exceeded its local ephemeral storage limit", blames=Blames.NOBODY),
        Sign(
            r"Usage of EmptyDir volume \"(?P<thing>[^\"]{1,100})\" exceeds the limit",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        # What was being written, as the line before tells: Transformers, DeepSpeed, Megatron, fvcore.
        Sign(
            r"[Ss]aving (?:[a-z]{1,12} )?checkpoint(?: at iteration {1,8}[0-9]{1,9})?(?: to|:) " + _PATH,
            Role.CONTEXT,
            Blames.NOBODY,
        ),
        Sign(r"\[Torch\] Saving " + _PATH, Role.CONTEXT, Blames.NOBODY),
    )
    hits = (
        "File.lua:210: write error: wrote 39776036 blocks instead of 41251350 at THDiskFile.c:340",
        "The node was low on resource: ephemeral-storage. Threshold quantity: 10120387530, available: 9702960Ki.",
        "Pod The node had condition: [DiskPressure]. ",
        "Pod ephemeral local storage usage exceeds the total limit of containers 5Gi.",
        'Container main exceeded its local ephemeral storage limit "2Gi". ',
        'Usage of EmptyDir volume "scratch" exceeds the limit "10Gi". ',
        "OSError: [Errno 28] No space left on device",
        "OSError: [Errno 122] Disk quota exceeded: '/home/alice/.cache/torch'",
        "OSError: [Errno 28] No space left on device: '/scratch/run7/checkpoint-600/optimizer.pt'",
        "OSError: [Errno 28] No space left on device: '/data/model.bin' -> '/scratch/run7/model.bin'",
        "OSError: [Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device",
        "RuntimeError: write(): fd 3 failed with No space left on device",
        "RuntimeError: [enforce fail at inline_container.cc:747] . open file failed with strerror: No space left on "
        "device",
        "RuntimeError: filesystem error: cannot create directories: No space left on device [/scratch/ckpt/7] "
        "[No space left on device]",
        "{standard input}: fatal error: error writing to /scratch/tmp/ccVqXa3x.s: No space left on device",
        "sqlite3.OperationalError: database or disk is full",
        "OSError: Not enough free space to write 80000000 bytes after offset 128",
        "OSError: Not enough disk space. Needed: 1.14 GiB (download: 336.4 MiB, generated: 549.42 MiB)",
        "OSError: 20000000 requested and 5238784 written",
        "safetensors_rust.SafetensorError: Error while serializing: I/O error: Disk quota exceeded (os error 122)",
        "slurmstepd: error: write: No space left on device",
        "tee: train.log: Disk quota exceeded",
        "OSError: Can't write data (file write failed: time = Fri, errno = 28, error message = 'No space left on "
        "device')",
        "safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "
        '"No space left on device" })',
        "Error: failed to write shard: No space left on device (os error 28)",
        "RuntimeError: [enforce fail at inline_container.cc:471] . PytorchStreamWriter failed writing file data/12: "
        "file write failed",
        "RuntimeError: [enforce fail at inline_container.cc:337] . unexpected pos 704 vs 598",
        "RuntimeError: basic_ios::clear: iostream error",
        "LustreError: 11-0: scratch-OST0004-osc: operation ost_write to node 10.0.0.4 failed: rc = -28",
        "[INFO|trainer.py:2926] 2023-10-19 09:48:54,430 >> Saving model checkpoint to out/run7/checkpoint-10",
        "[2023-06-02 00:34:14,497] [INFO] [torch_checkpoint_engine.py:21:save] [Torch] Saving ./out/step10/optim.pt...",
        "saving checkpoint at iteration    1000 to /ckpt/gpt in torch_dist format",
    )
    misses = (
        "misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, "
        "error: No space left on device (28)",
        "gpu2-ru7:2143:2561 [1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
        "OSError: [Errno 28] No space left on device: '/dev/shm/torch_2194_3017881412_12'",
        "RuntimeError: unable to write to file </torch_2194_3017881412_12>: No space left on device (28)",
    )
    also = ("AR606",)

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails with less than 64 MiB free in the run directory or TMPDIR, or without inodes for this node's files in
        the run directory; warns below 1 GiB or 1000 inodes, or if HOME is full."""
        if card.facts is None:
            return unknown("this node reported no facts")
        places = [place for place in card.facts.places if place.purpose in _WRITTEN_TO]
        known = {place.purpose: place for place in places if place.free_bytes is not None}
        worst = PASSED
        for purpose in _WRITTEN_TO:
            place = known.get(purpose)
            if place is None or place.free_bytes is None:
                continue
            if is_full(place) and purpose != "HOME":
                return failed(str(place.problem), place=purpose, path=place.path, free=_free(place))
            values = {"place": purpose, "path": place.path, "free": _free(place)}
            if place.free_bytes < 64 * MIB and purpose != "HOME":
                return failed(**values)
            if place.free_inodes is not None and place.free_inodes < FEW_INODES:
                values["free"] = f"{place.free_inodes} free inodes (df -i)"
                if purpose == "run directory" and place.free_inodes < FILES_OF_NODE + FILES_OF_RANK * card.num_workers:
                    return failed(**values)
                worst = worst if worst is not PASSED else warned(**values)
            is_scarce = is_full(place) or place.free_bytes < (64 * MIB if purpose == "HOME" else GIB)
            if is_scarce and worst is PASSED:
                worst = warned(**values)
        if worst is not PASSED:
            return worst
        for place in places:
            if place.free_bytes is None:
                return unknown(f"{place.purpose}: {place.problem}")
        return PASSED if places else unknown(card.facts.unread.get("places", "no directory was checked"))


class RunDirNotShared(Cause, id="AR006"):
    """A node does not see the leader's run directory.

    ## What it means
    The leader wrote a file into the run directory. On this node the same path does not show that file, shows another
    one, or is not writable. The path is on a local disk there, or another file system is mounted.

    ## Why it breaks the job
    Logs, verdict and checkpoints of one job are spread over several places, and those on local disks are lost with the
    node. Sharded checkpoints are incomplete, so the job cannot resume. If the leader is found through the run
    directory, this node cannot find it.

    ## Example
    A line of allranks where a node cannot see the leader's announcement:

        still waiting for node03 (rank 3) after 6 s; 5 of 6 nodes have joined

    ## Fix
    Compare which file systems are mounted:

        srun --ntasks-per-node=1 bash -c 'hostname; findmnt --target RUN_DIRECTORY'

    Then choose a directory that all nodes share with `--log-dir`, or mount it on the odd node (`mount -a` as root, and
    check `systemctl --failed`). A container must bind it too.

    ## Source
    findmnt(8), util-linux 2.38. What allranks keeps there: docs of `allranks run`.
    """

    message = "run directory {path} is not usable on {node}: {what}"
    told = "a directory of the job is missing on a node"
    fix = "choose a directory that all nodes share: --log-dir; or mount it on {node} (findmnt --target {path})"
    exit_code = Exit.NODE_FAULT
    signs = (
        Sign(
            r"couldn't chdir to [`'](?P<thing>[^`']{1,300})': No such file or directory: going to /tmp instead",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"Could not open std(?:out|err) file (?P<thing>[^:]{1,300}): No such file or directory",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
    )
    hits = (
        "slurmstepd: error: couldn't chdir to `/home/alice/run': No such file or directory: going to /tmp instead",
        "slurmstepd: error: Could not open stdout file /scratch/alice/slurm-123.out: No such file or directory",
    )
    misses = ("FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'",)

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Reports on which nodes the run directory could not be checked, which proves nothing."""
        place = _run_directory(card)
        if place is None:
            return skipped("no run directory was checked")
        if place.free_bytes is None and place.problem is not None:
            return unknown(f"{place.path}: {place.problem}")
        return PASSED

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails if a node does not see the leader's file in the run directory, or may not write there."""
        places = {card.host: _run_directory(card) for card in cards}
        leaders = [card for card in cards if card.came_by is None]
        leader = max(
            leaders or cards, key=lambda card: bool((place := places[card.host]) and place.nonce), default=None
        )
        theirs = places[leader.host] if leader else None
        if leader is None or theirs is None:
            return []
        found: list[tuple[tuple[str, ...], Outcome]] = []
        others = [host for host, place in places.items() if place and host != leader.host]
        blind = [host for host in others if (place := places[host]) and _is_elsewhere(place, theirs)]
        # Where nobody sees what the leader wrote, the leader is the odd one.
        is_leaders = len(blind) == len(others) > 1
        if is_leaders:
            alone = f"none of the {len(others)} other nodes sees the file that {leader.host} wrote"
            found.append(((leader.host,), failed(path=theirs.path, what=alone)))
        for card in cards:
            place = places[card.host]
            what = _objection(place, theirs, leader.host) if place else None
            if place and what and not (is_leaders and card.host in blind):
                found.append(((card.host,), failed(path=place.path, what=what)))
        return found


def is_full(place: Place) -> bool:
    """Whether the file system refused a block, by space or by quota."""
    return bool(re.search("No space left|quota exceeded", place.problem or "", re.IGNORECASE))


def _free(place: Place) -> str:
    if is_full(place):
        return "no space"
    return size_text(place.free_bytes or 0)


def _run_directory(card: Card) -> Place | None:
    return next((p for p in card.facts.places if p.purpose == "run directory"), None) if card.facts else None


def _is_elsewhere(place: Place, theirs: Place) -> bool:
    """Whether a node does not see what the leader wrote, though it could look."""
    if place.problem is not None and place.free_bytes is None:
        return "No such file" in place.problem
    return theirs.nonce is not None and place.nonce != theirs.nonce


def _objection(place: Place, theirs: Place, leader: str) -> str | None:
    """What speaks against this node's run directory, or None."""
    if is_full(place):
        return None  # AR005 says so
    if place.is_writable is False:
        return f"it is not writable: {place.problem or 'no permission'}"
    if place.problem is not None:
        return "the directory does not exist" if "No such file" in place.problem else None
    if theirs.nonce is None or place.nonce == theirs.nonce:
        return None
    if place.nonce is None:
        return f"the file that {leader} wrote is missing, so this is another directory of the same name"
    return f"it shows another file than {leader} wrote, so this is another directory of the same name"
