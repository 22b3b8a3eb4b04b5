"""Every event of events.jsonl: when it is written, and its fields. Its page and its JSON schema are made of this table.

    make_schema()["$defs"]["checkpoint"]
    make_rows(of_roll_call=False)          # lines of the page's table

A test compares the table with all calls that write an event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from allranks.model.traffic import Traffic

_TYPES: Mapping[str, Mapping[str, Any]] = {
    "int": {"type": "integer"},
    "number": {"type": "number"},
    "text": {"type": "string"},
    "bool": {"type": "boolean"},
    "ints": {"type": "array", "items": {"type": "integer"}},
    "texts": {"type": "array", "items": {"type": "string"}},
    "object": {"type": "object"},
}


@dataclass(frozen=True, slots=True)
class EventField:
    """One field of an event."""

    name: str
    kind: str
    """A key of _TYPES; with `?` it may be null."""
    about: str = ""
    """What it is, with its unit, where the name does not say so."""
    is_always_there: bool = True


@dataclass(frozen=True, slots=True)
class EventKind:
    """One event."""

    when: str
    fields: tuple[EventField, ...]
    is_of_roll_call: bool = False


F = EventField
_NODE, _REASON, _LEADER, _GENERATION = (
    F("node", "text"),
    F("reason", "text"),
    F("leader", "text"),
    F("generation", "int"),
)
_RANK = F("rank", "int")
_AGE = F("age_s", "number", "of its agent")
_PID = F("pid", "int", "of its agent")
_OF_END = (
    _RANK,
    _NODE,
    F("exit_code", "int", "negative: killed by this signal"),
    F("told", "bool", "whether allranks had sent it a signal"),
)

EVENTS: Mapping[str, EventKind] = {
    "leading": EventKind("the leader waits for the other nodes", (_NODE, _PID, _AGE), is_of_roll_call=True),
    "joined": EventKind(
        "a node has joined", (_NODE, _PID, F("peer", "text", "its address"), _AGE), is_of_roll_call=True
    ),
    "left": EventKind("a node's connection ended during the roll call", (_NODE, _REASON), is_of_roll_call=True),
    "refused": EventKind(
        "a node was rejected, for example a second one with the same index", (_NODE, _REASON), is_of_roll_call=True
    ),
    "stranger": EventKind(
        "a process that does not belong to this job was rejected; once for each address and kind of reason",
        (F("peer", "text"), _REASON),
        is_of_roll_call=True,
    ),
    "second_look": EventKind(
        "failed tests between nodes are repeated", (F("pairs", "int", "how many"), _REASON), is_of_roll_call=True
    ),
    "interface_left_out": EventKind(
        "nodes have a further data interface that Gloo does not use", (_REASON,), is_of_roll_call=True
    ),
    "late_report": EventKind(
        "a node sent its test results after the deadline", (_NODE, F("round", "int")), is_of_roll_call=True
    ),
    "events_lost": EventKind(
        "events of the roll call were left out, since the file server had not taken 10,000 earlier ones",
        (F("number", "int"),),
        is_of_roll_call=True,
    ),
    "started": EventKind(
        "the first workers start",
        (
            F("generation", "int", is_always_there=False),
            F("job", "text", is_always_there=False),
            F("command", "texts"),
            F("members", "texts", "names of the nodes"),
            F("pid", "int", "of the leader's agent"),
            F("start_ticks", "int?", "when that process began, in the kernel's ticks"),
            F("boot_id", "text", "of its machine"),
            F("max_restarts", "int", is_always_there=False),
            F("cwd", "text", is_always_there=False),
        ),
    ),
    "worker_ended": EventKind("a worker ended", _OF_END),
    "worker_lingers": EventKind(
        "an exception ended a worker some seconds ago, and its process has not exited", _OF_END
    ),
    "lines_lost": EventKind(
        "a worker ended, and lines of its output could not be written",
        (_RANK, _NODE, F("lines", "int"), F("why", "text")),
    ),
    "worker_ended_late": EventKind("the end of a worker of an earlier generation is reported", (_NODE, _GENERATION)),
    "checkpoint": EventKind(
        "a session's checkpoint is complete; or a script without a session has saved for 50 ms and more (torch.save, "
        "torch.distributed.checkpoint), at most every 10 s",
        (
            F("is_verified", "bool", "false: of such a script; nobody knows what was saved", is_always_there=False),
            F("step", "int", "of a session", is_always_there=False),
            F(
                "write_s",
                "number",
                "of a session: seconds from the copy of the state to the complete checkpoint",
                is_always_there=False,
            ),
            F(
                "optimizer_steps",
                "int",
                "of rank 0 before it saved, about, in this generation",
                is_always_there=False,
            ),
            F("save_s", "number", "seconds in which rank 0 saved", is_always_there=False),
            F("generation", "int", is_always_there=False),
        ),
    ),
    "healed": EventKind(
        'a replica got the bits of the others (`on_corruption="heal"`); rank 0 writes this line',
        (
            F("step", "int"),
            F("ranks", "ints", "that had other bits"),
            F("tensors", "texts", "in which they had them"),
        ),
    ),
    "straggler": EventKind(
        "a rank calls collectives later than all others most of the time", (_RANK, _NODE, F("message", "text"))
    ),
    "hang": EventKind(
        "ranks have waited for `slow_s` (30 s) in a collective; once for the same ranks",
        (
            F("op", "text", "the collective"),
            F("for_s", "number", "seconds that the first one has waited"),
            F("num_waiting", "int"),
            F("ranks", "ints", "at most 64 that have not come; empty: not known"),
            F("place", "text", "where the first of these is", is_always_there=False),
            F("ends_in_s", "number", "seconds until the job is ended for it", is_always_there=False),
        ),
    ),
    "verdict": EventKind(
        "a fault was found; one line for each finding, as in [`verdict.json`](run-directory.md#verdictjson)",
        (
            _GENERATION,
            F("cause", "text"),
            F("cause_id", "text"),
            F("node", "text?"),
            F("ranks", "ints"),
            F("confidence", "text"),
            F("message", "text"),
        ),
    ),
    "node_lost": EventKind("a node no longer takes part", (_NODE, _REASON)),
    "took_over": EventKind(
        "another node leads the job", (_LEADER, _GENERATION, F("after", "text", "the leader that was lost"))
    ),
    "restarting": EventKind(
        "a new generation of workers starts",
        (
            _GENERATION,
            _LEADER,
            F("members", "texts"),
            F("checkpoint", "int?", "its step"),
            F("lost_s", "number", "seconds since that checkpoint or the start"),
            F("is_tracked", "bool", "whether the script reports its steps"),
        ),
    ),
    "minority": EventKind(
        "the leader goes on without a majority of the nodes, so no other node may lead after it", (_GENERATION, _LEADER)
    ),
    "agent_ended": EventKind(
        "an agent was killed; the process beside it writes this",
        (
            _NODE,
            F("pid", "int"),
            F("signal", "int?", "null: not known"),
            F("oom_kills", "int?", "on its node since it began"),
            F("is_oom", "bool", "whether it was one of them"),
        ),
    ),
    "paused": EventKind(
        "too few nodes are left, and the job waits for more; or it waits for room on a disk that has ended a rank",
        (
            _GENERATION,
            _LEADER,
            F("nodes", "int", "how many are here"),
            F("at_least", "int"),
            F("missing", "text", "what it waits for"),
        ),
    ),
    "network": EventKind(
        "12 s after the start of a generation, as soon as it is known how long ranks wait, then every 5 minutes; what "
        "the fields mean is [below](#network)",
        tuple(EventField(name, "", is_always_there=False) for name in Traffic.__struct_fields__),
    ),
    "save_asked": EventKind(
        "all ranks are asked for a checkpoint",
        (F("why", "text"), F("step", "int?", "the furthest step that a rank has reported")),
    ),
    "interrupted": EventKind("an agent got a signal", (F("signum", "int"), _NODE)),
    "stacks": EventKind(
        "`allranks horovod` has looked where its workers are",
        (F("stacks", "object", "by node, the functions of each worker's main thread"), F("problem", "text")),
    ),
    "ended": EventKind(
        "the job ended; always the last line",
        (
            F("exit_code", "int"),
            F("leader", "text", is_always_there=False),
            F("is_cut_off", "bool", "whether this leader had lost the other nodes", is_always_there=False),
        ),
    ),
}
"""In the order of the page."""


def make_rows(*, of_roll_call: bool) -> Iterator[str]:
    """Return the lines of the page's table of these events."""
    yield "| event | when | fields |"
    yield "|---|---|---|"
    for name, event in EVENTS.items():
        if event.is_of_roll_call == of_roll_call:
            fields = [f"`{field.name}`" + (f" ({field.about})" if field.about else "") for field in event.fields]
            yield f"| `{name}` | {event.when} | {', '.join(fields)} |"


def make_schema() -> dict[str, Any]:
    """Return the JSON schema of one line of events.jsonl; newer versions may add events and fields."""
    _, parts = msgspec.json.schema_components([Traffic], ref_template="#/$defs/{name}")
    kinds = {name: _schema_of(name, event, parts["Traffic"]["properties"]) for name, event in EVENTS.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "One line of events.jsonl",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in kinds],
        "$defs": kinds | {name: part for name, part in parts.items() if name != "Traffic"},
    }


def _schema_of(name: str, event: EventKind, of_traffic: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name: _type_of(field, of_traffic) for field in event.fields}
    always = [field.name for field in event.fields if field.is_always_there]
    every = {"time_s": {"type": "number", "description": "seconds since 1970"}, "event": {"const": name}}
    return {
        "description": event.when.replace("`", "").partition("; what the fields")[0].partition(", as in [")[0],
        "type": "object",
        "properties": every | fields,
        "required": ["time_s", "event", *always],
    }


def _type_of(field: EventField, of_traffic: Mapping[str, Any]) -> dict[str, Any]:
    if not field.kind:
        return dict(of_traffic[field.name])
    known = dict(_TYPES[field.kind.removesuffix("?")])
    if field.kind.endswith("?"):
        known["type"] = [known["type"], "null"]
    return known | ({"description": field.about} if field.about else {})
