"""`allranks export`: the weights of a checkpoint as one file that other programs read."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from allranks.model.errors import SetupError, UsageError
from allranks.report.text import printable


@click.command("export")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--safetensors",
    "safetensors_out",
    metavar="OUT",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write OUT for safetensors.torch.load_file.",
)
@click.option(
    "--torch",
    "torch_out",
    metavar="OUT",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write OUT for torch.load.",
)
@click.option("--part", default="model", metavar="NAME", show_default=True, help="Part to write, as track() names it.")
def export(checkpoint: Path, safetensors_out: Path | None, torch_out: Path | None, part: str) -> None:
    """Write the weights of a checkpoint to one file.

    CHECKPOINT is one checkpoint, or the directory of a job's checkpoints: then the newest complete one is taken.

    \b
    allranks export checkpoints --safetensors model.safetensors
    allranks export checkpoints/step_300 --torch model.pt --part ema
    """
    if safetensors_out is None and torch_out is None:
        raise UsageError("export: say what to write: --safetensors OUT or --torch OUT")
    try:
        from allranks.state.saved import weights
    except ImportError as exc:
        raise SetupError(f"export needs PyTorch in {sys.executable}: {exc}; pip install 'allranks[torch]'") from exc
    for out in (safetensors_out, torch_out):
        if out is None:
            continue
        try:
            num_tensors = weights.export(checkpoint, out, part=part, as_safetensors=out is safetensors_out)
        except OSError as exc:
            raise UsageError(f"export: {out}: {exc.strerror or exc}") from exc
        click.echo(printable(f"{out}: {num_tensors} tensors, {out.stat().st_size / 1e6:.1f} MB"))
