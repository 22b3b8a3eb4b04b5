"""What does a terminal get for the row below the output, and what of headline and bar has room in it?"""

from __future__ import annotations

import pytest

from allranks.launch.row import Paint, compose

# (what is printed: bytes; what is drawn: text) -> the bytes; `<` is the return to the empty begin of the line.
PAINTED = {
    "lines alone": ([b"one\n", b"two\n"], "one\ntwo\n"),
    "a row is redrawn in place": (["1%", "2%"], "<1%<2%"),
    "nothing new": (["1%", "1%"], "<1%"),
    "a line goes above, with the row in one piece": (["1%", b"note\n"], "<1%<note\n1%"),
    "a line in two pieces": (["1%", b"no", "2%", b"te\n", "2%"], "<1%<note\n2%"),
    "a line and its end in two pieces": (["1%", b"note", b"\n"], "<1%<note\n1%"),
    "output without a newline is not torn": ([b"Password: ", "1%", b"x", "2%"], "Password: x"),
    "a row after such output": ([b"loss 0.4", "1%", b"\n"], "loss 0.4\n1%"),
    "the row ends": (["1%", ""], "<1%<"),
    "no row ends": ([""], ""),
    "what ends during a line is gone": (["1%", b"no", "", b"te\n"], "<1%<note\n"),
}


@pytest.mark.parametrize("case", PAINTED)
def test_a_terminal_gets_lines_above_the_row(case: str):
    steps, expected = PAINTED[case]
    paint = Paint()
    got = b"".join(paint.write(step) if isinstance(step, bytes) else paint.draw(step.encode()) for step in steps)
    assert got.decode().replace("\r\x1b[K", "<") == expected


def test_a_row_that_the_shell_has_overwritten_is_drawn_anew():
    paint = Paint()
    paint.draw(b"1%")
    paint.forget()
    assert paint.write(b"note\n") == b"note\n1%"
    paint.forget()
    assert paint.draw(b"1%") == b"\r\x1b[K1%"


def head(columns: int, spare: int) -> str:
    """A headline with a part that can go."""
    return "> 0:00:12 - 3/3 ranks" if columns - spare >= 21 else "> 0:00:12"


BAR = [(b"[r0] ", [b"train: 45%|####      | 45/100"]), (b"[r1] ", [b"train: 50%|#####     | 50/100"])]
NESTED = [(b"[r0] ", [b"epochs:  50%|##  | 1/2", b"batch:   1%|    | 1/100"])]
ENDED = [(b"[r0] ", [b"Saving: 100%|####| 1/1", b"  1%|    | 41/3000"])]
EPOCH_ENDED = [(b"[r0] ", [b"Epoch 0: 100%|####| 9/9", b"Validation:  50%|##  | 1/2"])]
COLORED = [(b"[r0] ", [b"epochs \x1b[35m\xe2\x94\x81\xe2\x94\x81\x1b[0m 1/2", b"train \x1b[35m--\x1b[0m 3%"])]


@pytest.mark.parametrize(
    ("headline", "states", "columns", "expected"),
    [
        (None, [], 77, ""),
        (None, BAR, 77, "[r0] train: 45%|####      | 45/100 +1 rank: 50%"),
        (head, [], 77, "> 0:00:12 - 3/3 ranks"),
        (head, BAR, 77, "> 0:00:12 - 3/3 ranks  [r0] train: 45%|####      | 45/100 +1 rank: 50%"),
        (head, BAR, 62, "> 0:00:12  [r0] train: 45%|####      | 45/100 +1 rank: 50%"),
        (head, BAR, 52, "> 0:00:12  [r0] train: 45%|####      |  +1 rank: 50%"),
        (head, BAR, 30, "> 0:00:12 - 3/3 ranks"),
        (None, NESTED, 77, "[r0] epochs:  50%  batch:   1%|    | 1/100"),
        (None, ENDED, 77, "[r0]   1%|    | 41/3000"),
        (None, EPOCH_ENDED, 77, "[r0] Epoch 0: 100%  Validation:  50%|##  | 1/2"),
        (head, COLORED, 77, "> 0:00:12 - 3/3 ranks  [r0] epochs  train \x1b[35m--\x1b[0m 3%\x1b[0m"),
        (lambda columns, spare: "", BAR, 77, "[r0] train: 45%|####      | 45/100 +1 rank: 50%"),
    ],
)
def test_headline_and_bar_share_the_row(headline, states, columns: int, expected: str):
    assert compose(headline, states, columns).decode() == expected
