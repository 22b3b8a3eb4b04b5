# The lab's nvidia-smi: answers queries from gpus.csv and processes.csv beside it, without looking at a GPU.
"""Answers `nvidia-smi --query-gpu|--query-remapped-rows|--query-compute-apps=FIELDS --format=csv,noheader,nounits`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

OTHER_NAMES = {"gpu_uuid": "uuid", "gpu_name": "name", "gpu_bus_id": "pci.bus_id"}
TABLES = {
    "--query-gpu": "gpus.csv",
    "--query-remapped-rows": "gpus.csv",
    "--query-compute-apps": "processes.csv",
}


def main(arguments: list[str]) -> int:
    """Print one line per row; an unknown field is refused with the driver's own message."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    here = Path(__file__).resolve().parent
    lines = [line for line in (here / "gpus.csv").read_text().splitlines() if not line.startswith("#")]
    if arguments == ["-L"]:
        for row in csv.DictReader(lines):
            print(f"GPU {row['index']}: {row['name']} (UUID: {row['uuid']})")
        return 0
    query = next((name for name in TABLES if name in given), None)
    if query is None or given.get("--format") != "csv,noheader,nounits":
        print("the lab's nvidia-smi answers --query-... --format=csv,noheader,nounits and -L only", file=sys.stderr)
        return 2
    lines = [line for line in (here / TABLES[query]).read_text().splitlines() if not line.startswith("#")]
    known = lines[0].split(",")
    fields = [field.strip() for field in given[query].split(",")]
    # Processes have a field gpu_uuid of their own.
    columns = [field if field in known else OTHER_NAMES.get(field, field) for field in fields]
    for field, column in zip(fields, columns, strict=True):
        if column not in known:
            print(f'Field "{field}" is not a valid field to query.\n')
            return 2
    for row in csv.DictReader(lines):
        print(", ".join(row[column] for column in columns))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
