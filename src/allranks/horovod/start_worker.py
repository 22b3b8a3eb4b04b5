"""Give a Horovod worker its own node's interface of the data network. Runs on each node, and becomes the worker.

    python -m allranks.horovod.start_worker 192.168.20.0/24 -- env HOROVOD_GLOO_IFACE=ens1f1 ... python train.py

Horovod gives all workers the interface of the driver's node. Where the nodes' interfaces have different names, Gloo
then ends with `Unable to find address for: ens1f1`. SLURM's variables are the driver's, too: those of the worker's own
step stay.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from ipaddress import ip_network

from allranks.host.net import find_interface_in, read_interfaces
from allranks.model.errors import SetupError

OF_THE_INTERFACE = ("HOROVOD_GLOO_IFACE=", "NCCL_SOCKET_IFNAME=")


def place_command(command: Sequence[str], interface: str) -> list[str]:
    """Return the worker's command with the interface of this node, and without the SLURM variables of another one."""
    placed = []
    for word in command:
        name = next((variable for variable in OF_THE_INTERFACE if word.startswith(variable)), None)
        if name is not None:
            placed.append(name + interface)
        elif not word.startswith("SLURM"):
            placed.append(word)
    return placed


def main() -> None:
    """Become the worker; exits with 78 if this node is not on the data network."""
    subnet, command = sys.argv[1], sys.argv[sys.argv.index("--") + 1 :]
    found = find_interface_in(ip_network(subnet), read_interfaces())
    if found is None:
        error = SetupError(f"{os.uname().nodename} has no interface in {subnet}, the network of this Horovod job")
        print(f"allranks: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    placed = place_command(command, found[0].name)
    os.execvp(placed[0], placed)


if __name__ == "__main__":
    main()
