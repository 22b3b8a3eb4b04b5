from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.model.errors import HostlistError
from allranks.model.hostlist import expand_hosts, fold_hosts, is_host_name

if TYPE_CHECKING:
    from pathlib import Path

EXPANDED = {
    "n1": ["n1"],
    "master-node": ["master-node"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[1-3,7,9-10]": ["n1", "n2", "n3", "n7", "n9", "n10"],
    "n[08-11]": ["n08", "n09", "n10", "n11"],
    "n[7]": ["n7"],
    "n[007]": ["n007"],
    "n[99-101]": ["n99", "n100", "n101"],
    "n[099-101]": ["n099", "n100", "n101"],
    "n[98-100,02]": ["n98", "n99", "n100", "n02"],
    "n[2,1]": ["n2", "n1"],
    "n0[1-2]": ["n01", "n02"],
    "[1-2]": ["1", "2"],
    "10.0.0.[9-10]": ["10.0.0.9", "10.0.0.10"],
    "a.b_c-[1-2]": ["a.b_c-1", "a.b_c-2"],
    "rack[1-2]node[3-4]": ["rack1node3", "rack1node4", "rack2node3", "rack2node4"],
    "n[1-2][08-09]": ["n108", "n109", "n208", "n209"],
    # Three brackets: scontrol's own order, the last fastest, then the first.
    "a[1-2]b[1-2]c[1-2]": ["a1b1c1", "a1b1c2", "a2b1c1", "a2b1c2", "a1b2c1", "a1b2c2", "a2b2c1", "a2b2c2"],
    "a[1-2]b[3-4]c[5-6]": ["a1b3c5", "a1b3c6", "a2b3c5", "a2b3c6", "a1b4c5", "a1b4c6", "a2b4c5", "a2b4c6"],
    "n[1-3]-int": ["n1-int", "n2-int", "n3-int"],
    "r[1-2]n[3-4].ib": ["r1n3.ib", "r1n4.ib", "r2n3.ib", "r2n4.ib"],
    "b,a,b": ["b", "a", "b"],
    "n[1,1],n1": ["n1", "n1", "n1"],
    "n[1-2],m,n[1-2]": ["n1", "n2", "m", "n1", "n2"],
    "  a ,\tb,\n c\r\n": ["a", "b", "c"],
}

REFUSED = {
    "": "host list '': nothing at character 1: expected a host name",
    " \n": "host list ' \\n': nothing at character 1: expected a host name",
    "a,,b": "host list 'a,,b': an empty element at character 3: expected a host name",
    "a, ": "host list 'a, ': an empty element at character 3: expected a host name",
    ",a": "host list ',a': an empty element at character 1: expected a host name",
    "n[1": "host list 'n[1': '[' without ']' at character 2: expected brackets in pairs",
    "n1]": "host list 'n1]': ']' without '[' at character 3: expected brackets in pairs",
    "n[[1]]": "host list 'n[[1]]': a bracket inside a bracket at character 3: expected '[' only outside of brackets",
    "n[]": "host list 'n[]': '' in a bracket at character 3: expected a number or a range such as 01-16",
    "n[1,]": "host list 'n[1,]': '' in a bracket at character 5: expected a number or a range such as 01-16",
    "n[1-]": "host list 'n[1-]': '1-' in a bracket at character 3: expected a number or a range such as 01-16",
    "n[-1]": "host list 'n[-1]': '-1' in a bracket at character 3: expected a number or a range such as 01-16",
    "n[1-2-3]": "host list 'n[1-2-3]': '1-2-3' in a bracket at character 3: expected a number or a range such as 01-16",
    "n[1-a]": "host list 'n[1-a]': '1-a' in a bracket at character 3: expected a number or a range such as 01-16",
    "n[1, 2]": "host list 'n[1, 2]': ' 2' in a bracket at character 5: expected a number or a range such as 01-16",
    "n[\u0663]": "host list 'n[\\u0663]': '\\u0663' in a bracket at character 3: "
    "expected a number or a range such as 01-16",
    "m,n[3-1]": "host list 'm,n[3-1]': descending range 3-1 at character 5: expected the smaller number first",
    "n[1-010]": "host list 'n[1-010]': range 1-010 with differently padded ends at character 3: "
    "expected both padded alike, such as 08-16",
    "n[01-9]": "host list 'n[01-9]': range 01-9 with differently padded ends at character 3: "
    "expected both padded alike, such as 08-16",
    "n[0-00]": "host list 'n[0-00]': range 0-00 with differently padded ends at character 3: "
    "expected both padded alike, such as 08-16",
    "a b": "host list 'a b': a blank within a name at character 2: expected letters, digits, '_', '.' and '-'",
    "a\nb": "host list 'a\\nb': a blank within a name at character 2: expected letters, digits, '_', '.' and '-'",
    "a\x1b[1]": "host list 'a\\x1b[1]': '\\x1b' in a name at character 2: expected letters, digits, '_', '.' and '-'",
    "a\x00": "host list 'a\\x00': '\\x00' in a name at character 2: expected letters, digits, '_', '.' and '-'",
    "n[1]\x0b": "host list 'n[1]\\x0b': '\\x0b' in a name at character 5: expected letters, digits, '_', '.' and '-'",
    "gr\xfcn": "host list 'gr\\xfcn': '\\xfc' in a name at character 3: expected letters, digits, '_', '.' and '-'",
    "a;b": "host list 'a;b': ';' in a name at character 2: expected letters, digits, '_', '.' and '-'",
    "a,-oProxy": "host list 'a,-oProxy': a name that begins with '-' at character 3: "
    "expected a letter, digit or '_' first",
    "..": "host list '..': a name that begins with '.' at character 1: expected a letter, digit or '_' first",
    "n[1-262145]": "host list 'n[1-262145]': 262145 names: expected at most 262144",
    "n[1-999999]x[1-999999]": "host list 'n[1-999999]x[1-999999]': 999998000001 names: expected at most 262144",
    "n[1-9999999999999999999]": "host list 'n[1-9999999999999999999]': a number of 19 digits at character 3: "
    "expected at most 18",
    "x" * 254: f"host list '{'x' * 30}'...: a name of 254 characters at character 1: expected at most 253",
    "x" * 250 + "[8-1000]": f"host list '{'x' * 30}'...: a name of 254 characters at character 1: expected at most 253",
    "z," * 40 + "n[2-1]" + ",z" * 40: "host list ...'" + "z," * 14 + "n[2-1]" + ",z" * 13 + "'...: "
    "descending range 2-1 at character 83: expected the smaller number first",
}

FOLDED = {
    (): "",
    ("master-node",): "master-node",
    ("node01",): "node01",
    ("master-node", "node01", "node02", "node04"): "master-node,node[01-02,04]",
    ("n99", "n100", "n101"): "n[99-101]",
    ("n099", "n100"): "n[099-100]",
    ("n01", "n02", "n100"): "n[01-02,100]",
    ("n1", "n01", "n2"): "n[1,01,2]",
    ("n2", "n1"): "n[2,1]",
    ("n1", "n1", "n2"): "n[1,1-2]",
    ("a", "a"): "a,a",
    ("n1-int", "n2-int", "n3-int"): "n[1-3]-int",
    ("r1n1", "r1n2", "r2n1", "r2n2"): "r1n[1-2],r2n[1-2]",
    ("r1n1", "r2n1", "r2n2"): "r[1-2]n1,r2n2",
    ("10.0.0.9", "10.0.0.10"): "10.0.0.[9-10]",
    ("1", "2"): "[1-2]",
    ("n" + "9" * 19, "n1" + "0" * 19): "n9999999999999999999,n10000000000000000000",
    ("n" + "9" * 19, "n" + "9" * 19): "n9999999999999999999,n9999999999999999999",
}

# Few letters and few numbers, so that neighbours often share a prefix.
WORDS = st.sampled_from(["n", "node", "a-b", "r_", "x."])
NUMBERS = st.one_of(st.integers(0, 12).map(str), st.sampled_from(["00", "01", "02", "007", "09", "010", "99", "100"]))
NAMES = st.one_of(
    st.builds("".join, st.lists(st.one_of(WORDS, NUMBERS), min_size=1, max_size=4)),
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,40}", fullmatch=True),
)


@st.composite
def brackets(draw: st.DrawFn) -> str:
    """A bracket that SLURM 22.05 and we read alike: ascending ranges, padded alike or outgrowing the padding."""
    items = []
    for _ in range(draw(st.integers(1, 3))):
        low, width = draw(st.integers(0, 120)), draw(st.integers(1, 4))
        high = low + draw(st.integers(0, 9))
        items.append(draw(st.sampled_from([f"{low:0{width}d}", f"{low:0{width}d}-{high:0{width}d}"])))
    return f"[{','.join(items)}]"


EXPRESSIONS = st.one_of(
    st.builds("".join, st.lists(st.tuples(WORDS, NUMBERS).map("".join), min_size=1, max_size=2)),
    st.builds("".join, st.lists(st.tuples(WORDS | NUMBERS, brackets()).map("".join), min_size=1, max_size=3)),
)


@pytest.mark.parametrize(("text", "names"), EXPANDED.items())
def test_host_list_gives_these_names_in_this_order(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_doubtful_host_list_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(HostlistError) as refused:
        expand_hosts(text)
    assert str(refused.value) == message


@pytest.mark.parametrize(("names", "text"), FOLDED.items())
def test_names_fold_to_this_text(names: tuple[str, ...], text: str) -> None:
    assert fold_hosts(names) == text


@given(st.lists(NAMES, min_size=1, max_size=30))
def test_folded_names_expand_to_themselves(names: list[str]) -> None:
    assert expand_hosts(fold_hosts(names)) == names


@given(st.lists(st.sampled_from("n[]-,019 \n\x00"), max_size=20).map("".join))
def test_any_text_gives_host_names_or_one_line(text: str) -> None:
    try:
        names, message = expand_hosts(text), ""
    except HostlistError as exc:
        names, message = [], str(exc)
    assert all(is_host_name(name) for name in names)
    assert bool(names) != bool(message)
    assert message.isprintable()


def test_ten_thousand_nodes_expand_and_fold() -> None:
    names = expand_hosts("n[00001-10000]")
    assert len(names) == 10_000
    assert names[9_998:] == ["n09999", "n10000"]
    assert fold_hosts(names) == "n[00001-10000]"
    assert len(expand_hosts(",".join(names))) == 10_000


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Host lists need no controller, yet scontrol does nothing without a configuration."""
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    return path


@pytest.mark.program("scontrol", "slurm-client")
@given(st.lists(EXPRESSIONS, min_size=1, max_size=20))
def test_order_is_that_of_scontrol(slurm_conf: Path, expressions: list[str]) -> None:
    text = ",".join(expressions)
    scontrol = shutil.which("scontrol")
    assert scontrol is not None
    shown = subprocess.run(
        [scontrol, "show", "hostnames", text],
        env={"SLURM_CONF": str(slurm_conf)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert expand_hosts(text) == shown.stdout.split()
