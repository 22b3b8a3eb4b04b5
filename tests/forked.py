"""Runs scripts as several ranks by scripts/fork_ranks.py, of which each process that runs tests has one.

done = fork_ranks(tmp_path, "3,2", "train.py")      three ranks, then two; done.stdout, done.stderr
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import clean_env

FORK_RANKS = Path(__file__).parent / "scripts/fork_ranks.py"


def fork_ranks(
    folder: Path, sizes: str, script: str | Path, *arguments: str | Path, within_s: float = 200, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the script in the folder, by as many ranks as `sizes` says.

    Raises:
        subprocess.TimeoutExpired: it took longer than `within_s`, and is killed.
    """
    argv = [sizes, *map(str, (script, *arguments))]
    server = _serve()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        order = {"argv": argv, "folder": str(folder), "env": clean_env(os.environ, **env), "out": out.name}
        server.stdin.write(json.dumps(order | {"err": err.name}).encode() + b"\n")
        pid = int(server.stdout.readline())
        has_ended = bool(select.select([server.stdout], [], [], within_s)[0])
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
        code = int(server.stdout.readline())
        said = [Path(file.name).read_text(errors="replace") for file in (out, err)]
    if not has_ended:
        raise subprocess.TimeoutExpired(argv, within_s, *said)
    return subprocess.CompletedProcess(argv, code, *said)


@functools.cache
def _serve() -> subprocess.Popen[bytes]:
    """Import torch once. It ends when its stdin does, so with this process at the latest."""
    server = subprocess.Popen(
        [sys.executable, str(FORK_RANKS), "--serve"],
        env=clean_env(os.environ, PYTHONIOENCODING="utf-8", TORCHINDUCTOR_COMPILE_THREADS="1"),  # read by the import
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )

    @atexit.register
    def end() -> None:
        with contextlib.suppress(OSError):
            server.communicate(timeout=60)

    return server
