"""Which files are the logs of a job, and whose are they? Only names, sizes and first bytes are looked at.

    find_sources(["logs/"])                 every log below it, rank_2 before rank_10
    find_sources(["-"])                     standard input
    find_job_sources("4711")                what SLURM and the run directories know of a job

Directories hold more than logs: code, checkpoints and pictures are passed over, links are followed once.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard

from allranks.host.run import run_command
from allranks.host.slurm import JobState, find_jobs, find_old_jobs
from allranks.model.errors import SetupError, UsageError
from allranks.report.rundir import as_file_name
from allranks.why.logs.place import read_path

STDIN = "-"
SNIFF_BYTES = 4096
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

_NO_LOGS = frozenset({
    # binary
    "a", "arrow", "bin", "bz2", "ckpt", "cubin", "db", "distcp", "gguf", "gif", "h5", "hdf5", "idx", "jpeg", "jpg",
    "mp3", "mp4", "npy", "npz", "nsys-rep", "o", "onnx", "parquet", "pdf", "pickle", "pkl", "png", "pt", "pth", "pyc",
    "qdrep", "safetensors", "so", "sqlite", "tar", "tfrecord", "tgz", "wandb", "wav", "webp", "whl", "xz", "zip",
})  # fmt: skip
_NO_LOGS_IN_DIRECTORIES = frozenset({
    "c", "cc", "cfg", "cmake", "conf", "cpp", "css", "csv", "cu", "cuh", "go", "h", "hpp", "html", "ini", "ipynb", "js",
    "json", "jsonl", "lock", "md", "py", "pyi", "rs", "rst", "sbatch", "sh", "slurm", "svg", "tex", "toml", "ts", "tsv",
    "xml", "yaml", "yml",
})  # fmt: skip
"""Text, but no log: the code of the job may lie beside it, and holds every message that it can print."""
_STILL_LOGS = re.compile(r"error\.json|events\.jsonl|verdict\.json|[^/]*log[^/]*\.jsonl?")
_OWN_FILES = frozenset(("secret", "leader.json", "roll_call.json", "env.json"))
"""Of a run directory (report/rundir.py): how the agents find and believe each other, and what was set. No logs."""
_CODE = frozenset(("__pycache__", "node_modules", "site-packages", "wandb"))
_LOG_SUFFIXES = ("log", "out", "err", "stdout", "stderr", "txt")
_BINARY_MAGIC = (b"\x7fELF", b"PK\x03\x04", b"\xfd7zXZ", b"BZh", b"\x89PNG", b"%PDF")


@dataclass(frozen=True, slots=True)
class Source:
    """One file of log, or standard input, and whose it is as far as its path tells."""

    shown: str
    """How the user calls it: the path relative to what was given, `-` for standard input."""
    path: Path | None
    """None: standard input."""
    node: str | None
    rank: int | None
    local_rank: int | None
    attempt: int | None
    """Which start of the job, from 0, as torchrun and allranks count."""
    size: int
    """Bytes on disk; 0 where nobody can know: standard input, a pipe."""


def find_sources(targets: Sequence[str]) -> tuple[Source, ...]:
    """Return the logs that files, directories, globs and `-` lead to, each once, in the order of the targets.

    A file that is there and cannot be opened is returned all the same: reading it says why.

    Raises:
        UsageError: a target does not exist or holds no log.
    """
    found: list[Source] = []
    seen: set[tuple[int, int]] = set()
    for target in targets:
        if target == STDIN:
            new = [Source(STDIN, None, None, None, None, None, 0)]
        else:
            new = list(_expand(target, show_target=len(targets) > 1))
        for source in new:
            if (key := _identity(source)) not in seen:
                seen.add(key)
                found.append(source)
    return tuple(found)


def _identity(source: Source) -> tuple[int, int]:
    try:
        status = source.path.stat() if source.path else None
    except OSError:  # gone since
        return (-1, hash(source.path))
    return (status.st_dev, status.st_ino) if status else (-1, 0)


def _expand(target: str, *, show_target: bool) -> Iterator[Source]:
    """One target. What is literally there is meant, whatever characters its name has."""
    if os.path.lexists(target):
        paths = [target]
    elif glob.has_magic(target):
        paths = _glob(target)
        if not paths:
            raise UsageError(f"{target}: no file fits this pattern")
    else:
        raise UsageError(f"{target}: no such file or directory; expected logs, a directory, a pattern, '-' or a job id")
    is_pattern = paths != [target]
    some = False
    for path in paths:
        for source in _look(path, show_target=show_target or is_pattern):
            some = True
            yield source
    if not some:
        raise UsageError(f"{target}: holds no log; {_why_none(paths)}")


def _glob(pattern: str) -> list[str]:
    """What fits a pattern and is there, in the order of its numbers."""
    found = glob.glob(pattern, recursive=True)  # noqa: PTH207  (absolute ones, too)
    return sorted(filter(os.path.exists, found), key=natural_key)


def _why_none(paths: Sequence[str]) -> str:
    if len(paths) == 1 and not Path(paths[0]).is_dir():
        return "expected text, plain or packed with gzip or zstd"
    return "binary files, code and hidden files are passed over; name a file to have it read"


def _look(path: str, *, show_target: bool) -> Iterator[Source]:
    try:
        status = Path(path).stat()
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from exc
    if not stat.S_ISDIR(status.st_mode):
        # Named by the user: code is read, too, and so is a pipe, whose first bytes nobody can look at and leave.
        is_file = stat.S_ISREG(status.st_mode)
        if stat.S_ISSOCK(status.st_mode) or (is_file and not is_log(Path(path))):
            return
        yield _source(path, Path(path), status.st_size if is_file else 0)
        return
    for file, size in _walk(Path(path)):
        shown = str(file) if show_target or file == Path(path) else str(file.relative_to(path))
        yield _source(shown, file, size)


def _walk(top: Path) -> Iterator[tuple[Path, int]]:
    """Logs below a directory with their sizes. Links come after what is no link, so that files keep their own names."""
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            status = folder.stat()
            entries = list(os.scandir(folder))
        except OSError:
            yield folder, 0  # reading it says why
            continue
        if (key := (status.st_dev, status.st_ino)) in seen:
            continue
        seen.add(key)
        entries.sort(key=lambda entry: (entry.is_symlink(), natural_key(entry.name)))
        folders = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = folder / entry.name
            try:
                mode = entry.stat()
            except OSError:  # a link to nowhere, or gone since
                continue
            if stat.S_ISDIR(mode.st_mode):
                if entry.name not in _CODE:
                    folders.append((entry.is_symlink(), path))
            elif stat.S_ISREG(mode.st_mode) and _is_named_like_a_log(entry.name) and is_log(path):
                yield path, mode.st_size
        waiting[:0] = [path for is_link, path in reversed(folders) if is_link]
        waiting += [path for is_link, path in reversed(folders) if not is_link]


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key under which rank_2 stands before rank_10.

    >>> sorted(["rank_10", "rank_2"], key=natural_key)
    ['rank_2', 'rank_10']
    """
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _is_named_like_a_log(name: str) -> bool:
    if name in _OWN_FILES:
        return False
    if _STILL_LOGS.fullmatch(name) or re.fullmatch(r"rank_\d+\.error\.json", name):
        return True
    return _suffix(name) not in _NO_LOGS_IN_DIRECTORIES


def _suffix(name: str) -> str:
    return name.lower().removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]


def is_log(path: Path) -> bool:
    """Whether a file is text, plain or packed; one that cannot be opened may be."""
    if _suffix(path.name) in _NO_LOGS or "tfevents" in path.name:
        return False
    try:
        with path.open("rb", buffering=0) as file:
            head = file.read(SNIFF_BYTES) or b""
    except OSError:
        return True
    return is_text(unpack_head(head), is_named_log=_suffix(path.name) in _LOG_SUFFIXES)


def unpack_head(head: bytes) -> bytes:
    """The first bytes of what a packed file holds; of any other, and of a damaged one, its own."""
    try:
        if head.startswith(GZIP_MAGIC):
            return zlib.decompressobj(31).decompress(head, SNIFF_BYTES)
        if head.startswith(ZSTD_MAGIC):
            return zstandard.ZstdDecompressor().decompressobj().decompress(head)[:SNIFF_BYTES]
    except (zlib.error, zstandard.ZstdError):
        return b""
    return head


def is_text(head: bytes, *, is_named_log: bool = False) -> bool:
    """Whether a file that begins like this holds text.

    Args:
        head: its first SNIFF_BYTES.
        is_named_log: its suffix is a log's. A log that was cut while it was written to begins with a hole of zeros.
    """
    if head.startswith(UTF16_MARKS):
        return True
    text = head.lstrip(b"\0")
    if not text:
        return is_named_log or not head
    if text.startswith(_BINARY_MAGIC) or re.match(rb"\x80[\x02-\x05]", text):  # pickles: the flight recorder's
        return False
    if text.startswith(b"{") and re.search(rb'"(?:nccl_version|pg_config|comm_lib_version)"', text):
        return False  # the flight recorder's, in JSON
    return b"\0" not in text


def _source(shown: str, path: Path, size: int) -> Source:
    node, rank, local_rank, attempt = read_path(os.path.abspath(path))  # noqa: PTH100  (links stay as they are)
    return Source(shown, path, node, rank, local_rank, attempt, size)


# --- A job of SLURM ---------------------------------------------------------------------------------------------------

RUNS = Path("runs")
SACCT_DEADLINE_S = 20.0
_FIELD = "\x1f"
_JOB_ID = re.compile(r"(\d+(?:[_+]\d+)?)(?:\.\w+)?")
_OUTPUT = re.compile(r"""\s(?:--(?:output|error)(?:=|[ \t]+)|-[oe][ \t]*=?)("[^"\n]+"|'[^'\n]+'|[^\s"'\\]+)""")
_MAX_SCRIPT_BYTES = 1 << 20


def is_job_id(text: str) -> bool:
    """Whether a word may be a job of SLURM: 123, 123_4 (a task of an array), 123+1 (a part), 123.0 (a step)."""
    return bool(_JOB_ID.fullmatch(text))


def find_job_sources(job: str, *, log_dir: Path = RUNS) -> tuple[Source, ...]:
    """Return the logs of a job of SLURM: its output and error files, those of its steps, and its run directory.

    Their names come from the controller while it knows the job, then from accounting, and from the job's script where
    it can still be read. Where nobody tells, files that carry the job's number are taken. A step means its job.

    Args:
        job: `123`, `123_4`, `123.0`.
        log_dir: where allranks makes its run directories, below the job's working directory or this one.
    Raises:
        UsageError: it is no job id, or no log of it can be found from here.
        SetupError: SLURM is not there or does not answer, and no log of the job is here.
    """
    match = _JOB_ID.fullmatch(job)
    if not match:
        raise UsageError(f"{job}: expected the id of a job, for example 4711, or 4711_3 for a task of an array")
    problem: SetupError | None = None
    jobs: tuple[JobState, ...] = ()
    try:
        jobs = find_jobs(match[1]) or find_old_jobs(match[1])
    except SetupError as exc:  # logs may be here all the same
        problem = exc
    patterns: list[str] = []
    folders: list[Path] = []
    for state in jobs or (JobState(id=match[1], state=""),):
        patterns += _patterns(state)
        places = [Path(state.work_dir) if state.work_dir else Path(), Path()]
        places += [Path(state.script).parent] if state.script else []
        folders += [place / log_dir / as_file_name(state.id) for place in places]
        folders += sorted((Path() / log_dir).glob(f"{state.id}_[0-9]*")) if not jobs else []
    if not any(_glob(pattern) for pattern in patterns):
        patterns += _usual_patterns(jobs, match[1])
    paths = [path for pattern in patterns for path in _glob(pattern) if not os.path.isdir(path)]  # noqa: PTH112
    paths += [str(folder) for folder in folders if os.path.isdir(folder)]  # noqa: PTH112  (never raises)
    sources: dict[tuple[int, int], Source] = {}
    for path in dict.fromkeys(paths):
        for source in _look(os.path.relpath(path) if _is_below_here(path) else path, show_target=True):
            sources.setdefault(_identity(source), source)
    if not sources:
        if problem:
            raise problem
        known = "SLURM does not know it" if not jobs else f"nothing fits {', '.join(patterns[:3])}"
        raise UsageError(f"job {job}: no log of it is here: {known}; name its files or directory instead")
    return tuple(sources.values())


def _is_below_here(path: str) -> bool:
    return Path(path).is_absolute() and Path(path).is_relative_to(Path.cwd())


def _patterns(job: JobState) -> list[str]:
    """Globs of the files that a job and its steps write."""
    known = [name for name in (job.out, job.err) if name]
    recorded = [] if known or not job.work_dir else _recorded_names(job.id)
    names = [expand_pattern(name, job) if "%" in name else glob.escape(name) for name in known]
    names += [expand_pattern(name, job) for name in (*recorded, *find_outputs(_read_script(job.script)))]
    if not names and job.work_dir:
        names = [expand_pattern("slurm-%A_%a.out" if "_" in job.id else "slurm-%j.out", job)]
    names = [name for name in names if name.rpartition("/")[2].strip("*") and not name.startswith("/dev/")]
    return list(dict.fromkeys(str(Path(glob.escape(job.work_dir)) / name) for name in names))


def _recorded_names(job_id: str) -> list[str]:
    """Patterns of the output as accounting has them: by name since SLURM 24.05, in the command line since 21.08."""
    for fields in ("StdOut,StdErr", "SubmitLine"):
        ran = run_command(
            ["sacct", "-n", "-P", f"--delimiter={_FIELD}", "-o", fields, "-j", job_id], deadline_s=SACCT_DEADLINE_S
        )
        rows = ran.stdout.splitlines() if ran.rc == 0 else []
        words = [word.strip() for row in rows for word in row.split(_FIELD)]
        if fields == "SubmitLine":
            words = find_outputs("\n".join(words))
        if found := [word for word in dict.fromkeys(words) if word]:
            return found
    return []


def find_outputs(script: str) -> list[str]:
    """Return the patterns of output and error files that a batch script gives SLURM.

    >>> find_outputs("#SBATCH -o logs/%x.out\\nset -e\\nsrun --output='%j_%t_log.out' python train.py")
    ['logs/%x.out', '%j_%t_log.out']
    """
    lines = script.replace("\\\n", " ").splitlines()
    words = [
        word for line in lines if re.search(r"#SBATCH\b|\bsrun\b|\bsbatch\b", line) for word in _OUTPUT.findall(line)
    ]
    return [word.strip("\"'") for word in words]


def _read_script(script: str) -> str:
    try:
        with Path(script).open("rb") as file:
            return file.read(_MAX_SCRIPT_BYTES).decode(errors="replace")
    except OSError:
        return ""


def expand_pattern(pattern: str, job: JobState) -> str:
    """Return a name of `--output` as a glob: what is known of the job is put in, the rest may be anything.

    >>> expand_pattern("logs/%x_%A_%a.%t.out", JobState(id="12_3", name="train", state=""))
    'logs/train_12_3.*.out'

    Source: sbatch(1) and srun(1), "filename pattern", SLURM 25.05. The raw id of an array's task is not known here.
    """
    base, _, task = job.id.partition("_")
    has_task, is_single = task.isdecimal(), base.isdecimal() and not task
    known = {
        "A": base if base.isdecimal() else None,
        "a": task if has_task else None,
        "j": base if is_single else None,
        "x": job.name or None,
        "u": job.user or None,
        "%": "%",
    }

    def fill(mark: str) -> str:
        value = known.get(mark[-1]) if mark.startswith("%") else None
        if value is None:
            return "*"
        return glob.escape(value.zfill(int(mark[1:-1] or 0)) if value.isdecimal() else value)

    parts = re.split(r"(%\d{0,2}[A-Za-z%]|\$\{\w+\}|\$\w+)", pattern)
    return "".join(fill(part) if i % 2 else glob.escape(part) for i, part in enumerate(parts))


def _usual_patterns(jobs: Iterable[JobState], job_id: str) -> list[str]:
    """Files that carry the job's number, where it was submitted and here."""
    places = dict.fromkeys([*(job.work_dir for job in jobs if job.work_dir), ""])
    return [
        str(Path(glob.escape(place)) / folder / f"{before}{job_id}{after}")
        for place in places
        for folder in ("", "logs")
        for before in ("", "*[-_.]")
        for after in (".out", ".err", ".log", "[-_.]*.out", "[-_.]*.err", "[-_.]*.log")
    ]
