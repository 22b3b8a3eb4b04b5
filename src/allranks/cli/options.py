"""Options that several verbs have."""

from __future__ import annotations

from pathlib import Path

import click

cluster_option = click.option(
    "--cluster",
    "cluster_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="[default: $ALLRANKS_CLUSTER, ./cluster.toml]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")
name_option = click.option("--name", default="lab", show_default=True, help="Which lab; several may be up.")
