"""How long is a training step on a slow network, with each way to reduce the gradients?

    sudo python benchmarks/slow_network.py                          # six nodes at 500 and 100 Mbit/s, three rounds
    sudo python benchmarks/slow_network.py --interfaces 2 --rates 500      # two interfaces of 250 against one of them
    sudo python benchmarks/slow_network.py --switches 2 --rates 500        # an uplink of half a link
    sudo python benchmarks/slow_network.py --nodes 2 4 6 --rates 100 500 1000 0 --steps 5 --store     # and predictions
    sudo python benchmarks/slow_network.py --gpt --rates 500               # examples/gpt, which computes
    python benchmarks/slow_network_page.py        # the section in docs/evidence/benchmarks.md, from stored figures

Real jobs through SLURM in the lab, whose links are shaped with tbf (rate 0: not at all). Each job runs all methods, one
after the other; the jobs of some nodes alternate between the rates. Compute is a sleep (50 ms forward, 100 ms
backward), the model has 13.1 MB. `floor` is what no order of sending can beat: forward, the first gradients, then
2 (n - 1) / n of the bytes at the link's full rate. Ratios are taken job by job.

Before the first job with some nodes and rate, `allranks bench` measures the network, for predictions. --store puts each
complete set, of all rounds with some nodes and rate, into docs/evidence, with that table. Started again with the same
options, it goes on where it was interrupted.

With --gpt, jobs of examples/gpt/train.py take turns, each with other flags of `allranks run`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slow_network_page import GPT_RESULTS, RESULTS, TABLES, with_predictions
from slow_network_sets import Network, Record, Sets, replace_set
from slow_network_worker import BACKWARD_S, FORWARD_S, LAYERS, PARAMETERS

from allranks.lab import lab as labs
from allranks.lab.hosts import SWITCH, find_inits, run_in

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "examples" / "six-node" / "cluster.toml"
WORKER = Path(__file__).with_name("slow_network_worker.py")
GPT = ROOT / "examples" / "gpt" / "train.py"
UNFINISHED = ROOT / ".cache" / "slow_network"
"""Rounds of sets that are not complete."""
GPT_FLAGS = {"plain": (), "equal": ("--bucket-mb", "1"), "bf16": ("--compress", "bf16", "--bucket-mb", "1")}
GPT_BATCH, GPT_CONTEXT = 2, 256
"""Sequences of a rank and step, fewer than the script's default since two cores compute for all ranks; their bytes."""
METHODS = ("compute", "torch", "equal", "s.ddp", "bf16", "int8", "powersgd")
SLOW_MBIT, SLOW_STEPS = 250, 3
"""Three rounds at 100 Mbit/s differed by 0.1 % with plain gradients (2026-11-28)."""
DEADLINE_S = 600
BURST = "128kb"
"""tbf cuts larger packets up: with 64 kB two cores carry 0.2 of 0.5 Gbit/s on each of six links, so they decide."""
SECOND = "ens2f1"
"""Name of the second data interface, where the lab makes one."""
ONE_INTERFACE = """\
export GLOO_SOCKET_IFNAME=$(ip -o -4 address show to 192.168.20.0/24 | awk '{print $2; exit}')
exec "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[6])
    parser.add_argument("--rates", type=int, nargs="+", default=[500, 100], help="Mbit/s of a link; 0: as it is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured for each method in a job")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--interfaces", type=int, choices=[1, 2], default=1, help="of a node; they share the rate")
    parser.add_argument("--switches", type=int, choices=[1, 2], default=1, help="neighbors in the node list alternate")
    parser.add_argument(
        "--gpt", action="store_true", help="run examples/gpt/train.py in place of the model that sleeps"
    )
    parser.add_argument("--store", action="store_true", help="keep complete sets in docs/evidence")
    options = parser.parse_args()
    kind = "gpt" if options.gpt else f"{options.interfaces}-interfaces-{options.switches}-switches"
    key = json.dumps([kind, options.rounds, options.steps, options.methods, describe_code()])
    sets = Sets(UNFINISHED / f"{kind}.json" if options.store else None, key, options.rounds)
    todo = [job for job in list_jobs(options.nodes, options.rates, options.rounds) if not sets.has(*job)]
    if sets.records:
        print(f"{len(todo)} rounds are left; {UNFINISHED / kind}.json has the others", flush=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, Lab(Path(folder), options.interfaces) as lab:
        lab.tables = sets.tables
        if options.switches == 2:
            lab.split_switch()
        for nodes, rate, number in todo:
            lab.shape_links(rate / options.interfaces, uplink=rate / 2)
            fresh = (measure_gpt if options.gpt else measure)(lab, Path(folder), number, nodes, rate, options)
            print_records(fresh)
            sets.add(fresh)
            if options.store:
                store(sets.complete(nodes, rate), options, sets.tables.get((nodes, rate)))
    print("\nmedians")
    is_plain = options.switches == options.interfaces == 1 and not options.gpt
    summarize(with_predictions(sets.records, sets.tables) if is_plain else sets.records)
    sets.finish()


def list_jobs(nodes: Sequence[int], rates: Sequence[int], rounds: int) -> list[tuple[int, int, int]]:
    """Return nodes, rate and round of each job, in their order: the rates take turns, and sets are complete early."""
    return [
        (number_of_nodes, rate, number)
        for number_of_nodes in nodes
        for number in range(rounds)
        for rate in (rates if number % 2 == 0 else reversed(rates))
    ]


def describe_code() -> list[str]:
    """Return what names the code that is measured, without docs/evidence, which the benchmark changes itself."""
    parts = ["git", "-C", str(ROOT), "rev-parse", "HEAD:src", "HEAD:benchmarks"]
    return subprocess.run(parts, capture_output=True, text=True, check=True).stdout.split()


class Lab:
    """Six nodes of real SLURM, whose links have the rate that is wanted."""

    def __init__(self, folder: Path, interfaces: int) -> None:
        self.name = f"slow-{os.getpid()}"
        self.cluster, self.folder, self.num_interfaces = folder / "cluster.toml", folder, interfaces
        second = '[network]\nsecond = "192.168.21.0/24"' if interfaces == 2 else "[network]"
        self.cluster.write_text(CLUSTER.read_text().replace("[network]", second))
        self.uplink: tuple[str, str] | None = None
        self.tables: dict[Network, Any] = {}
        """What `allranks bench` measured, by nodes and rate."""

    def __enter__(self) -> Lab:
        allranks("lab", "up", "--name", self.name, "--cluster", str(self.cluster))
        up = labs.Lab(self.name)
        self.inits = find_inits(up.dir)
        self.interfaces = {host.name: host.data_interface for host in up.planned_hosts()}
        return self

    def __exit__(self, *error: object) -> None:
        allranks("lab", "down", "--name", self.name)

    @property
    def switch(self) -> int:
        return self.inits[SWITCH]

    def split_switch(self) -> None:
        """Move every second node to another switch."""
        script = """
        ip link add dataB type bridge stp_state 0 forward_delay 0
        ip link add uplinkA type veth peer name uplinkB
        ip link set uplinkA master data up; ip link set uplinkB master dataB up; ip link set dataB up
        """
        moves = "\n".join(f"ip link set data{index} master dataB" for index in range(1, len(self.interfaces), 2))
        run_in(self.switch, ["sh", "-e"], script=script + moves)
        self.uplink = "uplinkA", "uplinkB"

    def shape_links(self, mbit: float, *, uplink: float) -> None:
        for index, (name, interface) in enumerate(self.interfaces.items()):
            ends = [(self.switch, f"data{index}"), (self.inits[name], interface)]
            if self.num_interfaces == 2:
                ends += [(self.switch, f"second{index}"), (self.inits[name], SECOND)]
            for pid, end in ends:
                # Without it, two cores are too slow for the packets of six nodes.
                run_in(pid, ["ethtool", "-K", end, "tso", "on", "gso", "on", "gro", "on"])
                set_rate(pid, end, mbit)
        for end in self.uplink or ():
            set_rate(self.switch, end, uplink)

    def bench(self, nodes: int, rate: int) -> Any:
        """Return what `allranks bench` measures at this rate; once for each."""
        if (nodes, rate) not in self.tables:
            here = Path(tempfile.mkdtemp(dir=self.folder))
            self.execute("allranks", "bench", "--nodes", str(nodes), "--cluster", str(self.cluster), cwd=here)
            self.tables[nodes, rate] = json.loads((here / "runs" / "bench.json").read_text())
        return self.tables[nodes, rate]

    def run(self, nodes: int, folder: Path, *command: str) -> str:
        return self.execute("srun", f"--nodes={nodes}", "--ntasks-per-node=1", *command, cwd=folder)

    def execute(self, *command: str, cwd: Path) -> str:
        return allranks("lab", "exec", "--name", self.name, next(iter(self.interfaces)), "--", *command, cwd=cwd)


def set_rate(pid: int, interface: str, mbit: float) -> None:
    if mbit:
        limit = ["rate", f"{mbit:g}mbit", "burst", BURST, "latency", "20ms"]
        run_in(pid, ["tc", "qdisc", "replace", "dev", interface, "root", "tbf", *limit])
    else:
        run_in(pid, ["tc", "qdisc", "delete", "dev", interface, "root"], must_work=False)


def measure(lab: Lab, folder: Path, number: int, nodes: int, rate: int, options: argparse.Namespace) -> list[Record]:
    """One job; or two, where one interface is compared with two, or an order of ranks with another."""
    about = {"round": number, "nodes": nodes, "rate": rate, "floor_ms": floor_ms(nodes, rate) if rate else None}
    found = []
    if options.interfaces == 2:
        found += run_job(lab, folder, options, about | {"interfaces": 1})
    if options.switches == 2:
        found += run_job(lab, folder, options, about | {"ring": "listed"}, has_table=False)
    return found + run_job(lab, folder, options, about | {"interfaces": options.interfaces, "ring": "ordered"})


def run_job(
    lab: Lab, folder: Path, options: argparse.Namespace, about: Record, *, has_table: bool = True
) -> list[Record]:
    here = Path(tempfile.mkdtemp(dir=folder))
    (here / "one_interface.sh").write_text(ONE_INTERFACE)
    if has_table:
        (here / "runs").mkdir()
        (here / "runs" / "bench.json").write_text(json.dumps(lab.bench(about["nodes"], about["rate"])))
    job = ["allranks", "run", "--cluster", str(lab.cluster), "--ignore", "AR213", str(WORKER)]
    job += ["--steps", str(steps_at(about["rate"], options.steps))]
    job += ["--methods", *options.methods]
    if about.get("interfaces", 1) < options.interfaces:
        job = ["sh", str(here / "one_interface.sh"), *job]
    printed = lab.run(about["nodes"], here, *job)
    lines = [line.partition("measured ")[2] for line in printed.splitlines() if "measured {" in line]
    if len(lines) != len(options.methods):
        sys.exit(f"{len(lines)} of {len(options.methods)} methods were measured:\n{printed}")
    return [about | json.loads(line) for line in lines]


def steps_at(rate: int, steps: int) -> int:
    """Return the steps of each method: fewer on slow links, where steps are long and as good as equal."""
    return min(steps, SLOW_STEPS) if 0 < rate < SLOW_MBIT else steps


def measure_gpt(
    lab: Lab, folder: Path, number: int, nodes: int, rate: int, options: argparse.Namespace
) -> list[Record]:
    """A job with each of the flags; each round begins with another one."""
    names, found = list(GPT_FLAGS), list[Record]()
    for name in names[number % len(names) :] + names[: number % len(names)]:
        script = [str(GPT), f"--batch-size={GPT_BATCH}", f"--context={GPT_CONTEXT}", "--json"]
        script += [f"--steps={options.steps + 1}", f"--log-every={options.steps + 1}"]  # the first one is not counted
        flags = ["--cluster", str(lab.cluster), "--ignore", "AR213", *GPT_FLAGS[name]]
        printed = lab.run(nodes, Path(tempfile.mkdtemp(dir=folder)), "allranks", "run", *flags, *script)
        told = re.search(r"\{\"tokens_per_s.*\}", printed)
        if told is None:
            sys.exit(f"no figures of {name}:\n{printed}")
        figures = json.loads(told[0])
        ms = round(figures["world_size"] * GPT_BATCH * GPT_CONTEXT / figures["tokens_per_s"] * 1e3, 1)
        about = {"round": number, "nodes": nodes, "rate": rate, "floor_ms": None}
        found.append(about | {"method": name, "ms": ms, "loss": round(figures["loss"], 3), "steps": options.steps})
    return found


def floor_ms(nodes: int, mbit: float) -> float:
    first_s = BACKWARD_S / LAYERS
    return round((FORWARD_S + first_s + 2 * (nodes - 1) / nodes * PARAMETERS * 32 / mbit / 1e6) * 1e3, 1)


def print_records(records: Sequence[Record]) -> None:
    for record in records:
        print(" ".join(f"{name}={value}" for name, value in record.items()), flush=True)


def summarize(records: Sequence[Record]) -> None:
    """Medians and the spread of ratios, which are taken within one job."""
    keys = ("nodes", "rate", "interfaces", "ring")
    for group in dict.fromkeys(tuple(each.get(key) for key in keys) for each in records):
        mine = [each for each in records if tuple(each.get(key) for key in keys) == group]
        plain = {each["round"]: each["ms"] for each in mine if each["method"] == "equal"}
        floor = mine[0]["floor_ms"]
        print(f"{group[0]} nodes, {group[1]} Mbit/s, {group[2] or 1} interface(s); floor {floor} ms")
        for method in dict.fromkeys(each["method"] for each in mine):
            some = [each for each in mine if each["method"] == method]
            times = [each["ms"] for each in some]
            line = f"  {method:<9} {statistics.median(times):7.0f} ms ({min(times):.0f} to {max(times):.0f})"
            if "sent_mb" in some[0]:
                line += f"  {statistics.median(each['sent_mb'] for each in some):5.1f} MB sent"
            if plain:
                ratios = [plain[each["round"]] / each["ms"] for each in some]
                line += f"  {statistics.median(ratios):.2f} x equal ({min(ratios):.2f} to {max(ratios):.2f})"
            if floor:
                line += f"  {statistics.median(times) / floor:.2f} x floor"
            if guesses := [each["predicted_ms"] / each["ms"] for each in some if "predicted_ms" in each]:
                line += f"  predicted {statistics.median(guesses):.2f} ({min(guesses):.2f} to {max(guesses):.2f})"
            print(line)


def store(complete: Sequence[Record], options: argparse.Namespace, table: Any) -> None:
    """Put a complete set into docs/evidence, in place of that of the same nodes, links and switches."""
    if not complete:
        return
    date, one = datetime.date.today().isoformat(), complete[0]
    if options.gpt:
        replace_set(GPT_RESULTS, [record | {"date": date} for record in complete], "nodes", "rate")
        return
    place = {"switches": options.switches, "two": options.interfaces == 2}
    replace_set(RESULTS, [place | record | {"date": date} for record in complete], "switches", "two", "nodes", "rate")
    if place == {"switches": 1, "two": False}:
        replace_set(TABLES, [{"nodes": one["nodes"], "rate": one["rate"], "table": table}], "nodes", "rate")


def allranks(*arguments: str, cwd: Path | None = None) -> str:
    command = [sys.executable, "-m", "allranks", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=cwd)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    began_s = time.monotonic()
    main()
    print(f"{time.monotonic() - began_s:.0f} s")
