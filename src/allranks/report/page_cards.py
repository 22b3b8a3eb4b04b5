"""What does the roll call of a run show in its report: the nodes, how their values differ, and the links? Pure.

    parse_roll_call(data).links.rows[0][1].rtt_s        # from the first node to the second

The reports of the nodes are decoded as what anybody may have written; what does not fit is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from allranks.model.foreign import Unreadable, decode_fields
from allranks.model.hostlist import fold_hosts
from allranks.model.majority import NOT_SET, group_by_value
from allranks.model.pair import PairResult
from allranks.report.mask import mask_variable
from allranks.report.readback import Name, Text

MAX_TABLE = 32
"""Nodes up to which every link has a cell with its number; of more nodes each link is a dot."""
MAX_WORST = 12
MAX_ODD = 40
NUM_LEVELS = 8
FAILED, UNTRIED = 254, 255
"""Levels of a link that does not work, and of one that was not tried; others are 0 to NUM_LEVELS - 1."""
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class NodeCard(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as it reported itself."""

    name: str
    num_workers: int = 0
    num_gpus: int = 0
    gpu: str = ""
    num_cpus: int | None = None
    kernel: str = ""
    python: str = ""
    torch: str = ""
    interface: str = ""


class OddValue(msgspec.Struct, frozen=True, kw_only=True):
    """Something in which the nodes differ."""

    what: str
    usual: str
    """What the most of them have."""
    num_usual: int
    num_nodes: int
    is_majority: bool
    """More than half of the nodes have it."""
    odd: tuple[tuple[str, str], ...]
    """Other values, and the nodes that have them, folded."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What one node saw of another."""

    source: str
    target: str
    rtt_s: float | None = None
    large_s: float | None = None
    """For the large payload, there and back."""
    num_lost: int = 0
    num_sent: int = 0
    problem: str = ""
    """Why it does not work; empty: it does."""
    level: int = UNTRIED
    """How its round trip compares with the median: 0 half of it or less, 3 about as long, 7 from 8 times on."""


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """All pairs of nodes."""

    nodes: tuple[str, ...]
    median_rtt_s: float | None = None
    num_failed: int = 0
    num_tried: int = 0
    rows: tuple[tuple[Link | None, ...], ...] = ()
    """By source, then target; empty for more than MAX_TABLE nodes."""
    levels: bytes = b""
    """Of all pairs, row by row."""
    worst: tuple[Link, ...] = ()
    """Those that do not work, then the slowest."""


class RollCallSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What a roll call tells."""

    cards: tuple[NodeCard, ...] = ()
    odd_values: tuple[OddValue, ...] = ()
    links: Links | None = None


class _Gpu(msgspec.Struct, frozen=True):
    name: Name = ""


class _Interface(msgspec.Struct, frozen=True):
    name: Name = ""
    mtu: _Number | None = None
    speed_mbit_s: _Number | None = None


class _Code(msgspec.Struct, frozen=True):
    script: Name = ""
    digest: Name | None = None
    beside: dict[Name, Name | None] = {}


class _Facts(msgspec.Struct, frozen=True):
    kernel: Name | None = None
    allranks_version: Name | None = None
    python_version: Name | None = None
    glibc_version: Name | None = None
    packages: dict[Name, Name | None] = {}
    torch_cuda: Name | None = None
    nccl_version: Name | None = None
    net_plugin: Name | None = None
    driver_version: Name | None = None
    num_cpus: _Number | None = None
    limits: dict[Name, float | int | str | None] = {}
    environment: dict[Name, Text | None] = {}
    interfaces: tuple[_Interface, ...] = ()
    gpus: tuple[_Gpu, ...] | None = None
    code: _Code | None = None


class _Card(msgspec.Struct, frozen=True):
    host: Name = ""
    num_workers: _Number = 0
    num_gpus: _Number | None = 0
    data_interface: Name | None = None
    facts: msgspec.Raw = msgspec.Raw(b"null")


class _RollCall(msgspec.Struct, frozen=True):
    cards: dict[str, msgspec.Raw] = {}
    results: tuple[PairResult, ...] = ()
    quiet: tuple[PairResult, ...] = ()


def parse_roll_call(data: bytes) -> RollCallSeen:
    """Return what a roll call tells; nothing if this is none."""
    told = _decode(data, _RollCall)
    cards: dict[int, _Card] = {}
    for number, raw in told.cards.items() if told else ():
        card = _decode(raw, _Card)
        if card is not None and card.host and number.isascii() and number.isdigit() and len(number) < 7:
            cards[int(number)] = card
    facts = {index: _decode(card.facts, _Facts) or _Facts() for index, card in sorted(cards.items())}
    return RollCallSeen(
        cards=tuple(_show_card(cards[index], known) for index, known in facts.items()),
        odd_values=tuple(_find_odd({cards[index].host: _values_of(cards[index], facts[index]) for index in facts})),
        links=_make_links({index: cards[index].host for index in facts}, told) if told and len(facts) > 1 else None,
    )


def _decode(data: bytes | msgspec.Raw, kind: type[Any]) -> Any:
    try:
        return decode_fields(data, kind)
    except Unreadable:
        return None


def _show_card(card: _Card, facts: _Facts) -> NodeCard:
    gpus = facts.gpus or ()
    return NodeCard(
        name=card.host,
        num_workers=card.num_workers,
        num_gpus=card.num_gpus or len(gpus),
        gpu=gpus[0].name if gpus else "",
        num_cpus=facts.num_cpus,
        kernel=facts.kernel or "",
        python=facts.python_version or "",
        torch=facts.packages.get("torch") or "",
        interface=card.data_interface or "",
    )


def _values_of(card: _Card, facts: _Facts) -> dict[str, str]:
    """Return what should be alike on all nodes, by its name."""
    code = facts.code or _Code()
    interface = next((one for one in facts.interfaces if one.name == card.data_interface), _Interface())
    plain: dict[str, object] = {
        "allranks": facts.allranks_version, "Python": facts.python_version, "glibc": facts.glibc_version,
        "kernel": facts.kernel, "CUDA of torch": facts.torch_cuda, "NCCL": facts.nccl_version,
        "NCCL network plugin": facts.net_plugin, "driver": facts.driver_version, "CPUs": facts.num_cpus,
        "ranks": card.num_workers, "GPUs": card.num_gpus, "data interface": card.data_interface,
        "MTU": interface.mtu, "link speed, Mbit/s": interface.speed_mbit_s,
        "GPU": ", ".join(sorted({gpu.name for gpu in facts.gpus or ()})) or None,
        f"code of {code.script.rpartition('/')[2]}": code.digest,
    }  # fmt: skip
    plain |= {f"package {name}": value for name, value in facts.packages.items()}
    plain |= {f"limit {name}": value for name, value in facts.limits.items()}
    plain |= {f"code of {name}": value for name, value in code.beside.items()}
    plain |= {name: mask_variable(name, value) for name, value in facts.environment.items() if value is not None}
    return {name: str(value) for name, value in plain.items() if value is not None}


def _find_odd(by_node: Mapping[str, Mapping[str, str]]) -> Iterable[OddValue]:
    names = list(dict.fromkeys(name for values in by_node.values() for name in values))
    found = 0
    for name in names:
        values = {node: known.get(name, NOT_SET) for node, known in by_node.items()}
        if len(set(values.values())) < 2:
            continue
        (usual, nodes), *odd = group_by_value(values)
        yield OddValue(
            what=name,
            usual=usual,
            num_usual=len(nodes),
            num_nodes=len(values),
            is_majority=2 * len(nodes) > len(values),
            odd=tuple((value, fold_hosts(who)) for value, who in odd[:8]),
        )
        found += 1
        if found == MAX_ODD:
            return


def _make_links(names: Mapping[int, str], told: _RollCall) -> Links:
    place = {index: number for number, index in enumerate(names)}
    newest = {(result.source, result.target): result for result in (*told.results, *told.quiet)}
    tried = {pair: result for pair, result in newest.items() if pair[0] in place and pair[1] in place}
    rtts = [result.rtt_s for result in tried.values() if result.rtt_s]
    median_s = statistics.median(rtts) if rtts else None
    links = {
        (place[source], place[target]): _show_link(names[source], names[target], result, median_s)
        for (source, target), result in tried.items()
    }
    count, levels = len(names), bytearray([UNTRIED] * len(names) ** 2)
    for (source, target), link in links.items():
        levels[source * count + target] = link.level
    slowest = sorted(
        links.values(), key=lambda link: (not link.problem, -(link.rtt_s or 0.0), link.source, link.target)
    )
    num_failed = sum(bool(link.problem) for link in links.values())
    return Links(
        nodes=tuple(names.values()),
        median_rtt_s=median_s,
        num_failed=num_failed,
        num_tried=len(links),
        rows=tuple(tuple(links.get((row, column)) for column in range(count)) for row in range(count))
        if count <= MAX_TABLE
        else (),
        levels=bytes(levels),
        worst=tuple(slowest[:MAX_WORST]),
    )


def _show_link(source: str, target: str, result: PairResult, median_s: float | None) -> Link:
    problem = result.problem or ""
    if not problem and not result.num_open:
        problem = next(iter(result.closed.values()), "no port answers")
    elif not problem and result.large_sent and result.large_s is None:
        problem = "large packets are lost"
    return Link(
        source=source,
        target=target,
        rtt_s=result.rtt_s,
        large_s=result.large_s,
        num_lost=result.datagrams_lost,
        num_sent=result.datagrams_sent,
        problem=problem,
        level=FAILED if problem else _level_of(result.rtt_s, median_s),
    )


def _level_of(rtt_s: float | None, median_s: float | None) -> int:
    """Return how a round trip compares with the median, in steps of the square root of 2 from half of it on.

    >>> _level_of(1e-5, 2e-5), _level_of(2e-5, 2e-5), _level_of(1, 2e-5), _level_of(None, 2e-5)
    (0, 2, 7, 2)
    """
    if not rtt_s or not median_s:
        return 2
    steps = [0.59, 0.84, 1.2, 1.7, 2.4, 3.4, 5.7]
    return sum(rtt_s / median_s > step for step in steps)
