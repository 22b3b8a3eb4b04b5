from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.config.file import LoadedCluster, find_cluster_file, parse_cluster, read_cluster
from allranks.model.cluster import Backend, Cluster, GuardTable, NetworkTable, Node, SlurmTable, TrainTable
from allranks.model.errors import ConfigError

PATH = Path("cluster.toml")

FULL = """\
# the reference cluster
[cluster]
name = "six-node"

[network]
data = "192.168.20.0/24"     # port = 1
port = 29501
infiniband = false

[train]
backend = "gloo"
timeout_s = 300

[guard]
join_s = 90
gone_s = 2.5
hang_s = 1200

[slurm]
partition = "main,long"
time = "02:00:00"

[[node]]
name = "master-node"
address = "192.168.20.15"
interface = "ens1f1"
gpus = 1

[[node]]
name = "node01"
address = "192.168.20.16"
"""

DATA = '[network]\ndata = "192.168.20.0/24"\n'
NODE = DATA + '[[node]]\nname = "n1"\naddress = "192.168.20.1"\n'
TOML = "expected TOML, with texts in double quotes"
TABLES = "expected one of cluster, network, train, guard, slurm, report, node"
DIRECTORY = 'expected an absolute path, for example "/var/lib/prometheus/node-exporter"'
PORT = "expected an integer from 1 to 65535, for example 29500"
SUBNET = 'expected a subnet, for example "192.168.20.0/24"'
SECONDS = "expected seconds above 0, at most 31536000 (a year), for example"
TIME = 'expected text such as "90" (minutes), "02:00:00" or "1-00"'
ADDRESS = 'expected an IP address, for example "192.168.20.15"'
HOST = 'expected a host name, for example "node01"'
NAME = 'expected 1 to 64 ASCII characters, for example "six-node"'
INTERFACE = 'expected an interface name of 1 to 15 letters, digits, "_", ".", "+" and "-", for example "ens1f1"'
GPUS = "expected an integer from 0 to 1024, for example 1"
NOTHING = "is empty: expected at least one table, for example [cluster] with a name"

REFUSED = {
    # TOML itself
    "": NOTHING,
    "# only a comment\n \n": NOTHING,
    "[network]\nport = 29k\n": "line 2, column 10: expected newline or end of document after a statement "
    f'in "port = 29k": {TOML}',
    "[network]\r\ndata = 192.168.20.0/24\r\n": "line 2, column 15: expected newline or end of document after a "
    f'statement in "data = 192.168.20.0/24": {TOML}',
    "[network\n": f"line 1, column 9: expected ']' at the end of a table declaration in \"[network\": {TOML}",
    "[network]\n[network]\n": f"line 2, column 9: cannot declare ('network',) twice in \"[network]\": {TOML}",
    'x = "\x1b"\n': f'line 1, column 6: illegal character \'\\x1b\' in "x = \\"\\x1b\\"": {TOML}',
    'x = """\n': f"at the end: unterminated string: {TOML}",
    "x = " + "1" * 5000: "exceeds the limit (4300 digits) for integer string conversion: value has 5000 di...: " + TOML,
    "x = " + "[" * 5000: "nested too deeply: expected tables of plain values",
    # tables
    "[netwrok]\n": '[netwrok]: unknown table, did you mean "network"?',
    "[[nodes]]\n": '[[nodes]]: unknown table, did you mean "node"?',
    "[x]\n": f"[x]: unknown table, {TABLES}",
    '["a\\nb"]\n': f'["a\\nb"]: unknown table, {TABLES}',
    "port = 29500\n": "port = 29500: key outside of a table, did you mean [network] port?",
    "x = 1\n": f"x = 1: key outside of a table, {TABLES}",
    "network = 5\n": "network = 5: expected [network], once",
    "[[network]]\n": "[[network]]: expected [network], once",
    '[node]\nname = "n1"\n': "[node]: expected [[node]], one for each node",
    "node = 5\n": "node = 5: expected [[node]], one for each node",
    "node = [1]\n": "[[node]] 1 = 1: expected a table with name and address",
    # keys
    "[network]\nprot = 29500\n": '[network] prot = 29500: unknown key, did you mean "port"?',
    "[network]\ntimeout_s = 1\n": "[network] timeout_s = 1: unknown key, did you mean [train] timeout_s?",
    "[network]\ngpus = 1\n": "[network] gpus = 1: unknown key, did you mean [[node]] gpus?",
    "[network]\nxyz = 1\n": "[network] xyz = 1: unknown key, expected one of data, second, port, infiniband",
    '[network]\n"a\\u001b" = 1\n': (
        '[network] "a\\x1b" = 1: unknown key, expected one of data, second, port, infiniband'
    ),
    NODE + "gpu = 1\n": '[[node]] n1 gpu = 1: unknown key, did you mean "gpus"?',
    # [cluster]
    "[cluster]\nname = 5\n": f"[cluster] name = 5: {NAME}",
    '[cluster]\nname = " "\n': f'[cluster] name = " ": {NAME}',
    '[cluster]\nname = """a\nb"""\n': f'[cluster] name = "a\\nb": {NAME}',
    f'[cluster]\nname = "{"a" * 65}"\n': f'[cluster] name = "{"a" * 60}"...: {NAME}',
    # [network]
    '[network]\nport = "29k"\n': f'[network] port = "29k": {PORT}',
    "[network]\nport = true\n": f"[network] port = true: {PORT}",
    "[network]\nport = 0\n": f"[network] port = 0: {PORT}",
    "[network]\nport = 65536\n": f"[network] port = 65536: {PORT}",
    "[network]\nport = 29500.0\n": f"[network] port = 29500.0: {PORT}",
    "[network]\nport = [29500, [1], 3, 4]\n": f"[network] port = [29500, ..., 3, ...]: {PORT}",
    "[network.port]\nx = 1\n": f"[network] port = {{...}}: {PORT}",
    f"[network]\nport = 0x{'f' * 5000}\n": f"[network] port = 0x{'f' * 78}...: {PORT}",
    "[network]\ndata = 5\n": f"[network] data = 5: {SUBNET}",
    '[network]\ndata = "eth0"\n': f'[network] data = "eth0": {SUBNET}',
    '[network]\ndata = "192.168.20.0"\n': f'[network] data = "192.168.20.0": {SUBNET}',
    '[network]\ndata = "192.168.20.0/33"\n': f'[network] data = "192.168.20.0/33": {SUBNET}',
    '[network]\ndata = "0.0.0.0/0"\n': f'[network] data = "0.0.0.0/0": {SUBNET}',
    '[network]\ndata = "192.168.20.15/24"\n': '[network] data = "192.168.20.15/24": '
    'expected a network, did you mean "192.168.20.0/24"?',
    '[network]\ndata = "fd00::1/64"\n': '[network] data = "fd00::1/64": expected a network, did you mean "fd00::/64"?',
    "[network]\ninfiniband = 0\n": "[network] infiniband = 0: expected true or false",
    '[network]\ninfiniband = "no"\n': '[network] infiniband = "no": expected true or false',
    # [train], [guard]
    '[train]\nbackend = "mpi"\n': '[train] backend = "mpi": expected "auto", "nccl" or "gloo"',
    "[train]\nbackend = 1\n": '[train] backend = 1: expected "auto", "nccl" or "gloo"',
    '[train]\ntimeout_s = "600"\n': f'[train] timeout_s = "600": {SECONDS} 600',
    "[train]\ntimeout_s = true\n": f"[train] timeout_s = true: {SECONDS} 600",
    "[train]\ntimeout_s = nan\n": f"[train] timeout_s = nan: {SECONDS} 600",
    f"[train]\ntimeout_s = {'9' * 400}\n": f"[train] timeout_s = {'9' * 80}...: {SECONDS} 600",
    "[guard]\njoin_s = 0\n": f"[guard] join_s = 0: {SECONDS} 60",
    "[guard]\ngone_s = -0.5\n": f"[guard] gone_s = -0.5: {SECONDS} 10",
    "[guard]\nhang_s = inf\n": f"[guard] hang_s = inf: {SECONDS} 600",
    # [slurm]
    "[slurm]\npartition = 1\n": '[slurm] partition = 1: expected a partition, for example "main"',
    '[slurm]\npartition = "-p"\n': '[slurm] partition = "-p": expected a partition, for example "main"',
    "[slurm]\ntime = 90\n": f"[slurm] time = 90: {TIME}",
    "[slurm]\ntime = 02:00:00\n": f"[slurm] time = 02:00:00: {TIME}",
    '[slurm]\ntime = "2h"\n': f'[slurm] time = "2h": {TIME}',
    '[slurm]\ntime = "1-"\n': f'[slurm] time = "1-": {TIME}',
    '[slurm]\ntime = "1:2:3:4"\n': f'[slurm] time = "1:2:3:4": {TIME}',
    # [report]
    '[report]\nmetrics_dir = "metrics"\n': f'[report] metrics_dir = "metrics": {DIRECTORY}',
    '[report]\nmetrics_dir = "/a\\nb"\n': f'[report] metrics_dir = "/a\\nb": {DIRECTORY}',
    # [[node]]
    '[[node]]\naddress = "10.0.0.1"\n': f"[[node]] 1: no name: {HOST}",
    '[[node]]\nname = "n1"\n': f"[[node]] n1: no address: {ADDRESS}",
    '[[node]]\nname = "n1"\naddress = "10.0.0.1"\n': "[[node]] n1: no interface: "
    "expected one, or [network] data, which determines it",
    NODE + "[[node]]\nname = 5\n": f"[[node]] 2 name = 5: {HOST}",
    NODE + '[[node]]\nname = "a b"\n': f'[[node]] 2 name = "a b": {HOST}',
    NODE + '[[node]]\nname = "a\\u0007\\n"\n': f'[[node]] 2 name = "a\\x07\\n": {HOST}',
    NODE + '[[node]]\nname = "gr\xfcn"\n': f'[[node]] 2 name = "gr\\xfcn": {HOST}',
    NODE + f'[[node]]\nname = "{"a" * 254}"\n': f'[[node]] 2 name = "{"a" * 60}"...: {HOST}',
    NODE + '[[node]]\nname = "n[2-3]"\n': '[[node]] 2 name = "n[2-3]": '
    "expected one host name, not a host list: write a [[node]] for each",
    NODE + '[[node]]\nname = "n1"\naddress = "192.168.20.2"\n': '[[node]] 2 name = "n1": [[node]] 1 has the same name: '
    "expected each name once",
    NODE + '[[node]]\nname = "n2"\naddress = "192.168.20.1"\n': '[[node]] n2 address = "192.168.20.1": '
    "n1 has the same address: expected each address once",
    NODE + '[[node]]\nname = "n2"\naddress = 5\n': f"[[node]] n2 address = 5: {ADDRESS}",
    NODE + '[[node]]\nname = "n2"\naddress = "n2"\n': f'[[node]] n2 address = "n2": {ADDRESS}',
    NODE + '[[node]]\nname = "n2"\naddress = "192.168.20.300"\n': f'[[node]] n2 address = "192.168.20.300": {ADDRESS}',
    NODE + '[[node]]\nname = "n2"\naddress = "0.0.0.0"\n': f'[[node]] n2 address = "0.0.0.0": {ADDRESS}',
    NODE + '[[node]]\nname = "n2"\naddress = "fe80::1%\\u001b"\n': f'[[node]] n2 address = "fe80::1%\\x1b": {ADDRESS}',
    NODE + '[[node]]\nname = "n2"\naddress = "192.168.20.2/24"\n': '[[node]] n2 address = "192.168.20.2/24": '
    'expected only the address, did you mean "192.168.20.2"?',
    NODE + '[[node]]\nname = "n2"\naddress = "10.0.0.2"\n': '[[node]] n2 address = "10.0.0.2": '
    'expected an address in [network] data = "192.168.20.0/24"',
    NODE + '[[node]]\nname = "n2"\naddress = "fd00::2"\n': '[[node]] n2 address = "fd00::2": '
    'expected an IPv4 address in [network] data = "192.168.20.0/24"',
    '[[node]]\nname = "n1"\naddress = "10.0.0.1"\ninterface = "e0"\n'
    '[[node]]\nname = "n2"\naddress = "fd00::2"\ninterface = "e0"\n': '[[node]] n2 address = "fd00::2": '
    'expected IPv4 as for n1, "10.0.0.1"',
    NODE + "interface = 5\n": f"[[node]] n1 interface = 5: {INTERFACE}",
    NODE + 'interface = ""\n': f'[[node]] n1 interface = "": {INTERFACE}',
    NODE + 'interface = ".."\n': f'[[node]] n1 interface = "..": {INTERFACE}',
    NODE + 'interface = "e 0"\n': f'[[node]] n1 interface = "e 0": {INTERFACE}',
    NODE + 'interface = "e\\u0000"\n': f'[[node]] n1 interface = "e\\x00": {INTERFACE}',
    NODE + 'interface = "eth0:1"\n': f'[[node]] n1 interface = "eth0:1": {INTERFACE}',
    NODE + 'interface = "abcdefghijklmnop"\n': f'[[node]] n1 interface = "abcdefghijklmnop": {INTERFACE}',
    NODE + "gpus = -1\n": f"[[node]] n1 gpus = -1: {GPUS}",
    NODE + "gpus = true\n": f"[[node]] n1 gpus = true: {GPUS}",
    NODE + "gpus = 1.0\n": f"[[node]] n1 gpus = 1.0: {GPUS}",
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items(), ids=range(len(REFUSED)))
def test_wrong_text_is_refused_in_this_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_cluster(text, PATH)
    assert str(refused.value) == f"cluster.toml: {message}"


def test_every_key_is_read() -> None:
    cluster = parse_cluster(FULL, PATH).cluster
    assert cluster.cluster.name == "six-node"
    assert cluster.network == NetworkTable(data="192.168.20.0/24", port=29501, infiniband=False)
    assert cluster.train == TrainTable(backend=Backend.GLOO, timeout_s=300.0)
    assert cluster.guard == GuardTable(join_s=90.0, gone_s=2.5, hang_s=1200.0)
    assert cluster.slurm == SlurmTable(partition="main,long", time="02:00:00")
    assert cluster.node == (
        Node(name="master-node", address="192.168.20.15", interface="ens1f1", gpus=1),
        Node(name="node01", address="192.168.20.16"),
    )


def test_every_value_has_its_line() -> None:
    assert parse_cluster(FULL, PATH).origins == {
        "cluster.name": "cluster.toml:3",
        "network.data": "cluster.toml:6",
        "network.port": "cluster.toml:7",
        "network.infiniband": "cluster.toml:8",
        "train.backend": "cluster.toml:11",
        "train.timeout_s": "cluster.toml:12",
        "guard.join_s": "cluster.toml:15",
        "guard.gone_s": "cluster.toml:16",
        "guard.hang_s": "cluster.toml:17",
        "slurm.partition": "cluster.toml:20",
        "slurm.time": "cluster.toml:21",
        "node.master-node.name": "cluster.toml:24",
        "node.master-node.address": "cluster.toml:25",
        "node.master-node.interface": "cluster.toml:26",
        "node.master-node.gpus": "cluster.toml:27",
        "node.node01.name": "cluster.toml:30",
        "node.node01.address": "cluster.toml:31",
    }


def test_lines_survive_every_spelling_of_toml() -> None:
    text = (
        "# [network]\n\"network\" . 'port' = 1\r\n"  # 2
        'network.data = """\\\n  10.0.0.0/8\\\n  """\n'  # 3 to 5
        "cluster = { name = 'port = 7' }\n"  # 6
        "[ 'train' ] # [guard]\n"  # 7
        "timeout_s\t=\t1 # backend = 'gloo'\n\n"  # 8
        "[[ node ]]\nname = 'a'\n# [[node]]\naddress = '10.0.0.1'\n"  # 10 to 13
        '[["node"]]\naddress = \'10.0.0.2\'\nname = "\\u0062"'  # 14 to 16
    )
    assert parse_cluster(text, PATH).origins == {
        "network.port": "cluster.toml:2",
        "network.data": "cluster.toml:3",
        "cluster.name": "cluster.toml:6",
        "train.timeout_s": "cluster.toml:8",
        "node.a.name": "cluster.toml:11",
        "node.a.address": "cluster.toml:13",
        "node.b.address": "cluster.toml:15",
        "node.b.name": "cluster.toml:16",
    }


def test_value_whose_line_is_not_found_has_the_file() -> None:
    text = '[network]\nport = 1\n[cluster]\nname = """\\\n' + "\n" * 200 + 'x"""\n[train]\ntimeout_s = 5\n'
    assert parse_cluster(text, PATH).origins == {
        "network.port": "cluster.toml:2",
        "cluster.name": "cluster.toml",
        "train.timeout_s": "cluster.toml",
    }


def test_without_a_file_all_is_default() -> None:
    loaded = LoadedCluster()
    assert loaded.cluster == Cluster()
    assert [(s.name, s.value, s.source) for s in loaded.settings()] == [
        ("cluster.name", "not set", "default"),
        ("network.data", "not set", "default"),
        ("network.second", "not set", "default"),
        ("network.port", "29500", "default"),
        ("network.infiniband", "not set", "default"),
        ("train.backend", "auto", "default"),
        ("train.timeout_s", "600", "default"),
        ("guard.join_s", "60", "default"),
        ("guard.gone_s", "10", "default"),
        ("guard.beat_s", "0.5", "default"),
        ("guard.stopped_s", "5", "default"),
        ("guard.stalled_s", "5", "default"),
        ("guard.slow_s", "30", "default"),
        ("guard.hang_s", "600", "default"),
        ("slurm.partition", "not set", "default"),
        ("slurm.time", "not set", "default"),
        ("slurm.history", "not set", "default"),
        ("report.metrics_dir", "not set", "default"),
    ]


def test_settings_show_value_reason_and_origin() -> None:
    settings = {s.name: s for s in parse_cluster(FULL, PATH).settings()}
    port = settings["network.port"]
    assert (port.value, port.reason, port.source) == ("29501", "TCP port that the leader tries first", "cluster.toml:7")
    assert settings["network.infiniband"].value == "false"
    assert settings["guard.gone_s"].value == "2.5"
    assert settings["train.backend"].value == "gloo"
    assert settings["node.node01.gpus"].value == "not set"
    assert settings["node.node01.gpus"].source == "default"
    assert list(settings)[-4:] == [
        "node.node01.name",
        "node.node01.address",
        "node.node01.interface",
        "node.node01.gpus",
    ]


def test_every_field_of_the_model_is_a_key_with_its_default() -> None:
    cluster = Cluster()
    fields = [
        f"{table}.{key}"
        for table in Cluster.__struct_fields__[:-1]
        for key in getattr(cluster, table).__struct_fields__
    ]
    assert [s.name for s in LoadedCluster().settings()] == fields
    node = parse_cluster(NODE, PATH)
    assert [s.name for s in node.settings()][-4:] == [f"node.n1.{key}" for key in Node.__struct_fields__]


def test_empty_table_and_single_quotes_are_fine() -> None:
    assert parse_cluster("[network]\n", PATH).cluster == Cluster()
    assert parse_cluster("node = []\n", PATH).cluster == Cluster()
    assert parse_cluster("[report]\nmetrics_dir = '/a b'\n", PATH).cluster.report.metrics_dir == "/a b"
    for time in ("90", "90:30", "02:00:00", "1-00", "1-00:30", "1-00:30:00"):
        assert parse_cluster(f"[slurm]\ntime = '{time}'\n", PATH).cluster.slurm.time == time


def test_addresses_are_kept_in_one_spelling() -> None:
    text = "[network]\ndata = 'FD00:0::/64'\n[[node]]\nname = 'n1'\naddress = 'FD00:0::1'\n"
    cluster = parse_cluster(text, PATH).cluster
    assert cluster.network.data == "fd00::/64"
    assert cluster.node[0].address == "fd00::1"
    assert cluster.find_node("fd00:0:0::1") is cluster.node[0]
    assert cluster.find_node("n1") is cluster.node[0]
    assert cluster.find_node("n2") is None


def test_a_thousand_nodes_have_their_lines() -> None:
    nodes = "".join(f"[[node]]\nname = 'n{i}'\naddress = '10.0.{i // 256}.{i % 256}'\n" for i in range(1, 1025))
    loaded = parse_cluster("[network]\ndata = '10.0.0.0/8'\n" + nodes, PATH)
    assert loaded.origins["node.n1024.address"] == "cluster.toml:3074"


@pytest.mark.parametrize(
    ("explicit", "env", "found"),
    [
        ("flag.toml", {"ALLRANKS_CLUSTER": "env.toml"}, "flag.toml"),
        (Path("flag.toml"), {}, "flag.toml"),
        (None, {"ALLRANKS_CLUSTER": "env.toml"}, "env.toml"),
        (None, {"ALLRANKS_CLUSTER": ""}, None),
        (None, {}, None),
    ],
)
def test_flag_goes_before_variable(
    tmp_path: Path, explicit: str | Path | None, env: dict[str, str], found: str | None
) -> None:
    assert find_cluster_file(explicit, env, tmp_path) == (found and Path(found))


def test_file_of_the_working_directory_comes_last(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").touch()
    assert find_cluster_file(None, {}, tmp_path) == tmp_path / "cluster.toml"
    assert find_cluster_file(None, {"ALLRANKS_CLUSTER": "env.toml"}, tmp_path) == Path("env.toml")


def test_file_of_a_windows_editor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a b.toml"
    path.write_bytes(b"\xef\xbb\xbf[network]\r\nport = 5\r\n")
    assert read_cluster(path).origins == {"network.port": f"{path}:2"}


def _refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        read_cluster(path)
    return str(refused.value)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    end = "expected a file as written by `allranks init`"
    assert _refusal(tmp_path) == f"{tmp_path}: cannot be read: is a directory: {end}"
    missing = tmp_path / "no.toml"
    assert _refusal(missing) == f"{missing}: cannot be read: no such file or directory: {end}"
    assert _refusal(tmp_path / "a\nb") == f"{tmp_path}/a\\nb: cannot be read: no such file or directory: {end}"
    assert _refusal(tmp_path / "\0") == f"{tmp_path}/\\x00: cannot be read: embedded null byte: {end}"
    long = tmp_path / ("a" * 300)
    assert _refusal(long) == f"{long}: cannot be read: file name too long: {end}"


def test_forbidden_file_is_named(without_root: Path) -> None:
    path = without_root / "cluster.toml"
    path.touch(mode=0o000)
    end = "expected a file as written by `allranks init`"
    assert _refusal(path) == f"{path}: cannot be read: permission denied: {end}"


def test_file_that_is_no_text_is_refused_with_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(b"[cluster]\nname = 'gr\xfcn'\n")
    assert _refusal(path) == f"{path}: line 2: byte 0xfc: expected UTF-8 text"


VALUES = st.one_of(
    st.text(max_size=80).map(lambda text: "'" + text + "'"),
    st.sampled_from(
        ["1", "-1", "true", "nan", "1e400", "[]", "[[1]]", "{}", "{a.b=1}", "02:00:00", "1979-05-27", '"""a\nb"""']
    ),
    st.sampled_from(
        ['"n[1-2]"', '"10.0.0.1"', '"fd00::1"', '"10.0.0.1/8"', '"\\u0085\\u202e"', '"\\u001b[31m"', "0x" + "f" * 9999]
    ),
)
KEYS = st.sampled_from(
    ["name", "address", "data", "port", "gpus", "time", "backend", "interface", "join_s", "a.b", "'\t'", '"\\n"']
)
HEADERS = st.sampled_from(
    ["[network]", "[[node]]", "[node]", "[[slurm]]", "[train]", "[guard]", "[cluster]", '["\\u0007"]', "#"]
)
LINES = st.one_of(HEADERS, st.builds("{} = {}".format, KEYS, VALUES), st.text(max_size=20))


@given(st.one_of(st.text(), st.lists(LINES, max_size=8).map("\n".join)), st.sampled_from([PATH, Path("a\n\x1b.toml")]))
def test_any_text_gives_a_cluster_or_one_printable_line(text: str, path: Path) -> None:
    try:
        settings, message = parse_cluster(text, path).settings(), "none"
    except ConfigError as exc:
        settings, message = (), str(exc)
    assert message.isprintable()
    assert len(message) < 600
    assert all(f"{s.value}{s.source}".isprintable() for s in settings)
