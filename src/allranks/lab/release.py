"""How does the lab run another release of SLURM than the machine's? Out of a root file system of Debian's, in a cache.

    check_place()
    root = prepare_root("24.11", env=os.environ, say=print)     # the first time: about a minute
    write_mounts(root, lab_dir)                                 # init.py mounts them in each new node

The packages are extracted, not installed. Their programs start with the loader and the libraries of that root, without
chroot: they see the machine's files, so tasks keep the machine's Python and C library. In each node they are mounted
over the machine's own SLURM programs, and the release's plugins over the machine's plugins. So PATH and environment
stay as they are, and slurmd finds the slurmstepd of its own release.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.lab.init import MOUNTS_FILE
from allranks.model.errors import SetupError

RELEASES = {"20.11": "bullseye", "22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
"""Release of SLURM -> the Debian suite that has it; bullseye calls its 20.11.4 "20.11.7+really20.11.4"."""
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurmdbd")
DAEMONS = ("slurmctld", "slurmd", "slurmstepd", "slurmdbd")
CLIENTS = (
    "sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo", "sprio",
    "squeue", "sreport", "srun", "sshare", "sstat", "strigger",
)  # fmt: skip
MAKE_S = 900.0
"""Deadline of mmdebstrap; with a mirror nearby it takes a minute."""
SAY_S = 10.0
"""Interval of its progress lines."""
SEEN = Path("/etc/slurm/release")
"""Where the nodes see the root: short, so that it fits into the programs, and other users can enter it."""
_LOADER, _LIBRARIES, _PROGRAMS = "ld.so", "libs", "programs"
"""What is added to the root, for a process that sees it at SEEN."""
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 5, 15, 29
"""Source: elf.h."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """A Debian mirror, as apt knows it."""

    uri: str
    entry: str
    """Its place in apt's sources, `/etc/apt/sources.list.d/debian.sources:1`: stanza or line number."""


def parse_index_targets(text: str) -> Mirror | None:
    """Return the first Debian mirror in the output of `apt-get indextargets`; None if there is none.

    >>> parse_index_targets("Label: Debian\\nOrigin: Debian\\nRepo-URI: http://m/debian/\\nSourcesentry: /a.list:3\\n")
    Mirror(uri='http://m/debian/', entry='/a.list:3')
    """
    for target in re.split(r"\n\s*\n", text):
        fields = dict(re.findall(r"(?m)^([\w-]+): (.*)$", target))
        if fields.get("Origin") == fields.get("Label") == "Debian" and "Repo-URI" in fields:  # not Debian-Security
            return Mirror(fields["Repo-URI"], fields.get("Sourcesentry", ""))
    return None


def parse_signed_by(text: str, number: int, *, is_list: bool) -> str:
    """Return the keyring file that an entry of apt's sources names; empty for apt's own trusted keys.

    Args:
        text: a file of apt's sources.
        number: of the entry, from 1: line of a `.list`, stanza of a `.sources`.
        is_list: whether the file has one entry per line.
    """
    entries = text.splitlines() if is_list else re.split(r"\n\s*\n", text.strip())
    entry = entries[number - 1] if 0 < number <= len(entries) else ""
    found = re.search(r"signed-by=(/[^\]\s,]+)" if is_list else r"(?mi)^signed-by:\s*(/\S+)", entry)
    return found[1] if found else ""


def cache_dir(env: Mapping[str, str]) -> Path:
    """Return the directory of the root file systems."""
    own = env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "/root", ".cache")
    return Path(own, "allranks", "slurm").absolute()


def check_place(seen: Path = SEEN) -> None:
    """Refuse a machine that has no directory for the nodes to see another release in.

    Raises:
        SetupError: the directory above `seen` is missing.
    """
    if not seen.parent.is_dir():
        raise SetupError(f"lab: {seen.parent}: no such directory, but other releases appear there; create it")


def prepare_root(release: str, *, env: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """Return the root file system of a release; made on its first use.

    Raises:
        SetupError: it cannot be made, or Debian's suite now has another release.
    """
    cache = cache_dir(env)
    root = cache / release
    if root.is_dir():
        return root
    if shutil.which("mmdebstrap") is None:
        raise SetupError(f"lab: SLURM {release} needs mmdebstrap: apt-get install mmdebstrap")
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache):
        if root.is_dir():
            return root
        suite, mirror = RELEASES[release], find_mirror()
        draft = cache / f"{release}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        say(f"SLURM {release}: extracting Debian's packages ({suite}, {mirror.uri}) to {root}, once")
        _extract(suite, mirror, draft, env=env, say=say)
        version = read_version(draft)
        if not version.startswith(f"{release}."):
            shutil.rmtree(draft)
            raise SetupError(f"lab: Debian {suite} has SLURM {version or 'in a form unknown here'}, expected {release}")
        write_programs(draft)
        draft.rename(root)
    return root


def find_mirror() -> Mirror:
    """Return the Debian mirror of apt's own configuration.

    Raises:
        SetupError: apt has none, or has not read its index yet.
    """
    try:
        said = _run(["apt-get", "indextargets", "Created-By: Packages"]).stdout
    except FileNotFoundError:
        said = ""
    mirror = parse_index_targets(said)
    if mirror is None:
        raise SetupError(
            "lab: other releases of SLURM come from Debian, and apt knows no Debian mirror (apt-get indextargets); "
            "add one to apt's sources, then: apt-get update"
        )
    return mirror


def _extract(suite: str, mirror: Mirror, root: Path, *, env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Download and extract the packages and what they depend on."""
    file, _, number = mirror.entry.rpartition(":")
    keyring = ""
    with contextlib.suppress(OSError):
        keyring = parse_signed_by(Path(file).read_text(), int(number or 0), is_list=file.endswith(".list"))
    signed_by = f"[signed-by={keyring}] " if keyring else ""
    # mmdebstrap's apt does not read the machine's apt.conf: only the way through a proxy is passed on.
    ways = re.findall(r"(?m)^Acquire::https?::.*$", _run(["apt-config", "dump", "Acquire"]).stdout)
    # The release file of a suite that is not released yet expires after a week, also on a frozen mirror.
    options = [f"--aptopt={line}" for line in ('Acquire::Check-Valid-Until "false";', *ways)]
    command = [
        *("mmdebstrap", "--quiet", "--mode=root", "--variant=extract", f"--include={','.join(PACKAGES)}", *options),
        *(suite, str(root), f"deb {signed_by}{mirror.uri} {suite} main"),
    ]
    log = root.with_suffix(".log")
    began = said = time.monotonic()
    with log.open("wb") as output:
        making = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(env))
        try:
            while making.poll() is None:
                now = time.monotonic()
                if now - began > MAKE_S:
                    raise SetupError(f"lab: mmdebstrap {suite}: not finished after {MAKE_S:.0f} s; see {log}")
                if now - said > SAY_S:
                    said = now
                    say(f"waiting for mmdebstrap ({now - began:.0f} s)")
                time.sleep(0.1)
        finally:
            making.terminate()
            making.wait()
    if making.returncode:
        last = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
        raise SetupError(f"lab: mmdebstrap {suite} from {mirror.uri}: exit code {making.returncode}: {last}")
    log.unlink()


def read_version(root: Path) -> str:
    """Return the version of the daemons in a root file system; empty if they do not start."""
    try:
        command = [find_loader(root), "--library-path", ":".join(map(str, _libraries(root))), find_tool(root, "slurmd")]
        said = _run([*map(str, command), "-V"]).stdout  # the clients would look for a cluster first
    except (SetupError, OSError):
        return ""
    return said.split()[-1] if said else ""


def write_programs(root: Path) -> None:
    """Make the programs that find the root in a node: copies with another loader and another path of libraries.

    Raises:
        SetupError: the root is not complete.
    """
    (root / _LOADER).symlink_to(find_loader(root).relative_to(root))
    (root / _LIBRARIES).mkdir()
    for directory in _libraries(root):
        for path in directory.glob("*.so*"):
            link = root / _LIBRARIES / path.name
            if not link.is_symlink():
                link.symlink_to(Path("..", path.relative_to(root)))
    (root / _PROGRAMS).mkdir()
    for tool in (*DAEMONS, *CLIENTS):
        program = root / _PROGRAMS / tool
        try:
            program.write_bytes(redirect(find_tool(root, tool).read_bytes(), SEEN / _LOADER, SEEN / _LIBRARIES))
        except ValueError as exc:
            raise SetupError(f"lab: {find_tool(root, tool)}: {exc}") from exc
        program.chmod(0o755)
    # Nothing else is needed, least of all programs that run as root for everybody.
    kept = {root / name for name in (_LOADER, _LIBRARIES, _PROGRAMS, "usr", "usr/lib", "lib", "lib64")}
    for path in {*root.iterdir(), *(root / "usr").iterdir()} - kept:
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)


def redirect(program: bytes, loader: Path, libraries: Path) -> bytes:
    """Return an ELF program with another loader and another directory of libraries; all its offsets stay.

    The new paths overwrite the old ones, which are longer. DT_RUNPATH becomes DT_RPATH, which is also searched for the
    libraries of libraries. A script that starts the loader would not do: slurmstepd executes itself by descriptor.

    Raises:
        ValueError: this is no 64-bit program with a loader and a DT_RUNPATH, or its paths are too short.
    Source: elf(5).
    """
    if program[:6] != b"\x7fELF\x02\x01":
        raise ValueError("expected a 64-bit little-endian ELF program")
    image = bytearray(program)
    (table,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    segments = [struct.unpack_from("<IIQQQQ", image, table + number * size) for number in range(count)]
    places = {kind: (offset, length) for kind, _, offset, _, _, length in segments}
    if _PT_INTERP not in places or _PT_DYNAMIC not in places:
        raise ValueError("expected a dynamically linked program")
    _overwrite(image, *places[_PT_INTERP], loader)
    start, length = places[_PT_DYNAMIC]
    entries = {struct.unpack_from("<q", image, at)[0]: at for at in range(start, start + length, 16)}
    if _DT_RUNPATH not in entries:
        raise ValueError("expected a DT_RUNPATH")
    value = {tag: struct.unpack_from("<Q", image, at + 8)[0] for tag, at in entries.items()}
    strings = next(
        value[_DT_STRTAB] - address + offset
        for kind, _, offset, address, _, length in segments
        if kind == _PT_LOAD and address <= value[_DT_STRTAB] < address + length
    )
    path = strings + value[_DT_RUNPATH]
    _overwrite(image, path, image.index(b"\0", path) - path + 1, libraries)
    struct.pack_into("<q", image, entries[_DT_RUNPATH], _DT_RPATH)
    return bytes(image)


def _overwrite(image: bytearray, offset: int, length: int, path: Path) -> None:
    text = bytes(path)
    if len(text) >= length:
        raise ValueError(f"no room for {path}: expected at most {length - 1} characters")
    image[offset : offset + length] = text.ljust(length, b"\0")


def find_loader(root: Path) -> Path:
    """Return the dynamic loader of a root: a regular file, since its links have absolute targets.

    Raises:
        SetupError: there is none.
    """
    for pattern in ("usr/lib/*/ld-*.so*", "lib/*/ld-*.so*"):
        for path in sorted(root.glob(pattern)):
            if path.is_file() and not path.is_symlink():
                return path
    raise SetupError(f"lab: {root}: no dynamic loader among Debian's packages")


def find_tool(root: Path, tool: str) -> Path:
    """Return a tool's program: Debian's alternatives give the daemons their names only when packages are configured.

    Raises:
        SetupError: there is none.
    """
    directory = root / tool_path(tool).parent.relative_to("/")
    for name in (f"{tool}-wlm", tool):
        if (directory / name).is_file():
            return directory / name
    raise SetupError(f"lab: {root}: no {tool} among Debian's packages")


def tool_path(tool: str) -> Path:
    """Return the path of a tool of SLURM on a Debian machine."""
    return Path("/usr/sbin" if tool in DAEMONS else "/usr/bin", tool)


def write_mounts(root: Path, lab_dir: Path) -> None:
    """Write the list of what init.py mounts in each node: the root, then its plugins and programs."""
    (lab_dir / "slurm" / SEEN.name).mkdir(exist_ok=True)  # slurm/ is mounted on /etc/slurm
    mounts = [(root, SEEN)]
    mounts += [(SEEN / path.relative_to(root), Path("/", path.relative_to(root))) for path in _plugins(root)]
    mounts += [(SEEN / _PROGRAMS / tool, tool_path(tool)) for tool in (*DAEMONS, *CLIENTS)]
    (lab_dir / MOUNTS_FILE).write_text("".join(f"{source}\t{target}\n" for source, target in mounts))


def daemon_command(lab_dir: Path, daemon: str) -> str:
    """Return what starts a daemon in a node; the machine may lack the one of the lab's release."""
    return str(SEEN / _PROGRAMS / daemon) if (lab_dir / MOUNTS_FILE).exists() else daemon


def _libraries(root: Path) -> list[Path]:
    """Return the directories of shared libraries: before the merged /usr there are two."""
    directories = [path for parent in ("usr/lib", "lib") for path in sorted(root.glob(f"{parent}/*-linux-gnu*"))]
    return directories + _plugins(root)


def _plugins(root: Path) -> list[Path]:
    return sorted(root.glob("usr/lib/*/slurm-wlm"))


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + MAKE_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"lab: another `allranks lab up` has used {directory} for {MAKE_S:.0f} s"
                    ) from None
                time.sleep(0.2)
        yield
    finally:
        os.close(fd)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL)
