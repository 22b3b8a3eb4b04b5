"""What is watched, and who is the odd one? Tables."""

from __future__ import annotations

import pytest

from allranks.state.truth.odd_one import DifferingTensor, Judged, ReplicaReport, Seen, TensorReport, judge

C, N, W, F = Seen(1), Seen(1, 1), Seen(1, 2), Seen(1, 0, True)
"""A tensor that was 1 before: seen once, changed once, watched, frozen."""
FORM = "float32", (9,)


@pytest.mark.parametrize(
    ("numbers", "standings"),
    [
        ([1, 2, 3, 3, 3], [C, N, W, W, W]),  # weights
        ([1, 1, 1], [C, F, F]),  # frozen ones
        ([1, 1, 1, 2, 3], [C, F, F, N, W]),  # an EMA that begins late
        ([1, 1, 2, 2, 2], [C, F, N, N, N]),  # changed once
    ],
)
def test_a_tensor_is_watched_after_two_changes_and_frozen_after_two_equal_checks_without(
    numbers: list[int], standings: list[Seen]
):
    found, seen = list[Seen](), Seen()
    for number in numbers:
        found.append(seen := seen.then(number))
        assert seen.number == number
    assert [(own.num_changes, own.is_watched, own.is_frozen) for own in found] == [
        (own.num_changes, own.is_watched, own.is_frozen) for own in standings
    ]


def report(group: str = "", **entries: TensorReport) -> ReplicaReport:
    return ReplicaReport(entries=entries, group=group)


def judged(before: Seen, *values: int | None, groups: str = "", is_loaded: bool = False) -> Judged:
    """One tensor `w` with these numbers, which was 1 before, and three watched ones that are equal."""
    equal = {name: TensorReport(number, W, FORM) for number, name in enumerate("abc")}
    own = [{} if number is None else {"w": TensorReport(number, before, FORM)} for number in values]
    rows = [report(groups[at : at + 1], **equal, **mine) for at, mine in enumerate(own)]
    return judge(rows, is_loaded=is_loaded)


def odd(*ranks: int, reference: int = 0, is_frozen: bool = False, is_decided: bool = True) -> Judged:
    found = DifferingTensor(name="w", ranks=ranks, reference=reference, is_decided=is_decided, is_frozen=is_frozen)
    return Judged(suspects=(found,))


EQUAL, LEFT_OUT = Judged(), Judged(not_replicated=("w",))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (judged(W, 7, 7, 7), EQUAL),
        (judged(W, 7, 7, 8), odd(2)),
        (judged(W, 8, 7, 7), odd(0, reference=1)),
        (judged(W, 7, 8, 7, 9, 7), odd(1, 3)),
        (judged(W, 7, None, 7), odd(1)),
        (judged(W, 7, 8), odd(0, 1, is_decided=False)),
        (judged(W, 7, 7, 8, 8), odd(0, 1, 2, 3, is_decided=False)),
        (judged(W, 7, 8, 9), odd(0, 1, 2, is_decided=False)),
        # before it is watched
        (judged(C, 7, 7, 8), LEFT_OUT),
        (judged(N, 7, 7, 8), LEFT_OUT),
        (judged(C, 7, 8), LEFT_OUT),
        # what never changed names its culprit by that
        (judged(F, 1, 8), odd(1, is_frozen=True)),
        (judged(F, 8, 1), odd(0, reference=1, is_frozen=True)),
        (judged(F, 1, 1, 8), odd(2, is_frozen=True)),
        (judged(F, 8, 8, 1), LEFT_OUT),
        (judged(F, 8, 9), LEFT_OUT),
        # only ranks that compute the same bits, or have the same shards
        (judged(W, 7, 8, groups="ab"), EQUAL),
        (judged(W, 7, 8, 7, 8, groups="abab"), EQUAL),
        (judged(W, 7, 8, 7, 8, 7, 9, groups="ababab"), odd(5, reference=1)),
        (judged(F, 1, 8, 2, groups="aab"), odd(1, is_frozen=True)),
        # after a load, the checkpoint's own number decides where the ranks cannot
        (judged(C, 1, 8, is_loaded=True), odd(1)),
        (judged(C, 8, 1, is_loaded=True), odd(0, reference=1)),
        (judged(C, 8, 9, is_loaded=True), odd(0, 1, is_decided=False)),
        (judged(C, 8, 8, 1, is_loaded=True), odd(2)),
    ],
)
def test_more_than_half_outvote_one_and_nobody_else_is_named(found: Judged, expected: Judged):
    assert found == expected


def parted(*rows: tuple[int, ...]) -> Judged:
    return judge(
        [report(**{name: TensorReport(own, W, FORM) for name, own in zip("abc", row, strict=False)}) for row in rows]
    )


def test_where_most_tensors_part_and_no_two_ranks_agree_the_script_did_it():
    assert parted((1, 1, 1), (2, 2, 1)).is_by_script
    assert parted((1, 1), (2, 2), (3, 3)).is_by_script
    assert not parted((1, 1), (2, 2), (2, 2)).is_by_script  # two agree
    assert not parted((1, 1, 1), (2, 1, 1)).is_by_script
    assert not parted((1,), (2,)).is_by_script  # there is no other tensor


def test_decided_tensors_come_first():
    found = parted((1, 1, 0), (2, 1, 0), (3, 2, 0))
    assert [suspect.name for suspect in found.suspects] == ["b", "a"]
