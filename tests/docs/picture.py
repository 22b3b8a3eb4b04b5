"""The picture of a failure on the site's first page: a real job in a terminal, as SVG.

    python tests/docs/picture.py        runs the job and writes docs/pictures/failure.svg

`test_the_picture_shows_what_its_job_prints` says when it has to be made again.
"""

from __future__ import annotations

import html
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parents[2] / "docs/pictures/failure.svg"
SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group()
for step in range(1000):
    if step == 40 and dist.get_rank() == 3:
        raise ValueError("batch 40 has no label")
    dist.all_reduce(torch.ones(1))
"""
COMMAND = "allranks run --nproc-per-node 4 train.py"
COLUMNS = 96
WIDTH_PX, LINE_PX, MARGIN_PX = 8.4, 20, 24
"""Of one character at 14 px, of a line, and around the text."""
COLORS = {
    "1": "font-weight:bold",
    "2": "fill:#9aa4b0",
    "31": "fill:#ff7b72",
    "32": "fill:#7ee787",
    "33": "fill:#e3b341",
}
"""Styles of a terminal's SGR codes."""
_CODE = re.compile(r"\x1b\[([\d;]*)m")
_ERASED = re.compile(r"[^\n]*\r\x1b\[K")
"""The row at the bottom of a terminal, each time that it is drawn anew."""
_LINE = re.compile(r"<text [^>]*>(.*?)</text>")


def run_job() -> str:
    """Run the job in a terminal and return what it shows, colors included."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        shell = f"ip link set lo up; stty cols {COLUMNS}; {COMMAND}"  # in a network of its own, the port is free
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "xterm"}
        command = ["unshare", "--net", "-r", "script", "--quiet", "--command", shell, "/dev/null"]
        data = subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=120).stdout
        shown = _ERASED.sub("", data.decode().replace("\r\n", "\n")).replace(f"{folder}/", "")
        # The last line, where the files are, is wider than the picture.
        return shown.rstrip("\n").rpartition("\n")[0].replace(socket.gethostname(), "vm")


def render(shown: str, command: str, columns: int) -> str:
    """Return the SVG of a terminal that shows a command and this text."""
    lines = [f"\x1b[1m$ {command}\x1b[0m", *shown.strip("\n").split("\n")]
    width, height = columns * WIDTH_PX + 2 * MARGIN_PX, len(lines) * LINE_PX + 2 * MARGIN_PX
    text = "\n".join(_render_line(line, number) for number, line in enumerate(lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-size="14" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#1c2128"/>\n<g fill="#e6edf3">\n{text}\n</g>\n</svg>\n'
    )


def read_lines(svg: str) -> list[str]:
    """Return the lines of text in a picture, the command first."""
    return [html.unescape(re.sub(r"<[^>]*>", "", line)) for line in _LINE.findall(svg)]


def _render_line(line: str, number: int) -> str:
    pieces, style = [], ""
    for index, piece in enumerate(_CODE.split(line)):
        if index % 2:
            style = ";".join(COLORS[code] for code in piece.split(";") if code in COLORS)
        elif piece:
            escaped = html.escape(piece, quote=False)
            pieces.append(f'<tspan style="{style}">{escaped}</tspan>' if style else escaped)
    # The length keeps columns straight in a font with other widths.
    length = len(_CODE.sub("", line)) * WIDTH_PX
    place = f'x="{MARGIN_PX}" y="{MARGIN_PX + (number + 0.75) * LINE_PX:.0f}"'
    return f'<text {place} textLength="{length:.1f}" xml:space="preserve">{"".join(pieces)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(render(run_job(), COMMAND, COLUMNS))
    print(shlex.quote(str(PICTURE)))
