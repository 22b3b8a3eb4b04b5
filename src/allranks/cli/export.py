"""`allranks export`: the weights of a checkpoint as one file that other programs read."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from allranks.cli import complete
from allranks.model.errors import SetupError, UsageError
from allranks.report.text import printable


@click.command("export")
@click.argument("checkpoint", metavar="CHECKPOINT | RUN", shell_complete=complete.jobs_or_paths)
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
def export(checkpoint: str, safetensors_out: Path | None, torch_out: Path | None, part: str) -> None:
    """Write the weights of a checkpoint to one file.

    CHECKPOINT is one checkpoint, or a directory of checkpoints; of a directory or a run, the newest complete checkpoint
    is exported.

    \b
    allranks export latest --safetensors model.safetensors                       the newest run in runs/
    allranks export runs/4711/checkpoints --torch model.pt
    allranks export runs/4711/checkpoints/step_300 --torch model.pt --part ema
    """
    if safetensors_out is None and torch_out is None:
        raise UsageError("export: say what to write: --safetensors OUT or --torch OUT")
    if safetensors_out is not None:
        try:
            import safetensors  # noqa: F401
        except ImportError as exc:
            cure = f"{sys.executable} -m pip install safetensors"
            raise UsageError(f"export: --safetensors needs safetensors: {cure} ({exc})") from exc
    found = find_checkpoint(checkpoint)
    try:
        from allranks.state.saved import weights
    except ImportError as exc:
        raise SetupError(f"export needs PyTorch in {sys.executable}: {exc}; pip install 'allranks[torch]'") from exc
    for out in (safetensors_out, torch_out):
        if out is None:
            continue
        try:
            num_tensors = weights.export(found, out, part=part, as_safetensors=out is safetensors_out)
        except OSError as exc:
            raise UsageError(f"export: {out}: {exc.strerror or exc}") from exc
        click.echo(printable(f"{out}: {num_tensors} tensors, {out.stat().st_size / 1e6:.1f} MB"))


def find_checkpoint(text: str) -> Path:
    """Return the checkpoint, or the directory of checkpoints, that is meant.

    Raises:
        UsageError: there is no checkpoint at any place.
    """
    from allranks.state.saved.manifest import MANIFEST
    from allranks.state.saved.parts import list_checkpoints

    try:
        places = places_of(text)
    except UsageError as exc:
        if not list_checkpoints(here := Path("checkpoints")):
            raise
        raise UsageError(f"{exc}, but checkpoints in {here}/: allranks export {here}") from exc
    for place in places:
        if place.is_dir() and ((place / MANIFEST).exists() or list_checkpoints(place)):
            return place
    looked = " and ".join(f"{place}/" for place in places if place.is_dir()) or f"{places[0]}: no such directory"
    raise UsageError(
        f"export: {text}: found no checkpoint ({looked}); expected a checkpoint, which is a directory step_N with a "
        f"{MANIFEST}, a directory of checkpoints, for example runs/latest/checkpoints, or a run, for example latest"
    )


def places_of(text: str) -> list[Path]:
    """Return where checkpoints may be: of a path, else of a run, by its directory, its id, or `latest`.

    The checkpoints of a run are where `allranks run --checkpoint-dir` had them, else in its directory.
    """
    from allranks.launch.batch.clean import checkpoint_places
    from allranks.report.runs import find_run, is_run, read_run
    from allranks.state.saved.parts import list_checkpoints

    path = Path(text)
    is_of_run = is_run(path) and not list_checkpoints(path)  # a user's own directory may have a submission.sh, too
    run = read_run(path) if is_of_run else None if path.exists() else find_run(text, Path("runs"))
    return [path, path / "checkpoints"] if run is None else [*checkpoint_places(run.path), run.path / "checkpoints"]
