"""A fake nvidia-smi on PATH that answers from `recorded/`, and the tools' door for tests that need one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded"

SCRIPT = """\
#!{python} -IS
import sys, pathlib, time
here = pathlib.Path(__file__).parent
time.sleep({delay_s})
text = lambda name: (here / name).read_text() if (here / name).exists() else ""
if sys.argv[1:] == ["nvlink", "-s"]:
    print(text("nvlink.txt"), end="")
    sys.exit(0)
query, _, fields = sys.argv[1].partition("=")
assert sys.argv[2:] == ["--format=csv,noheader,nounits"], sys.argv
if query == "--query-remapped-rows":
    print(text("remapped.txt"), end="")
elif query == "--query-compute-apps":
    print(text("apps.txt"), end="")
else:
    with (here / "asked").open("a") as log:
        print(fields, file=log)
    rows = [line.split(", ") for line in text("gpus.csv").splitlines()]
    for field in fields.split(","):
        if field not in rows[0]:
            print('Field "' + field + '" is not a valid field to query.\\n')
            sys.exit(2)
    for row in rows[1:]:
        print(", ".join(row[rows[0].index(field)] for field in fields.split(",")))
"""


def install(directory: Path, recorded: str, *, delay_s: float = 0) -> dict[str, str]:
    """Put the fake into a directory; returns the environment in which it is the only program."""
    directory.mkdir(exist_ok=True)
    shutil.copy(RECORDED / f"{recorded}.csv", directory / "gpus.csv")
    for query in ("remapped", "apps", "nvlink"):
        if (source := RECORDED / f"{recorded}.{query}.txt").exists():
            shutil.copy(source, directory / f"{query}.txt")
    return install_script(directory, "nvidia-smi", SCRIPT.format(python=sys.executable, delay_s=delay_s))


def install_script(directory: Path, name: str, text: str) -> dict[str, str]:
    """Put any program into a directory; returns the environment in which it is found."""
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.write_text(text)
    program.chmod(0o755)
    return {"PATH": str(directory)}
