"""Runs a script as several ranks by scripts/fork_ranks.py, with one import of torch for all of them.

done = fork_ranks(tmp_path, "3,2", "train.py")      three ranks, then two; done.stdout, done.stderr
"""

from __future__ import annotations

import os
import subprocess
import sys
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
    return subprocess.run(
        [sys.executable, FORK_RANKS, sizes, script, *arguments],
        cwd=folder,
        env=clean_env(os.environ, PYTHONIOENCODING="utf-8", **env),
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
