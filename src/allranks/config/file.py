"""Read and check cluster.toml, with the line of each value.

    >>> loaded = parse_cluster('[network]\\nport = 29501\\n', Path("cluster.toml"))
    >>> loaded.cluster.network.port, loaded.origins["network.port"]
    (29501, 'cluster.toml:2')

The first error raises ConfigError, with one line that names file, table, key, the value as written, and the expected
value. Only the file is checked here; preflight/datapath.py checks whether it fits this machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from allranks.config.keys import KEYS, ExpectedError
from allranks.config.toml import find_lines, load_toml, paths_of, plain, show, show_entry, show_key
from allranks.model.cluster import Cluster, Node
from allranks.model.errors import ConfigError
from allranks.model.hostlist import is_host_name
from allranks.model.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from allranks.config.toml import KeyPath


@dataclass(frozen=True, slots=True)
class LoadedCluster:
    """A cluster and the origin of each value; without arguments, all defaults."""

    cluster: Cluster = field(default_factory=Cluster)
    origins: Mapping[str, str] = field(default_factory=dict)
    """`network.port` -> `cluster.toml:12`, `node.node03.gpus` -> `cluster.toml:31`; a default has no entry."""

    def settings(self) -> tuple[Setting, ...]:
        """Return every key with its value, meaning and origin, in the order of the documentation."""
        rows = [(table, table, getattr(self.cluster, table)) for table in KEYS if table != "node"]
        rows += [(f"node.{node.name}", "node", node) for node in self.cluster.node]
        settings: list[Setting] = []
        for prefix, table, values in rows:
            for key, (_, _, doc) in KEYS[table].items():
                name, value = f"{prefix}.{key}", _as_text(getattr(values, key))
                settings.append(Setting(name, value, reason=doc, source=self.origins.get(name, "default")))
        return tuple(settings)


def find_cluster_file(explicit: str | Path | None, env: Mapping[str, str], cwd: Path) -> Path | None:
    """Return the file to read: the flag's, else $ALLRANKS_CLUSTER, else cluster.toml in `cwd` if it exists.

    The path of flag or variable is returned even if it does not exist; reading it then raises the error.

    Args:
        explicit: value of `--cluster`.
        env: the process environment; an empty variable counts as unset.
        cwd: where to look last.
    """
    if named := explicit or env.get("ALLRANKS_CLUSTER"):
        return Path(named)
    found = cwd / "cluster.toml"
    return found if found.exists() else None


def read_cluster(path: Path) -> LoadedCluster:
    """Read and check the file.

    Raises:
        ConfigError: it cannot be read, or a key or value is wrong.
    """
    file = plain(str(path))
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        seen = (getattr(exc, "strerror", None) or str(exc)).lower()
        raise ConfigError(f"{file}: cannot be read: {seen}: expected a file as written by `allranks init`") from exc
    try:
        text = content.decode("utf-8-sig")  # editors on Windows put a byte order mark first
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        raise ConfigError(f"{file}: line {line}: byte 0x{exc.object[exc.start]:02x}: expected UTF-8 text") from exc
    return parse_cluster(text, path)


def parse_cluster(text: str, path: Path) -> LoadedCluster:
    """Check the text, and return the cluster with the line of each value.

    Args:
        text: content of the file.
        path: name of the file in messages and origins.

    Raises:
        ConfigError: a key or value is wrong.
    """
    file, text = plain(str(path)), text.replace("\r\n", "\n")
    document = load_toml(text, file)
    if not document:
        raise ConfigError(f"{file}: is empty: expected at least one table, for example [cluster] with a name")
    tables: dict[str, Any] = {}
    for name, values in document.items():
        seen = show_entry(name, values)
        if name not in KEYS:
            what = "unknown table" if seen.startswith("[") else "key outside of a table"
            raise ConfigError(f"{file}: {seen}: {what}, {_hint(name, KEYS)}")
        if name == "node":
            if not isinstance(values, list):
                raise ConfigError(f"{file}: {seen}: expected [[node]], one for each node")
        elif not isinstance(values, dict):
            raise ConfigError(f"{file}: {seen}: expected [{name}], once")
        else:
            tables[name] = replace(getattr(Cluster(), name), **_read_keys(f"{file}: [{name}]", name, values))
    data = tables["network"].data if "network" in tables else None
    cluster = Cluster(**tables, node=_read_nodes(file, document.get("node", []), data=data))
    return LoadedCluster(cluster, _origins(file, document, find_lines(text)))


def _read_keys(where: str, table: str, values: Mapping[str, object]) -> dict[str, Any]:
    """Return the clean values of one table. Each message begins with `where`: file and table."""
    known = KEYS[table]
    clean: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where} {show_key(name)} = {show(value)}: unknown key, {_hint(name, known)}")
        expected = known[name].expected
        try:
            clean[name] = known[name].read(value)
        except ExpectedError as exc:
            clean[name], expected = None, str(exc)
        except ValueError:
            clean[name] = None
        if clean[name] is None:
            raise ConfigError(f"{where} {name} = {show(value)}: expected {expected}")
    return clean


def _read_nodes(file: str, values: Sequence[object], *, data: str | None) -> tuple[Node, ...]:
    nodes: list[Node] = []
    numbers: dict[str, int] = {}
    owners: dict[str, str] = {}
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise ConfigError(f"{file}: [[node]] {number} = {show(value)}: expected a table with name and address")
        name = value.get("name")
        where = f"{file}: [[node]] {name if isinstance(name, str) and is_host_name(name) else number}"
        clean = _read_keys(where, "node", value)
        for needed in ("name", "address"):
            if needed not in clean:
                raise ConfigError(f"{where}: no {needed}: expected {KEYS['node'][needed].expected}")
        if "interface" not in clean and data is None:
            raise ConfigError(f"{where}: no interface: expected one, or [network] data, which determines it")
        node, shown = Node(**clean), show(value["address"])
        if node.name in numbers:
            first = f"[[node]] {numbers[node.name]}"
            raise ConfigError(
                f'{file}: [[node]] {number} name = "{node.name}": {first} has the same name: expected each name once'
            )
        if node.address in owners:
            raise ConfigError(
                f"{where} address = {shown}: {owners[node.address]} has the same address: expected each address once"
            )
        _check_place(f"{where} address = {shown}", node, first=nodes[0] if nodes else node, data=data)
        numbers[node.name], owners[node.address] = number, node.name
        nodes.append(node)
    return tuple(nodes)


def _check_place(where: str, node: Node, *, first: Node, data: str | None) -> None:
    """Refuse an address outside the data network or, if none is given, of another family than the first node's."""
    address, other = ip_address(node.address), ip_address(first.address)
    if data is not None:
        network = ip_network(data)
        if address not in network:
            kind = "an address" if address.version == network.version else f"an IPv{network.version} address"
            raise ConfigError(f'{where}: expected {kind} in [network] data = "{data}"')
    elif address.version != other.version:
        raise ConfigError(f'{where}: expected IPv{other.version} as for {first.name}, "{other}"')


def _origins(file: str, document: dict[str, Any], lines: Mapping[KeyPath, int]) -> dict[str, str]:
    """Return the origin of every key of a valid document: file and line, or only the file if the line was not found."""

    def name(path: KeyPath) -> str:
        return ".".join(document["node"][part]["name"] if isinstance(part, int) else part for part in path)

    return {name(path): f"{file}:{lines[path]}" if path in lines else file for path in paths_of(document)}


def _as_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _hint(name: str, known: Mapping[str, object]) -> str:
    import difflib  # only here: agents start from a network file system

    homes = [f"[[{table}]]" if table == "node" else f"[{table}]" for table, keys in KEYS.items() if name in keys]
    if homes:
        return f"did you mean {homes[0]} {name}?"
    close = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    return f'did you mean "{close[0]}"?' if close else f"expected one of {', '.join(known)}"
