"""What does cluster.toml say, on which line, and what is wrong with it?

    >>> loaded = parse_cluster('[network]\\nport = 29501\\n', Path("cluster.toml"))
    >>> loaded.cluster.network.port, loaded.origins["network.port"]
    (29501, 'cluster.toml:2')

The first error ends it, in one line that names file, table, key, the value as written and what was expected.
Only the file is looked at: whether it fits this machine is decided where the machine is known.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from allranks.model.cluster import Backend, Cluster, Node
from allranks.model.errors import ConfigError
from allranks.model.hostlist import is_host_name
from allranks.model.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    _KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class LoadedCluster:
    """A cluster and where each of its values comes from; without arguments, all defaults."""

    cluster: Cluster = field(default_factory=Cluster)
    origins: Mapping[str, str] = field(default_factory=dict)
    """`network.port` -> `cluster.toml:12`, `node.node03.gpus` -> `cluster.toml:31`; a default has no entry."""

    def settings(self) -> tuple[Setting, ...]:
        """Every key with its value, what it is for, and its origin, in the order of the documentation."""
        rows = [(table, table, getattr(self.cluster, table)) for table in _KEYS if table != "node"]
        rows += [(f"node.{node.name}", "node", node) for node in self.cluster.node]
        settings: list[Setting] = []
        for prefix, table, values in rows:
            for key, (_, _, doc) in _KEYS[table].items():
                name, value = f"{prefix}.{key}", _as_text(getattr(values, key))
                settings.append(Setting(name, value, reason=doc, source=self.origins.get(name, "default")))
        return tuple(settings)


def find_cluster_file(explicit: str | Path | None, env: Mapping[str, str], cwd: Path) -> Path | None:
    """The file to read: the flag's, else $ALLRANKS_CLUSTER, else cluster.toml in `cwd` where there is one.

    What flag or variable name is returned whether it exists or not, so that reading it says what is wrong.

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
    """Reads and checks the file.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    file = _plain(str(path))
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        seen = (getattr(exc, "strerror", None) or str(exc)).lower()
        raise ConfigError(f"{file}: cannot be read: {seen}: expected a file as `allranks init` writes") from exc
    try:
        text = content.decode("utf-8-sig")  # editors on Windows put a byte order mark first
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        raise ConfigError(f"{file}: line {line}: byte 0x{exc.object[exc.start]:02x}: expected UTF-8 text") from exc
    return parse_cluster(text, path)


def parse_cluster(text: str, path: Path) -> LoadedCluster:
    """Checks the text and says where each value stands.

    Args:
        text: content of the file.
        path: what messages and origins call it.

    Raises:
        ConfigError: something in it is wrong.
    """
    file, text = _plain(str(path)), text.replace("\r\n", "\n")
    document = _load_toml(text, file)
    if not document:
        raise ConfigError(f"{file}: says nothing: expected at least one table, for example [cluster] with a name")
    tables: dict[str, Any] = {}
    for name, values in document.items():
        seen = _show_entry(name, values)
        if name not in _KEYS:
            what = "unknown table" if seen.startswith("[") else "key outside of a table"
            raise ConfigError(f"{file}: {seen}: {what}, {_hint(name, _KEYS)}")
        if name == "node":
            if not isinstance(values, list):
                raise ConfigError(f"{file}: {seen}: expected [[node]], one for each node")
        elif not isinstance(values, dict):
            raise ConfigError(f"{file}: {seen}: expected [{name}], once")
        else:
            tables[name] = replace(getattr(Cluster(), name), **_read_keys(f"{file}: [{name}]", name, values))
    data = tables["network"].data if "network" in tables else None
    cluster = Cluster(**tables, node=_read_nodes(file, document.get("node", []), data=data))
    return LoadedCluster(cluster, _origins(file, document, _find_lines(text)))


# Values: a reader gives the clean value. For a wrong one it gives None or raises ValueError (as ipaddress does), and
# _ExpectedError where it knows better than the table of keys what was meant.


class _ExpectedError(Exception):
    pass


def _integer(low: int, high: int) -> Callable[[Any], int | None]:
    return lambda value: value if type(value) is int and low <= value <= high else None  # True is an int for isinstance


def _matching(pattern: str) -> Callable[[Any], str | None]:
    return lambda value: value if isinstance(value, str) and re.fullmatch(pattern, value) else None


def _seconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 < value <= _YEAR_S else None


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _backend(value: Any) -> Backend | None:
    return next((backend for backend in Backend if backend == value), None)


def _subnet(value: Any) -> str | None:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9A-Fa-f:.]+/[0-9.]+", value):
        return None
    network, address = ip_network(value, strict=False), ip_address(value.split("/")[0])
    if network.prefixlen and address != network.network_address:
        raise _ExpectedError(f'a network, did you mean "{network}"?')
    return str(network) if network.prefixlen else None


def _address(value: Any) -> str | None:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9A-Fa-f:.]+(/[0-9]+)?", value):
        return None
    address = ip_address(value.split("/")[0])
    if "/" in value:
        raise _ExpectedError(f'the address alone, did you mean "{address}"?')
    return None if address.is_unspecified or address.is_multicast else str(address)


def _node_name(value: Any) -> str | None:
    if isinstance(value, str) and set(value) & set("[],"):
        raise _ExpectedError("one host name, not a host list: write a [[node]] for each")
    return value if isinstance(value, str) and is_host_name(value) else None


class _Key(NamedTuple):
    read: Callable[[Any], Any]
    expected: str
    doc: str


_YEAR_S = 31_536_000
_SECONDS = f"seconds above 0, at most {_YEAR_S} (a year), for example "
_PARTITION = r"[A-Za-z0-9_][A-Za-z0-9_.-]*(,[A-Za-z0-9_][A-Za-z0-9_.-]*)*"
# No character that NCCL_SOCKET_IFNAME or ip(8) gives a meaning; 15 is IFNAMSIZ less the final NUL.
_INTERFACE = r"(?!\.{1,2}$)[A-Za-z0-9_.][A-Za-z0-9_.+-]{0,14}"
_TITLE = r"[!-~]([ -~]{0,62}[!-~])?"
_SLURM_TIME = r"[0-9]{1,6}(:[0-9]{1,2}){0,2}|[0-9]{1,4}-[0-9]{1,2}(:[0-9]{1,2}){0,2}"

_KEYS: dict[str, dict[str, _Key]] = {
    "cluster": {
        "name": _Key(_matching(_TITLE), '1 to 64 ASCII characters, for example "six-node"', "what reports call it"),
    },
    "network": {
        "data": _Key(_subnet, 'a subnet, for example "192.168.20.0/24"', "the subnet that carries gradients"),
        "port": _Key(_integer(1, 65535), "an integer from 1 to 65535, for example 29500", "the leader prefers it"),
        "infiniband": _Key(_boolean, "true or false", "whether NCCL may use InfiniBand; NCCL decides if not set"),
    },
    "train": {
        "backend": _Key(_backend, '"auto", "nccl" or "gloo"', "auto is nccl where every rank has a GPU, else gloo"),
        "timeout_s": _Key(_seconds, _SECONDS + "600", "when torch gives a collective up"),
    },
    "guard": {
        "join_s": _Key(_seconds, _SECONDS + "60", "deadline of the roll call"),
        "gone_s": _Key(_seconds, _SECONDS + "10", "silence on two paths before a node is called gone"),
        "beat_s": _Key(_seconds, _SECONDS + "0.5", "between two words of an agent about its workers"),
        "stopped_s": _Key(_seconds, _SECONDS + "5", "how long a worker may be stopped before that is a fault"),
        "stalled_s": _Key(_seconds, _SECONDS + "5", "without an acknowledgement before a link is tried and blamed"),
        "slow_s": _Key(_seconds, _SECONDS + "30", "of waiting before a late rank is named"),
        "hang_s": _Key(_seconds, _SECONDS + "600", "when a merely slow rank is ended"),
    },
    "slurm": {
        "partition": _Key(_matching(_PARTITION), 'a partition, for example "main"', "where jobs are queued"),
        "time": _Key(_matching(_SLURM_TIME), 'text such as "90" (minutes), "02:00:00" or "1-00"', "limit of a job"),
    },
    "node": {
        "name": _Key(_node_name, 'a host name, for example "node01"', "the name that SLURM and `hostname` have for it"),
        "address": _Key(_address, 'an IP address, for example "192.168.20.15"', "its address on the data network"),
        "interface": _Key(
            _matching(_INTERFACE),
            'an interface name of 1 to 15 letters, digits, "_", ".", "+" and "-", for example "ens1f1"',
            "its data interface; found from network.data if not set",
        ),
        "gpus": _Key(_integer(0, 1024), "an integer from 0 to 1024, for example 1", "GPUs that jobs may use"),
    },
}


def _read_keys(where: str, table: str, values: Mapping[str, object]) -> dict[str, Any]:
    """Clean values of one table. `where` begins each message: file and table."""
    known = _KEYS[table]
    clean: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where} {_show_key(name)} = {_show(value)}: unknown key, {_hint(name, known)}")
        expected = known[name].expected
        try:
            clean[name] = known[name].read(value)
        except _ExpectedError as exc:
            clean[name], expected = None, str(exc)
        except ValueError:
            clean[name] = None
        if clean[name] is None:
            raise ConfigError(f"{where} {name} = {_show(value)}: expected {expected}")
    return clean


def _read_nodes(file: str, values: Sequence[object], *, data: str | None) -> tuple[Node, ...]:
    nodes: list[Node] = []
    numbers: dict[str, int] = {}
    owners: dict[str, str] = {}
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise ConfigError(f"{file}: [[node]] {number} = {_show(value)}: expected a table with name and address")
        name = value.get("name")
        where = f"{file}: [[node]] {name if isinstance(name, str) and is_host_name(name) else number}"
        clean = _read_keys(where, "node", value)
        for needed in ("name", "address"):
            if needed not in clean:
                raise ConfigError(f"{where}: no {needed}: expected {_KEYS['node'][needed].expected}")
        if "interface" not in clean and data is None:
            raise ConfigError(f"{where}: no interface: expected one, or [network] data to find it by")
        node, shown = Node(**clean), _show(value["address"])
        if node.name in numbers:
            first = f"[[node]] {numbers[node.name]}"
            raise ConfigError(f'{file}: [[node]] {number} name = "{node.name}": {first} has it: expected each once')
        if node.address in owners:
            raise ConfigError(f"{where} address = {shown}: {owners[node.address]} has it: expected each once")
        _check_place(f"{where} address = {shown}", node, first=nodes[0] if nodes else node, data=data)
        numbers[node.name], owners[node.address] = number, node.name
        nodes.append(node)
    return tuple(nodes)


def _check_place(where: str, node: Node, *, first: Node, data: str | None) -> None:
    """Refuses an address outside of the data network or, where none is said, of another family than the first one."""
    address, other = ip_address(node.address), ip_address(first.address)
    if data is not None:
        network = ip_network(data)
        if address not in network:
            kind = "an address" if address.version == network.version else f"an IPv{network.version} address"
            raise ConfigError(f'{where}: expected {kind} in [network] data = "{data}"')
    elif address.version != other.version:
        raise ConfigError(f'{where}: expected IPv{other.version} as for {first.name}, "{other}"')


def _hint(name: str, known: Mapping[str, object]) -> str:
    import difflib  # only here: agents start from a network file system

    homes = [f"[[{table}]]" if table == "node" else f"[{table}]" for table, keys in _KEYS.items() if name in keys]
    if homes:
        return f"did you mean {homes[0]} {name}?"
    close = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    return f'did you mean "{close[0]}"?' if close else f"expected one of {', '.join(known)}"


# TOML: tomllib gives values without their lines, and errors without the text that it stumbled over.


def _load_toml(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError as exc:
        raise ConfigError(f"{file}: nested too deep: expected tables of plain values") from exc
    except ValueError as exc:  # TOMLDecodeError is one; so is what int() raises above 4300 digits
        found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(exc), re.DOTALL)
        what = found[1] if found else str(exc).split(";")[0]
        what, place = _shorten(_plain(what[:1].lower() + what[1:])), ": at the end" if found else ""
        if found and found[2]:
            line = text.split("\n")[int(found[2]) - 1].strip()
            what, place = f"{what} in {_show(line)}", f": line {found[2]}, column {found[3]}"
        raise ConfigError(f"{file}{place}: {what}: expected TOML, texts in double quotes") from exc


_MAX_STATEMENT_LINES = 100


def _find_lines(text: str) -> dict[_KeyPath, int]:
    """Line of every value in a text that is a valid cluster.toml, ("node", 0, "name") -> 12.

    A statement is valid TOML on its own, and a part of one never is: lines are gathered until tomllib takes them.
    That is quadratic in the length of a statement, so the search ends at one of more than _MAX_STATEMENT_LINES;
    values from there on have no line.
    """
    lines: dict[_KeyPath, int] = {}
    table, num_nodes, first, statement = "", 0, 1, ""
    for number, line in enumerate(text.split("\n"), 1):
        first = first if statement else number
        statement += line + "\n"
        try:
            found = tomllib.loads(statement)
        except ValueError:
            if number - first >= _MAX_STATEMENT_LINES:
                break
            continue
        if statement.lstrip().startswith("["):
            table = next(iter(found))
            num_nodes += table == "node"
        elif table == "node":
            lines |= {(table, num_nodes - 1, key): first for key in found}
        else:
            lines |= dict.fromkeys(_paths({table: found} if table else found), first)
        statement = ""
    return lines


def _paths(document: Mapping[str, Any]) -> Iterator[_KeyPath]:
    for table, values in document.items():
        if table == "node":
            yield from ((table, index, key) for index, node in enumerate(values) for key in node)
        else:
            yield from ((table, key) for key in values)


def _origins(file: str, document: dict[str, Any], lines: Mapping[_KeyPath, int]) -> dict[str, str]:
    """Origin of every key of a valid document: file and line, or the file alone where the line was not found."""

    def name(path: _KeyPath) -> str:
        return ".".join(document["node"][part]["name"] if isinstance(part, int) else part for part in path)

    return {name(path): f"{file}:{lines[path]}" if path in lines else file for path in _paths(document)}


# Text: whatever the file holds, a message stays one line of printable characters.


def _as_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _show(value: object) -> str:
    """The value as TOML has it, escaped and shortened."""
    if isinstance(value, str):
        escaped = value[:60].encode("unicode_escape").decode("ascii").replace('"', '\\"')
        return f'"{escaped}"' + ("..." if len(value) > 60 else "")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return _shorten(str(value) if value.bit_length() < 10_000 else hex(value))  # str() refuses 4300 digits
    if isinstance(value, list):
        inner = ["..." if isinstance(item, list | dict) else _show(item) for item in value[:3]]
        return f"[{', '.join(inner)}{', ...' if len(value) > 3 else ''}]"
    return "{...}" if isinstance(value, dict) else str(value)


def _show_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) else _show(name)


def _show_entry(name: str, values: object) -> str:
    """A top-level entry as one writes it: [name], [[name]] or name = value."""
    if isinstance(values, dict):
        return f"[{_show_key(name)}]"
    is_array = isinstance(values, list) and values and all(isinstance(value, dict) for value in values)
    return f"[[{_show_key(name)}]]" if is_array else f"{_show_key(name)} = {_show(values)}"


def _plain(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "..."
