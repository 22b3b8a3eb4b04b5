"""The table of a check: what is folded, what stands out, what ASCII terminals get."""

from __future__ import annotations

import pytest

from allranks.model.finding import Result, Status
from allranks.report.check_table import render_results
from allranks.report.text import Style
from allranks.report.toml_writer import Table, TomlKey, render_toml

UTF8 = Style(is_unicode=True, has_colour=False, width=100)
ASCII = Style(is_unicode=False, has_colour=False, width=100)
FAMILIES = {"0": "node", "1": "GPU", "2": "network"}
NODES = ("node01", "node02", "node03")


def cells(cause: str, status: Status, *nodes: str, note: str = "") -> list[Result]:
    return [Result(cause=cause, node=node, status=status, note=note) for node in nodes or NODES]


SEEN = [
    *cells("AR001 node-silent", Status.PASS),
    *cells("AR005 disk-full", Status.PASS, note="12 GiB free"),
    *cells("AR101 fabric-manager", Status.SKIP, note="no NVIDIA GPU"),
    *cells("AR103 gpu-missing", Status.SKIP, note="no NVIDIA GPU"),
    *cells("AR205 mtu-unequal", Status.PASS),
    *cells("AR210 link-down", Status.PASS, "node01", "node02"),
    *cells("AR210 link-down", Status.FAIL, "node03", note="the data interface ens1f1 is down: no carrier"),
]


def test_passes_are_counted_by_family_and_skips_by_reason() -> None:
    assert render_results(SEEN, UTF8, families=FAMILIES, num_nodes=3) == (
        "\u2713 node: 2 checks passed on 3 nodes\n"
        "\u2717 AR210 link-down   fail      node03\n"
        "\u2713 network: 1 check passed on 3 nodes\n"
        "\u2713 network: 1 check passed on node[01-02]\n"
        "- 2 checks skipped on 3 nodes: no NVIDIA GPU"
    )


def test_verbose_has_a_line_for_every_check() -> None:
    assert render_results(SEEN, UTF8, families=FAMILIES, num_nodes=3, is_verbose=True) == (
        "\u2713 AR001 node-silent      pass      3 nodes\n"
        "\u2713 AR005 disk-full        pass      3 nodes\n"
        "- AR101 fabric-manager   skip      3 nodes       no NVIDIA GPU\n"
        "- AR103 gpu-missing      skip      3 nodes       no NVIDIA GPU\n"
        "\u2713 AR205 mtu-unequal      pass      3 nodes\n"
        "\u2713 AR210 link-down        pass      node[01-02]\n"
        "\u2717 AR210 link-down        fail      node03"
    )


@pytest.mark.parametrize(
    ("status", "mark", "ascii_mark"),
    [
        (Status.PASS, "\u2713", "+"), (Status.WARN, "\u26a0", "!"), (Status.FAIL, "\u2717", "x"),
        (Status.SKIP, "-", "-"), (Status.UNKNOWN, "?", "?"), (Status.CRASH, "\u2620", "#"),
    ],
)  # fmt: skip
def test_every_status_has_a_mark_of_its_own_also_in_ascii(status: Status, mark: str, ascii_mark: str) -> None:
    shown = [
        render_results(cells("AR205 mtu-unequal", status), style, families=FAMILIES, num_nodes=3, is_verbose=True)
        for style in (UTF8, ASCII)
    ]
    assert [text.split()[0] for text in shown] == [mark, ascii_mark]
    assert shown[1].isascii()


def test_what_could_not_be_told_says_why_in_both_views() -> None:
    seen = cells("AR104 gpu-busy", Status.UNKNOWN, "node02", note="nvidia-smi: no answer within 3 s")
    line = "? AR104 gpu-busy   unknown   node02   nvidia-smi: no answer within 3 s"
    assert render_results(seen, UTF8, families=FAMILIES, num_nodes=3) == line
    assert render_results(seen, UTF8, families=FAMILIES, num_nodes=3, is_verbose=True) == line


def test_a_thousand_nodes_are_one_line() -> None:
    names = [f"n{i:04}" for i in range(1024)]
    seen = cells("AR005 disk-full", Status.PASS, *names[:-1]) + cells("AR005 disk-full", Status.WARN, names[-1])
    assert render_results(seen, ASCII, families=FAMILIES, num_nodes=1024) == (
        "! AR005 disk-full   warn      n1023\n+ node: 1 check passed on n[0000-1022]"
    )


def test_nothing_of_a_node_reaches_the_terminal_raw() -> None:
    seen = cells("AR005 disk-full", Status.UNKNOWN, "n\x1b[2J", note="a\nb\x07")
    text = render_results(seen, UTF8, families=FAMILIES, num_nodes=1)
    assert text.isprintable()


def test_no_results_are_no_table() -> None:
    assert render_results([], UTF8, families=FAMILIES, num_nodes=3) == ""


def test_toml_has_a_comment_on_each_value_and_on_what_has_none() -> None:
    tables = [
        Table(
            "[a]",
            (TomlKey("x", 'say "\u00e9"\n', "why\nso"), TomlKey("flag", True), TomlKey("gone", None, "unknown")),
            ("note",),
        ),
        Table("", notes=("the end",)),
    ]
    assert render_toml(tables, title="by me") == (
        "# by me\n\n"
        "[a]\n# note\n"
        'x = "say \\"\\u00e9\\"\\n"         # why so\n'
        "flag = true\n"
        "# gone: unknown\n\n"
        "# the end\n"
    )
