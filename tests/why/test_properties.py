"""What must not change an answer: the order of files, prefixes that say nothing, paths, healthy ranks, a missing file.

Each property is held over the logs of probes/ and over small jobs that are made here: some ranks, one fault.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.why.asking import PROBES, Told, ask, has_word, read_table

from allranks.why.logs.log_events import Pattern
from allranks.why.logs.match import Matcher

Files = Mapping[str, str]
Ask = Callable[..., Told]

CASES = read_table("probes.toml")
FOLDERS = {probe: sorted((PROBES / probe).iterdir()) for probe in sorted(CASES)}
LOGS: dict[str, Files] = {
    probe: {path.name: path.read_text() for path in paths}
    for probe, paths in FOLDERS.items()
    if all(path.is_file() for path in paths)  # the names of folders may tell who is who
}
SEVERAL = [probe for probe, files in LOGS.items() if len(files) > 1]
OF_ONE_FAULT = [probe for probe in SEVERAL if "beside" not in CASES[probe] and CASES[probe].get("exit") is None]
SCRIPTS = re.compile(r'(?<=File ")/(?:job|home/ml/proj|scratch/all_reduce/barrier(?:/store_based_barrier)?)(?=/)')
WITH_SCRIPT = [probe for probe, files in LOGS.items() if any(SCRIPTS.search(text) for text in files.values())]
IS_JSON = re.compile(r"\s*\{")
PLAIN = [probe for probe, files in LOGS.items() if not any(IS_JSON.match(text) for text in files.values())]
WAITS = {"AR401", "AR402", "AR409", "AR490"}
"""A silent rank is whom these are about: another healthy file would be another answer."""
LOSSES = [probe for probe in LOGS if not WAITS & set(CASES[probe].get("cause", "AR490").split(" or "))]

PREFIXES = ["> ", "| ", "[stderr] ", "stdout: ", "[app] ", "INFO: ", "    ", "\t", "2> ", "train | "]
"""They name nobody and no time."""
PATHS = [
    "/data/all_reduce/barrier", "/mnt/no space left on device/x", "/srv/watchdog/timeout", "/home/rank_3/node07",
    "/opt/CUDA out of memory/run", "/u/ada", "/workspace/NCCL/Connection closed by peer", "/a/b/c/d/e/f/g/h",
]  # fmt: skip
NOISE = [
    "FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated. Please use `torch.amp.autocast('cuda', args...)`",
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being "
    "overloaded, please further tune the variable for optimal performance in your application as needed.",
    "Some weights of LlamaForCausalLM were not initialized from the model checkpoint: ['lm_head.weight']",
    "WARNING: failed to import apex, going on without",
    "[W socket.cpp:464] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
]
"""Lines of healthy starts; they name nobody and no time."""
HEALTHY = "step {step} loss 2.0\nstep {next} loss 1.9\n"


def put_before(prefix: str, text: str) -> str:
    """Return a text whose lines all begin with a prefix."""
    return "".join(prefix + line for line in text.splitlines(keepends=True))


@pytest.fixture
def tell(tmp_path: Path, patterns: tuple[Pattern, ...], matcher: Matcher) -> Ask:
    """Return the answer to files, in this order if they are named one by one, else to their directory."""
    numbers = count()

    def tell(files: Files, order: list[str] | None = None) -> Told:
        folder = tmp_path / f"x{next(numbers)}"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        return ask([folder] if order is None else [folder / name for name in order], patterns, matcher)

    return tell


# --- The logs of probes/ ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", SEVERAL)
def test_the_order_of_files_does_not_matter(probe: str, tell: Ask) -> None:
    files = LOGS[probe]
    orders = [sorted(files), sorted(files, reverse=True), random.Random(probe).sample(sorted(files), len(files))]
    assert len({tell(files, order).verdict for order in orders}) == 1


@pytest.mark.parametrize("probe", PLAIN)
def test_a_prefix_that_names_nobody_and_no_time_does_not_matter(probe: str, tell: Ask) -> None:
    first = tell(LOGS[probe]).verdict
    for prefix in random.Random(probe).sample(PREFIXES, 2):
        assert tell({name: put_before(prefix, text) for name, text in LOGS[probe].items()}).verdict == first, repr(
            prefix
        )


@pytest.mark.parametrize("probe", PLAIN)
def test_lines_of_a_healthy_start_do_not_matter(probe: str, tell: Ask) -> None:
    noise = "".join(f"{line}\n" for line in random.Random(probe).sample(NOISE, 3))
    assert tell({name: noise + text for name, text in LOGS[probe].items()}).verdict == tell(LOGS[probe]).verdict, noise


@pytest.mark.parametrize("probe", WITH_SCRIPT)
def test_the_path_of_the_script_does_not_matter(probe: str, tell: Ask) -> None:
    paths = random.Random(probe).sample(PATHS, 2)
    moved = [{name: SCRIPTS.sub(path, text) for name, text in LOGS[probe].items()} for path in paths]
    assert {tell(files).verdict for files in (LOGS[probe], *moved)} == {tell(LOGS[probe]).verdict}, paths


@pytest.mark.parametrize("probe", LOSSES)
def test_files_of_healthy_ranks_change_no_answer(probe: str, tell: Ask) -> None:
    """It may become more decided, never another one."""
    healthy = {f"rank_{rank}.out": HEALTHY.format(step=1, next=2) for rank in (90, 91)}
    before, after = tell(LOGS[probe]), tell({**LOGS[probe], **healthy})
    if before.confidence == "undecided":
        assert not has_word("rank 90", after.culprits)
        assert not has_word("rank 91", after.culprits)
    else:
        assert after.verdict[:2] == before.verdict[:2]


@pytest.mark.parametrize("probe", OF_ONE_FAULT)
def test_without_one_file_there_is_no_other_certain_answer(probe: str, tell: Ask) -> None:
    files = LOGS[probe]
    for missing in files:
        told = tell({name: text for name, text in files.items() if name != missing})
        if told.cause == CASES[probe].get("survived"):
            continue
        wrong = told.confidence == "certain" and told.cause not in CASES[probe]["cause"].split(" or ")
        named = [word for word in CASES[probe].get("never", "").split(", ") if word and has_word(word, told.culprits)]
        assert not wrong, (missing, told.verdict)
        assert not (told.confidence == "certain" and named), (missing, told.verdict)


# --- Small jobs -------------------------------------------------------------------------------------------------------

WATCHDOG = (
    "[rank{rank}]:[E1010 10:10:0{digit}.118273645 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for "
    "600036 milliseconds before timing out.\n"
)
LOST = (
    "[rank{rank}]:[E1010 10:00:0{digit}.118273645 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank "
    "{rank}] Process group watchdog thread terminated with exception: NCCL error: remote process exited or there was a "
    "network error, NCCL version 2.27.5\n"
)
RAISED = (
    'Traceback (most recent call last):\n  File "{path}/data.py", line 12, in load\n'
    '    raise ValueError("bad shard 17")\nValueError: bad shard 17\n'
)
OUT_OF_MEMORY = (
    'Traceback (most recent call last):\n  File "{path}/train.py", line 80, in step\n    loss.backward()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.11 GiB "
    "of which 1.20 GiB is free.\n"
)
FULL = (
    'Traceback (most recent call last):\n  File "{path}/train.py", line 80, in save\n    os.write(fd, data)\n'
    "OSError: [Errno 28] No space left on device\n"
)
FAULTS = {"AR590": RAISED, "AR109": OUT_OF_MEMORY, "AR005": FULL}


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, int, dict[str, str]]:
    """Return the cause, the rank that broke by itself, and the files of a job: the other ranks lost it or waited."""
    world = draw(st.integers(3, 6))
    culprit = draw(st.integers(0, world - 1))
    cause = draw(st.sampled_from(sorted(FAULTS)))
    effect = draw(st.sampled_from([WATCHDOG, LOST]))
    path = draw(st.sampled_from(PATHS))
    files = {f"rank_{rank}.out": HEALTHY.format(step=7, next=8) for rank in range(world)}
    for rank in range(world):
        told = FAULTS[cause].format(path=path) if rank == culprit else effect.format(rank=rank, digit=rank, seq=9)
        files[f"rank_{rank}.err"] = told
    return cause, culprit, files


@settings(max_examples=25)
@given(job=jobs(), data=st.data())
def test_the_answer_to_a_small_job_is_the_rank_that_broke(
    job: tuple[str, int, dict[str, str]], data: st.DataObject, tell: Ask
) -> None:
    """In any order of its files, behind any prefix, and among files of further ranks that went on."""
    cause, culprit, files = job
    for told in _variants(files, data, tell):
        assert (told.cause, told.confidence) == (cause, told.confidence)
        assert has_word(f"rank {culprit}", told.culprits)
        assert told.confidence != "undecided"


def _variants(files: Files, data: st.DataObject, tell: Ask) -> Iterator[Told]:
    yield tell(files, data.draw(st.permutations(sorted(files))))
    prefix = data.draw(st.sampled_from(PREFIXES))
    yield tell({name: put_before(prefix, text) for name, text in files.items()})


@settings(max_examples=15)
@given(job=jobs(), data=st.data())
def test_without_the_log_of_the_rank_that_broke_nobody_else_is_certain(
    job: tuple[str, int, dict[str, str]], data: st.DataObject, tell: Ask
) -> None:
    _, culprit, files = job
    left = {name: text for name, text in files.items() if name != f"rank_{culprit}.err"}
    if data.draw(st.booleans()):
        left.pop(f"rank_{culprit}.out")
    told = tell(left)
    others = [f"rank {rank}" for rank in range(6) if rank != culprit]
    assert not any(has_word(rank, told.culprits) for rank in others), told.verdict
    assert told.confidence != "certain"
