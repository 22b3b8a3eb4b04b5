"""Which files are the logs of a job, and whose are they? Only names, sizes and first bytes are read.

    find_sources(["logs/"])                 every log below it, rank_2 before rank_10
    find_sources(["-"])                     standard input

Directories contain more than logs: code, checkpoints and pictures are skipped; links are followed once.
"""

from __future__ import annotations

import glob
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import zstandard

from allranks.model.errors import UsageError
from allranks.report.rundir import is_own_file
from allranks.why.logs.log_path import read_path

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
"""Text, but no log: the code of the job may be beside it, and contains every message that it can print."""
_STILL_LOGS = re.compile(r"error\.json|events\.jsonl|verdict\.json|[^/]*log[^/]*\.jsonl?")
VERDICT = "verdict.json"
"""The one file of a run's own that is found: why/verdicts.py takes it out again."""
_OWN_FILES = frozenset(("secret", "leader.json", "roll_call.json", "env.json"))
"""No logs, wherever they are: the names of files with addresses, keys and settings of the agents (report/rundir.py)."""
NO_LOGS_BELOW = frozenset(("__pycache__", "node_modules", "site-packages", "wandb"))
_OUTPUT_OF_JOB = re.compile(r"slurm-(\d{1,12}(?:_\d+)?)\.(?:out|err)(?:\.gz|\.zst)?")
_LOG_SUFFIXES = ("log", "out", "err", "stdout", "stderr", "txt")
_BINARY_MAGIC = (b"\x7fELF", b"PK\x03\x04", b"\xfd7zXZ", b"BZh", b"\x89PNG", b"%PDF")


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

    A file that exists but cannot be opened is returned, too: reading it gives the reason.

    Raises:
        UsageError: a target does not exist or holds no log.
    """
    by_file: dict[tuple[int, int], Source] = {}
    for target in targets:
        is_stdin, stdin = target == STDIN, Source(STDIN, None, None, None, None, None, 0)
        for source in (stdin,) if is_stdin else _expand(target, show_target=len(targets) > 1):
            by_file.setdefault(source.file, source)
    return tuple(by_file.values())


def list_jobs(sources: Iterable[Source]) -> list[str]:
    """Return the SLURM jobs, or tasks of an array, whose output these are, by the names that sbatch gives it."""
    names = (source.name for source in sources)
    return sorted({match[1] for name in names if (match := _OUTPUT_OF_JOB.fullmatch(name))})


def _expand(target: str, *, show_target: bool) -> Iterator[Source]:
    """Return the sources of one target. An existing path is taken literally, whatever characters its name has."""
    if os.path.lexists(target):
        paths = [target]
    elif glob.has_magic(target):
        paths = find_paths(target)
        if not paths:
            raise UsageError(f"{target}: no file matches this pattern")
    else:
        raise UsageError(f"{target}: no such file or directory; expected logs, a directory, a pattern, '-' or a job id")
    is_pattern = paths != [target]
    some = False
    for path in paths:
        for source in look_at(path, show_target=show_target or is_pattern):
            some = True
            yield source
    if not some:
        raise UsageError(f"{target}: contains no log; {_why_none(paths)}")


def find_paths(pattern: str) -> list[str]:
    """Return the paths that match a pattern and exist, in the order of their numbers."""
    found = glob.glob(pattern, recursive=True)  # noqa: PTH207  (absolute ones, too)
    return sorted(filter(os.path.exists, found), key=natural_key)


def _why_none(paths: Sequence[str]) -> str:
    if len(paths) == 1 and not Path(paths[0]).is_dir():
        return "expected text, plain or compressed with gzip or zstd"
    return "binary files, code and hidden files are skipped; to read such a file, give its name"


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
    """Yield files below a directory, and folders that cannot be listed (None).

    Links come last, so that files keep their own names.
    """
    seen: set[tuple[int, int]] = set()
    waiting = [str(Path(top))]
    while waiting:
        folder = waiting.pop()
        try:
            status = os.stat(folder)  # noqa: PTH116
            entries = list(os.scandir(folder))
        except OSError:
            yield folder, None  # the error is reported when it is read
            continue
        if (key := (status.st_dev, status.st_ino)) in seen:
            continue
        seen.add(key)
        entries.sort(key=lambda entry: (entry.is_symlink(), natural_key(entry.name)))
        folders, before = [], inside(folder)
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = before + entry.name
            try:
                if entry.is_dir():
                    if entry.name not in NO_LOGS_BELOW:
                        folders.append((entry.is_symlink(), path))
                elif entry.is_file() and is_wanted(path):
                    yield path, entry.stat()
            except OSError:  # removed since
                continue
        waiting[:0] = [path for is_link, path in reversed(folders) if is_link]
        waiting += [path for is_link, path in reversed(folders) if not is_link]


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts rank_2 before rank_10.

    >>> sorted(["rank_10", "rank_2"], key=natural_key)
    ['rank_2', 'rank_10']
    """
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _is_named_like_a_log(path: str) -> bool:
    name = path.rpartition("/")[2]  # no Path: there may be thousands
    if name in _OWN_FILES or _is_kept(path):
        return False
    if _STILL_LOGS.fullmatch(name) or re.fullmatch(r"rank_\d+\.error\.json", name):
        return True
    return _suffix(name) not in _NO_LOGS_IN_DIRECTORIES


def _is_kept(path: str) -> bool:
    return path.rpartition("/")[2] != VERDICT and is_own_file(path)


def _suffix(name: str) -> str:
    return name.lower().removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]


def is_log(path: str) -> bool:
    """Whether a file is text, plain or compressed; a file that cannot be opened may be."""
    name = path.rpartition("/")[2]
    suffix = _suffix(name)
    if suffix in _NO_LOGS or "tfevents" in name:
        return False
    try:
        with io.FileIO(path) as file:
            head = file.read(SNIFF_BYTES) or b""
    except OSError:
        return True
    return is_text(unpack_head(head), is_named_log=suffix in _LOG_SUFFIXES)


def unpack_head(head: bytes) -> bytes:
    """Return the first unpacked bytes of a compressed file; of any other, and of a damaged one, its own bytes."""
    try:
        if head.startswith(GZIP_MAGIC):
            return zlib.decompressobj(31).decompress(head, SNIFF_BYTES)
        if head.startswith(ZSTD_MAGIC):
            return zstandard.ZstdDecompressor().stream_reader(head).read(SNIFF_BYTES)  # not all: zeros expand
    except (zlib.error, zstandard.ZstdError):
        return b""
    return head


def is_text(head: bytes, *, is_named_log: bool = False) -> bool:
    """Whether a file with these first bytes is text.

    Args:
        head: its first SNIFF_BYTES.
        is_named_log: its suffix is a log's. A log that was truncated during writing begins with a hole of zeros.
    """
    if head.startswith(UTF16_MARKS):
        return True
    text = head.lstrip(b"\0")
    if not text:
        return is_named_log or not head
    if text.startswith(_BINARY_MAGIC) or re.match(rb"\x80[\x02-\x05]", text):  # pickles: those of the flight recorder
        return False
    if text.startswith(b"{") and re.search(rb'"(?:nccl_version|pg_config|comm_lib_version)"', text):
        return False  # JSON of the flight recorder
    return b"\0" not in text


def make_source(shown: str, path: str, status: os.stat_result | None) -> Source:
    """Return a file with what its path tells; None: nothing is known of it."""
    about = read_path(os.path.abspath(path))  # noqa: PTH100  (links stay as they are)
    is_file = status is not None and stat.S_ISREG(status.st_mode)
    file = (status.st_dev, status.st_ino) if status else (-1, hash(path))
    return Source(shown, path, *about, status.st_size if status and is_file else 0, file)
