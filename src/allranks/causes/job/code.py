"""Would all nodes run the same code? The script must be the same on all nodes; the modules beside it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allranks.causes.cause import Cause, Outcome
from allranks.causes.net.cards import most_common, with_facts
from allranks.model.card import MAX_CODE_FILES, Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Status
from allranks.model.hostlist import fold_hosts

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


class CodeDiffers(Cause, id="AR513"):
    """The nodes would run different code.

    ## What it means
    The training script, or a Python file beside it, differs on this node from most. Each node has its own copy (no
    shared file system, an image, a `git pull` that one node missed), or another directory is mounted there. allranks
    compares the bytes of the script and of the other .py files in its directory, up to 200 files and 4 MiB. It does not
    check modules elsewhere.

    ## Why it breaks the job
    Ranks that run different code call different collectives, in another order or with other sizes. The job hangs in the
    first step, fails with an error about shapes, or trains something that nobody intended. A different script stops the
    job. A different file beside it is a warning, because the script may not use it.

    ## Example
    DistributedDataParallel's error if the model differs:

        RuntimeError: DDP expects same model across all ranks, but Rank 0 has 10 params, while rank 1 has inconsistent 8 params.

    ## Fix
    Compare the nodes, then update the odd one:

        srun --ntasks-per-node=1 bash -c 'hostname; sha256sum train.py *.py'
        git -C DIR status; git -C DIR log -1                 # on each node
        rsync -a DIR/ NODE:DIR/

    To prevent it, use one directory on a shared file system, or one image. If the nodes should run different scripts,
    use `--ignore AR513`.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/reducer.cpp, verify_params_across_processes (2.13); DistributedDataParallel,
    "Internal design": https://docs.pytorch.org/docs/stable/notes/ddp.html (2.13).
    """  # noqa: E501  (a real line)

    message = "{what} differs: {usual}; {odd}"
    fix = (
        "update the code on {node} (git pull, rsync), or start from one shared directory; sha256sum *.py shows the "
        "difference"
    )
    exit_code = Exit.NODE_FAULT

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
        """The bytes of the training script must be equal on all nodes."""
        facts = card.facts
        if facts is None or (facts.code is None and "code" not in facts.unread):
            return None
        return {SCRIPT: None if facts.code is None else f"sha256 {facts.code.digest[:12]}"}

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
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
