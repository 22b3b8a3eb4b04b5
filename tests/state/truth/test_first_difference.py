"""Two replays of a step: which operation is named, and of which rank."""

from __future__ import annotations

import pytest

from allranks.state.truth.first_difference import DifferenceKind, FirstDifference, align, find_first
from allranks.state.truth.op_file import BATCH, Op, OpValue, RerunPlan

LINE, ALL_REDUCE = "train.py:7 in step", "c10d.allreduce_.default"


def op(name: str, read: str = "", made: str = "", *, form: str = "float32[4]", generator: str = "", **told: str) -> Op:
    """An operation whose values are the letters of these words."""
    inputs, outputs = (tuple(OpValue(form, ord(letter)) for letter in own) for own in (read, made))
    return Op(name, LINE, "model.inner", inputs, outputs, told.get("settings", ""), generator, 7)


STEP = [op(BATCH, "x"), op("mm", "xw", "y"), op("relu", "y", "z"), op(ALL_REDUCE, "z", "s"), op("add_", "ws", "v")]


def change(place: int, changed: Op | None, *more: Op) -> list[Op]:
    """The step with another operation there, or none, and more before it."""
    return [*STEP[:place], *more, *([changed] if changed else []), *STEP[place + 1 :]]


def found(a: list[Op], b: list[Op]) -> FirstDifference:
    difference = find_first([(0, a, b)])
    assert difference is not None
    return difference


def test_equal_steps_have_no_difference() -> None:
    assert find_first([(0, STEP, STEP), (1, STEP, STEP)]) is None


@pytest.mark.parametrize(
    ("other", "kind", "name"),
    [
        (change(0, op(BATCH, "q")), DifferenceKind.INPUT, BATCH),
        (change(1, op("mm", "xw", "q")), DifferenceKind.OUTPUT, "mm"),
        (change(1, op("mm", "xu", "q")), DifferenceKind.INPUT, "mm"),
        (change(1, op("mm", "xw", "q", form="bfloat16[4]")), DifferenceKind.FORM, "mm"),
        (change(1, op("mm", "xw", "q", form="float32[8]")), DifferenceKind.FORM, "mm"),
        (change(4, op("add_", "ws", "q", settings="alpha=-0.2")), DifferenceKind.SETTING, "add_"),
        (change(3, op(ALL_REDUCE, "z", "q")), DifferenceKind.OUTPUT, ALL_REDUCE),
    ],
)
def test_what_differs_first_is_named(other: list[Op], kind: DifferenceKind, name: str) -> None:
    difference = found(STEP, other)
    assert difference.a is not None
    assert (difference.kind, difference.a.name) == (kind, name)


def test_an_operation_that_one_run_alone_does_is_named_where_its_result_is_used() -> None:
    extra = change(2, op("relu", "q", "r"), op("mul", "y", "q"))
    difference = found(STEP, extra)
    assert (difference.kind, difference.a, difference.b) == (DifferenceKind.OP, None, op("mul", "y", "q"))
    assert found(extra, STEP).b is None


def test_an_operation_without_effect_is_not_named_for_what_comes_after_it() -> None:
    harmless, later = op("sum", "y", "p"), change(4, op("add_", "ws", "q"))
    difference = found(STEP, [*later[:2], harmless, *later[2:]])
    assert (difference.kind, difference.a and difference.a.name) == (DifferenceKind.OUTPUT, "add_")
    assert found(STEP, change(2, STEP[2], harmless)).b == harmless
    both = find_first([(0, STEP, change(2, STEP[2], harmless)), (1, STEP, later)])
    assert both is not None
    assert both.ranks == (1,)
    data = found(STEP, change(1, op("mm", "xu", "q"), op("sum", "x", "p")))
    assert (data.kind, data.b and data.b.name) == (DifferenceKind.INPUT, "mm")


def test_an_extra_draw_is_named_and_not_the_dropout_after_it() -> None:
    a = change(2, op("dropout", "y", "z", generator="1"))
    b = change(2, op("dropout", "y", "q", generator="2"), op("rand", "", "r", generator="1"))
    assert found(a, b).b == op("rand", "", "r", generator="1")
    elsewhere = found(a, change(2, op("dropout", "y", "q", generator="2")))
    assert (elsewhere.kind, elsewhere.b and elsewhere.b.name) == (DifferenceKind.GENERATOR, "dropout")


def test_the_rank_that_brought_the_difference_to_a_collective_is_named() -> None:
    struck = [*STEP[:2], op("relu", "y", "q"), op(ALL_REDUCE, "q", "t"), op("add_", "wt", "u")]
    victim = [*STEP[:3], op(ALL_REDUCE, "z", "t"), op("add_", "wt", "u")]
    difference = find_first([(0, STEP, victim), (1, STEP, victim), (2, STEP, struck)])
    assert difference is not None
    assert (difference.ranks, difference.kind, difference.a) == ((2,), DifferenceKind.OUTPUT, STEP[2])
    alike = find_first([(0, STEP, change(0, op(BATCH, "q"))), (1, STEP, change(0, op(BATCH, "p")))])
    assert alike is not None
    assert alike.ranks == (0, 1)
    assert alike.describe(2)[0] == "first difference in step 7: the data differ: the batch of all ranks"


def test_a_difference_reads_as_one_line_and_both_values() -> None:
    assert found(STEP, change(1, op("mm", "xw", "q"))).describe(1) == [
        "first difference in step 7: mm (rank 0, train.py:7 in step, in model.inner): another "
        "output, although its inputs are equal",
        f"  A: float32[4] {ord('y'):016x}",
        f"  B: float32[4] {ord('q'):016x}",
    ]


def test_operations_are_aligned_after_some_of_one_run_alone() -> None:
    a, b = [op(name) for name in "abcdefgh"], [op(name) for name in "abXYcdefgh"]
    pairs = [(one and one.name, two and two.name) for one, two in align(a, b)]
    assert pairs[1:5] == [("b", "b"), (None, "X"), (None, "Y"), ("c", "c")]
    assert [one for one, _ in align(b, [op("q")])] == b


BLOCK = ["norm", "mm", "mm", "mm", "sdpa", "mm", "add", "norm", "mm", "gelu", "mm", "add"]


def layers(copied: set[int], wrong: int | None = None) -> list[Op]:
    """A model of 24 equal layers; some begin with a copy, and from one on all results are others."""
    ops, number = list[Op](), 0
    for layer in range(24):
        value = OpValue("float32[4]", number)
        ops += [Op("clone", f"layer {layer}", "", (value,), (value,))] * (layer in copied)
        for place, name in enumerate(BLOCK):
            made = 1000 * layer + 10 * place + (wrong is not None and (layer, place) >= (wrong, 2))
            ops.append(Op(name, f"layer {layer}", "", (OpValue("float32[4]", number),), (OpValue("float32[4]", made),)))
            number = made
    return ops


@pytest.mark.parametrize("copied", [{3}, {3, 10}, {3, 5}, {*range(24)}, {*range(10)}, {0, 1, 2, 12}])
def test_equal_layers_are_aligned_although_some_do_more(copied: set[int]) -> None:
    difference = find_first([(0, layers(set()), layers(copied, wrong=20))])
    assert difference is not None
    assert difference.a is not None
    assert (difference.kind, difference.a.line) == (DifferenceKind.OUTPUT, "layer 20")


def test_a_step_is_read_as_it_was_written(tmp_path) -> None:
    plan = RerunPlan(folder=str(tmp_path), first=0, until=8, are_ops_recorded=True)
    plan.write([op("mm", "xw", "y", generator="7", settings="alpha=2"), STEP[0]], 7, 0)
    assert plan.read(7, 0) == [op("mm", "xw", "y", generator="7", settings="alpha=2"), STEP[0]]
