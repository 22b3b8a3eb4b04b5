"""Which files are the logs of a job, and whose are they? Only names, sizes and first bytes are read.

    find_sources(["logs/"])                 every log below it, rank_2 before rank_10
    find_sources(["-"])                     standard input

Directories contain more than logs: code, checkpoints and pictures are skipped; links are followed once.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from allranks.model.errors import UsageError
from allranks.report.rundir import is_own_file
from allranks.why.logs.log_path import read_path
from allranks.why.logs.read import read_head

STDIN = "-"
SNIFF_BYTES = 4096

_NO_LOGS_IN_DIRECTORIES = frozenset((
    # Checkpoints, data, pictures, archives: none of these needs to be opened.
    "a", "arrow", "bin", "bz2", "ckpt", "cubin", "db", "distcp", "gguf", "gif", "h5", "hdf5", "idx", "jpeg", "jpg",
    "mp3", "mp4", "npy", "npz", "nsys-rep", "o", "onnx", "parquet", "pdf", "pickle", "pkl", "png", "pt", "pth", "pyc",
    "qdrep", "safetensors", "so", "sqlite", "tar", "tfrecord", "tgz", "wandb", "wav", "webp", "whl", "xz", "zip",
    # Text, but no log: the code of the job may be beside it, and contains every message that it can print.
    "c", "cc", "cfg", "cmake", "conf", "cpp", "css", "csv", "cu", "cuh", "go", "h", "hpp", "html", "ini", "ipynb", "js",
    "json", "jsonl", "lock", "md", "py", "pyi", "rs", "rst", "sbatch", "sh", "slurm", "svg", "tex", "toml", "ts", "tsv",
    "xml", "yaml", "yml",
    "secret",  # of a run (report/rundir.py), wherever it lies
))  # fmt: skip
_STILL_LOGS = re.compile(r"(?:rank_\d+\.)?error\.json|events\.jsonl|verdict\.json|[^/]*log[^/]*\.jsonl?")
VERDICT = "verdict.json"
"""The one file of a run's own that is found: why/verdicts.py takes it out again."""
NO_LOGS_BELOW = frozenset(("__pycache__", "node_modules", "site-packages", "wandb"))
JOB_ID = re.compile(r"(\d+(?:[_+]\d+)?)(?:\.\w+)?")
_OUTPUT_OF_JOB = re.compile(
    r"(?:slurm-(?=\d)|(?!(?i:.*(?:rank|node|host|worker|gpu|pid|nccl|port|master)))(?!.*(?:19|20)\d{6})(?:.*?[-_.])?(?=[1-9]\d{4}))"
    r"(\d{1,12}(?:_\d{1,5})?)(?:\+\d+)?(?:\.\d+)?\.(?:out|err)(?:\.gz|\.zst)?"
)
"""As sbatch names it, or `--output=%x-%j.out`; short numbers, dates, and those of nid000049.out, are no jobs. A `.log`
is what programs write."""
_LOG_SUFFIXES = ("log", "out", "err", "stdout", "stderr", "txt")
_NO_TEXT = re.compile(
    rb"\x80[\x02-\x05]|%PDF"  # pickles: those of the flight recorder
    rb'|\{(?s:.*)"(?:nccl_version|pg_config|comm_lib_version)"'  # JSON of the flight recorder
)


class Source(msgspec.Struct, frozen=True, gc=False):
    """One log file, or standard input, with its node and rank as far as the path tells."""

    shown: str
    """Its name for the user: the path relative to the given one, `-` for standard input."""
    path: str | None
    """None: standard input."""
    node: str | None
    rank: int | None
    local_rank: int | None
    attempt: int | None
    """Number of the job's start, from 0, as torchrun and allranks count."""
    size: int
    """Bytes on disk; 0 if unknown: standard input, a pipe."""
    file: tuple[int, int] = (-1, 0)
    """Device and inode: two names of one file have the same."""

    @property
    def name(self) -> str:
        """Name of the file without its directory; empty for standard input."""
        return (self.path or "").rpartition("/")[2]


def find_sources(targets: Sequence[str]) -> tuple[Source, ...]:
    """Return the logs that files, directories, globs and `-` lead to, each once, in the order of the targets.

    A file that exists but cannot be opened is returned, too: reading it gives the reason. An existing path is taken
    literally, whatever characters its name has.

    Raises:
        UsageError: a target does not exist or holds no log.
    """
    sources: list[Source] = []
    for target in targets:
        if target == STDIN:
            found = [Source(STDIN, None, None, None, None, None, 0)]
        else:
            is_pattern = not os.path.lexists(target)
            if is_pattern and "**" in target:
                raise UsageError(f"{target}: ** is no pattern here; name a directory, all logs below it are read")
            paths = find_paths(target) if is_pattern else [target]
            if not paths and not glob.has_magic(target):
                expected = "expected logs, a directory, a pattern, '-' or a job id"
                raise UsageError(f"{target or repr(target)}: no such file or directory; {expected}")
            if not paths:
                raise UsageError(f"{target}: no file matches this pattern")
            show_target = is_pattern or len(targets) > 1
            found = [source for path in paths for source in look_at(path, show_target=show_target)]
        if not found:
            raise UsageError(
                f"{target}: contains no log; expected text, plain or compressed with gzip or zstd"
                + ("; in a directory, code and hidden files are skipped" if any(map(os.path.isdir, paths)) else "")
            )
        sources += found
    return keep_first(sources)


def keep_first(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Return each file once, under the first of its names."""
    by_file: dict[tuple[int, int], Source] = {}
    for source in sources:
        by_file.setdefault(source.file, source)
    return tuple(by_file.values())


def is_job_id(text: str) -> bool:
    """Whether a word may be a SLURM job id: 123, 123_4 (a task of an array), 123+1 (a part), 123.0 (a step)."""
    return bool(JOB_ID.fullmatch(text))


def list_jobs(sources: Iterable[Source]) -> list[str]:
    """Return the SLURM jobs, or tasks of an array, whose output these are, by the names that sbatch gives it."""
    names = (source.name for source in sources)
    return sorted({match[1] for name in names if (match := _OUTPUT_OF_JOB.fullmatch(name))})


def find_paths(pattern: str) -> list[str]:
    """Return the paths that match a pattern and exist, in the order of their numbers, links last."""
    found = glob.glob(pattern)  # noqa: PTH207  (absolute ones, too)
    return sorted(filter(os.path.exists, found), key=lambda path: (os.path.islink(path), natural_key(path)))  # noqa: PTH114


def look_at(path: str, *, show_target: bool) -> Iterator[Source]:
    """Yield the log at a path, or those below it.

    Raises:
        UsageError: there is nothing.
    """
    try:
        status = Path(path).stat()
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from exc
    if not stat.S_ISDIR(status.st_mode):
        # Named by the user: code is read, too, and so is a pipe, whose first bytes cannot be read without removing
        # them.
        is_file = stat.S_ISREG(status.st_mode)
        if is_file and _is_kept(path):
            raise UsageError(f"{path}: this is a run's own file and no log; name the run's directory")
        if stat.S_ISSOCK(status.st_mode) or (is_file and not is_log(path)):
            return
        yield make_source(path, path, status)
        return
    before = "" if show_target else inside(path)
    for file, known in walk(path, lambda file: _is_named_like_a_log(file) and is_log(file)):
        yield make_source(file.removeprefix(before), file, known)


def inside(folder: str) -> str:
    """Return what stands before the names of a folder's entries: `logs/` of `logs/`, `./logs` and `logs`."""
    return str(Path(folder, "x"))[:-1]


def walk(top: str, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield regular files below a directory, each folder once, and folders that cannot be listed.

    In a folder, links come last, so that what stands beside them keeps its own name. Thousands of files are looked at:
    the kernel tells with the names what is a file, a folder or a link.
    """
    seen: set[tuple[int, int]] = set()
    folders = [top]
    while folders:
        folder = folders.pop()
        before = inside(folder)
        try:
            status = os.stat(folder)  # noqa: PTH116
            known = (status.st_dev, status.st_ino) in seen
            entries = [] if known else [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        except OSError:
            yield folder, None  # the error is reported when it is read
            continue
        seen.add((status.st_dev, status.st_ino))
        below: list[str] = []
        for entry in sorted(entries, key=lambda entry: (entry.is_symlink(), natural_key(entry.name))):
            path = before + entry.name
            with contextlib.suppress(OSError):  # a link that leads to itself, a file that was removed since
                if entry.is_dir():
                    below += [path] if entry.name not in NO_LOGS_BELOW else []
                elif entry.is_file() and is_wanted(path):
                    yield path, entry.stat()
        folders += reversed(below)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts rank_2 before rank_10.

    >>> sorted(["rank_10", "rank_2"], key=natural_key)
    ['rank_2', 'rank_10']
    """
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _is_named_like_a_log(path: str) -> bool:
    name = path.rpartition("/")[2]  # no Path: there may be thousands
    return not _is_kept(path) and bool(_STILL_LOGS.fullmatch(name) or _suffix(name) not in _NO_LOGS_IN_DIRECTORIES)


def _is_kept(path: str) -> bool:
    return path.rpartition("/")[2] != VERDICT and is_own_file(path)


def _suffix(name: str) -> str:
    return name.lower().removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]


def is_log(path: str) -> bool:
    """Whether a file is text, plain or compressed; a file that cannot be opened may be.

    A log that was truncated during writing begins with a hole of zeros.
    """
    try:
        head = read_head(path, SNIFF_BYTES)
    except OSError:
        return True
    if not (text := head.lstrip(b"\0")):
        return not head or _suffix(path) in _LOG_SUFFIXES
    return b"\0" not in text and not _NO_TEXT.match(text)


def make_source(shown: str, path: str, status: os.stat_result | None) -> Source:
    """Return a file with what its path tells; None: nothing is known of it."""
    about = read_path(os.path.abspath(path))  # noqa: PTH100  (links stay as they are)
    is_file = status is not None and stat.S_ISREG(status.st_mode)
    file = (status.st_dev, status.st_ino) if status else (-1, hash(path))
    return Source(shown, path, *about, status.st_size if status and is_file else 0, file)
