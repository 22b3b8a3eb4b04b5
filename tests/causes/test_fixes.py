"""Fixes fit their readers: no command of another scheduler or vendor, and none with a name that nobody knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec
import pytest

import allranks
from allranks.causes.book import all_causes, find_cause
from allranks.causes.outcome import failed
from allranks.guard.guard_verdict import name_fault
from allranks.model.fix import ANYBODY, Fix, Reader, SchedulerKind, Vendor, fields_of, find_scheduler

READERS = [Reader(scheduler, vendor) for scheduler in SchedulerKind for vendor in Vendor]
IN_A_POD = Reader(SchedulerKind.POD)
BY_HAND = Reader(SchedulerKind.NONE)
ON_AMD = Reader(vendor=Vendor.AMD)
CAUSES = [cause for cause in all_causes() if not cause.is_outcome]

LEAVE_OUT = Fix(text="start without {node}", slurm="[: --exclude={node}]", pod=" (kubectl cordon)", none="")
LIST = Fix(nvidia="on {node}: nvidia-smi", amd="on {node}: rocm-smi", slurm="[; allranks stack {job}]", pod="", none="")

CHOICES = {
    "SLURM": (LEAVE_OUT, ANYBODY, {"node": "node03"}, "start without node03: --exclude=node03"),
    "several nodes": (LEAVE_OUT, ANYBODY, {"node": "node[03-04]"}, "start without node[03-04]: --exclude=node[03-04]"),
    "one of two nodes": (LEAVE_OUT, ANYBODY, {"node": "node03 or node04"}, "start without node03 or node04"),
    "no node": (LEAVE_OUT, ANYBODY, {}, "start without that node"),
    "a pod": (LEAVE_OUT, IN_A_POD, {"node": "train-3"}, "start without train-3 (kubectl cordon)"),
    "by hand": (LEAVE_OUT, BY_HAND, {"node": "node03"}, "start without node03"),
    "NVIDIA": (LIST, BY_HAND, {"node": "a"}, "on a: nvidia-smi"),
    "AMD": (LIST, ON_AMD, {"node": "a"}, "on a: rocm-smi"),
    "a job": (LIST, Reader(job="4711"), {"node": "a"}, "on a: nvidia-smi; allranks stack 4711"),
    "several parts": (Fix(text="a[ {node}][ {port}] [b]"), ANYBODY, {"port": 1}, "a 1 [b]"),
    "several variables": (Fix(text="[unset {variable}]"), ANYBODY, {"variable": "A B"}, "unset A B"),
    "none": (Fix(), ANYBODY, {"node": "a"}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_a_fix_is_chosen_for_its_reader_and_for_what_is_known(case: str) -> None:
    fix, reader, values, told = CHOICES[case]
    assert fix.tell(reader, values) == told


def test_a_value_without_a_word_must_be_in_brackets() -> None:
    with pytest.raises(KeyError, match="port"):
        Fix(text="ss -ltnp {port}").tell(ANYBODY, {})


def forgotten(fix: Fix) -> list[str]:
    """Keys that a table of fixes lacks: of schedulers and of vendors, all are given or none."""
    given = {name for name, text in msgspec.structs.asdict(fix).items() if text is not None}
    return [
        f"fix.{name}" for kind in (SchedulerKind, Vendor) if given & set(kind) for name in kind if name not in given
    ]


def test_no_scheduler_and_no_vendor_is_forgotten() -> None:
    assert {cause.id: keys for cause in CAUSES if (keys := forgotten(cause.fix))} == {}
    assert forgotten(Fix(text="a", slurm="b", none="", amd="c")) == ["fix.pod", "fix.nvidia"]


OF_SLURM = re.compile(
    r"\b(?:sbatch|srun|scontrol|sinfo|sacct|slurmd?)\b|--exclude|--mem\b|#SBATCH|SLURM", re.IGNORECASE
)
OF_NVIDIA = re.compile(r"nvidia-smi|dcgmi|compute-sanitizer")
OF_AMD = re.compile(r"rocm-smi|AMD_SERIALIZE|\brvs\b")
OF_KUBERNETES = re.compile(r"kubectl|resources\.limits|\bpods?\b")
ABOUT_ONE = {"AR501", "AR502"}
"""Causes that are about SLURM itself: their fixes may name it to everybody."""


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: f"{reader.scheduler}-{reader.vendor}")
def test_no_fix_names_a_command_that_its_reader_lacks(reader: Reader) -> None:
    told = {cause.id: cause.fix.template(reader) for cause in CAUSES}
    foreign = [OF_SLURM] if reader.scheduler is not SchedulerKind.SLURM else []
    foreign += [OF_KUBERNETES] if reader.scheduler is not SchedulerKind.POD else []
    foreign += [OF_NVIDIA] if reader.vendor is Vendor.AMD else [OF_AMD]
    found = {(id_, match[0]) for id_, text in told.items() for words in foreign if (match := words.search(text))}
    assert {(id_, word) for id_, word in found if id_ not in ABOUT_ONE} == set()


COMMANDS = re.compile(
    r"(?:^|[;:(,|] ?)(?:sinfo|ip|ss|df|ethtool|findmnt|getent|nvidia-smi|rocm-smi|allranks|kubectl|sacct|mount|ping|"
    r"systemctl|dmesg|unset|kill|modprobe|chronyc|nft|conntrack)\b[^;:,(]*"
)
"""Commands in a fix, each with what follows it."""


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: f"{reader.scheduler}-{reader.vendor}")
def test_no_command_names_what_nobody_knows(reader: Reader) -> None:
    told = {cause.id: cause.fix.tell(reader, {}) or "" for cause in CAUSES}
    words = re.compile(r"<[a-z ]+>|\bJOB\b|\bNODE\b|\bADDRESS\b|=(?:that|the|its|a) |\brank_N\b|[{}]")
    assert {id_: text for id_, text in told.items() if words.search(text)} == {}
    unknown = re.compile(
        r"(?<!on )(?<!of )(?<!lists )(?:that node|the data interface|the interfaces|that of most|the job's ports)"
    )
    commands = {id_: [match[0] for match in COMMANDS.finditer(text)] for id_, text in told.items()}
    assert {id_: found for id_, found in commands.items() if any(map(unknown.search, found))} == {}


def test_every_other_value_is_in_a_sentence_or_in_brackets() -> None:
    assert [cause.id for cause in CAUSES for reader in READERS if not cause.fix.tell(reader, {})] == []


def test_a_variable_is_unset_only_where_it_is_set() -> None:
    fixes = {cause.id: cause.fix.template(ANYBODY) for cause in CAUSES}
    unset = {id_: text for id_, text in fixes.items() if re.search(r"\bunset\b", text)}
    assert {id_ for id_, text in unset.items() if "variable" not in fields_of(text)} == {"AR501"}
    assert [id_ for id_ in unset if id_ != "AR501" and "unset" in str(find_cause(id_).fix.tell(ANYBODY, {}))] == []


def calls_without_reader(source: str) -> list[str]:
    """The ids of causes whose fix depends on the reader, where a finding is made for nobody."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in ("to_finding", "name_fault"):
            given = {keyword.arg for keyword in call.keywords}  # None: **more
            ids = re.findall(r"AR\d{3}", ast.unparse(call.args[0])) if call.args else []
            found += [id_ for id_ in ids if not given & {"reader", "fix", None} and depends_on_reader(id_)]
    return found


def depends_on_reader(cause_id: str) -> bool:
    return len({find_cause(cause_id).fix.template(reader) for reader in READERS}) > 1


def test_every_finding_is_made_for_a_reader() -> None:
    package = Path(allranks.__file__).parent
    found = {path.name: calls_without_reader(path.read_text()) for path in package.rglob("*.py")}
    assert {name: ids for name, ids in found.items() if ids} == {}
    assert calls_without_reader("failed(what='').to_finding(find_cause('AR001'), node='a')") == ["AR001"]
    assert calls_without_reader("name_fault('AR012', 'gone', reader=reader); name_fault('AR509', '')") == []


@pytest.mark.parametrize(
    ("env", "scheduler"),
    [
        ({}, SchedulerKind.NONE),
        ({"SLURM_JOB_ID": "7"}, SchedulerKind.SLURM),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, SchedulerKind.POD),
        ({"SLURM_JOB_ID": "7", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, SchedulerKind.SLURM),
    ],
)
def test_the_environment_shows_the_scheduler(env: dict[str, str], scheduler: SchedulerKind) -> None:
    assert find_scheduler(env) is scheduler


def test_the_guards_and_the_launchers_findings_are_for_their_reader() -> None:
    cause = find_cause("AR012")
    assert failed(what="gone").to_finding(cause, node="node03", reader=BY_HAND).fix == cause.fix.tell(
        BY_HAND, {"node": "node03"}
    )
    assert "kubectl" in str(name_fault("AR012", "gone", node="train-3", reader=IN_A_POD).fix)
