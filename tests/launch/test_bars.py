"""What stays of lines that redraw themselves, and which bar stands for those of all ranks?"""

from __future__ import annotations

import pytest

from allranks.launch.bars import FinishedLine, TerminalLines, find_place, fit, fold, fold_last

HIDE, SHOW, UP, ERASE = b"\x1b[?25l", b"\x1b[?25h", b"\x1b[A", b"\x1b[2K"

# What is written, piece by piece -> lines that have ended (`*`: the last state of a bar), and the rows below them.
WRITTEN = {
    "lines": ([b"one\ntwo\nthr"], ["one", "two"], []),
    "a line in two pieces": ([b"on", b"e\n"], ["one"], []),
    "lines of Windows": ([b"one\r\ntwo\r", b"\n"], ["one", "two"], []),
    "colors stay": ([b"\x1b[1mbold\x1b[0m\n"], ["\x1b[1mbold\x1b[0m"], []),
    "tqdm begins": ([b"\r  0%|   | 0/9"], [], ["  0%|   | 0/9"]),
    "tqdm goes on": ([b"\r  0%|   | 0/9", b"\r 33%|#  | 3/9"], [], [" 33%|#  | 3/9"]),
    "tqdm ends": ([b"\r  0%|   |", b"\r100%|###|\ndone\n"], ["*100%|###|", "done"], []),
    "a traceback behind a bar": (
        [b"\r  0%|   |\r 33%|#  |", b"[rank0]: Traceback (most recent call last):\n[rank0]:   File"],
        ["* 33%|#  |", "[rank0]: Traceback (most recent call last):"],
        [],
    ),
    "a traceback behind the first state of a bar": (
        [b"\r  0%|   |Traceback (most recent call last):\n"],
        ["  0%|   |", "Traceback (most recent call last):"],
        [],
    ),
    "a traceback behind words": (
        [b"\r 33%|#  |\rfailed: Traceback (most recent call last):\n"],
        ["failed: Traceback (most recent call last):"],
        [],
    ),
    "a bar that leaves nothing": ([b"\r  0%|   |\r100%|###|\r          \r", b"done\n"], ["done"], []),
    "a line that takes the bar's place": ([b"\r 10%|#  |\r          \rnote\n\r 10%|#  |"], ["note"], [" 10%|#  |"]),
    "print with end=CR": ([b"step 1\r", b"step 2\r"], [], ["step 2"]),
    "two bars of tqdm": (
        [b"\repochs:   0%|  |\n\rbatch:   0%|  |" + UP, b"\n\rbatch:  50%|# |" + UP],
        [],
        ["epochs:   0%|  |", "batch:  50%|# |"],
    ),
    "the inner one ends": (
        [
            b"\repochs:   0%|\n\rbatch:   0%|" + UP,
            b"\n\rbatch: 100%|" + UP + b"\n\r            " + UP + b"\repochs: 50%|",
        ],
        [],
        ["epochs: 50%|"],
    ),
    "rich draws two rows": (
        [HIDE + b"\r" + ERASE + b"epochs 0%\nbatch 0%", b"\r" + ERASE + b"\x1b[1A" + ERASE + b"epochs 0%\nbatch 33%"],
        [],
        ["epochs 0%", "batch 33%"],
    ),
    "rich prints above them": (
        [
            HIDE + b"epochs 0%\nbatch 0%",
            b"\r" + ERASE + b"\x1b[1A" + ERASE + b"loss 0.1\nepochs 0%\nbatch 0%",
        ],
        ["loss 0.1"],
        ["epochs 0%", "batch 0%"],
    ),
    "rich prints above a single row": (
        [HIDE + b"\r" + ERASE + b"epochs 0%", b"\r" + ERASE + b"loss 0.1\nepochs 0%", b"\r" + ERASE + b"epochs 9%"],
        ["loss 0.1"],
        ["epochs 9%"],
    ),
    "a hidden cursor that goes nowhere": ([HIDE + b"one\ntwo\n", b"\r3"], ["one", "two"], ["3"]),
    "a control sequence in two pieces": ([b"\r 1%\x1b[2", b"K\r 2%"], [], [" 2%"]),
    "a cursor that goes up too far": ([UP * 40 + b"\r 1%"], [], [" 1%"]),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_a_stream_is_read_as_a_terminal_would_show_it(case: str):
    pieces, expected, rows = WRITTEN[case]
    stream, ended = TerminalLines(), []
    for piece in pieces:
        ended += stream.feed(piece)
    assert ["*" * lines.is_redrawn + line for lines in ended for line in lines.text.decode().split("\n")] == expected
    assert [row.decode() for row in stream.rows] == rows


def test_lines_below_bars_come_when_the_cursor_has_not_gone_up_for_a_while():
    lines = TerminalLines()
    lines.feed(b"\router: 0%\n\rinner: 0%" + UP)
    assert lines.feed(b"\router: 100%\ndone\n") == [(b"outer: 100%", True)]
    assert lines.is_deep
    assert lines.settle() == [(b"done", False)]
    assert lines.feed(b"more\n") == [(b"more", False)]


def test_bars_that_stand_still_for_a_while_stay_bars():
    lines = TerminalLines()
    lines.feed(HIDE + b"\r" + ERASE + b"epochs 0%\nbatch 0%")
    lines.feed(b"\r" + ERASE + UP + ERASE + b"epochs 0%\nbatch 50%")
    assert lines.settle() == []
    assert lines.rows == [b"epochs 0%", b"batch 50%"]


def test_the_last_state_is_left_at_the_end():
    lines = TerminalLines()
    lines.feed(b"\r10%|#\r50%|###")
    assert lines.end() == [(b"50%|###", True)]
    assert lines.end() == []
    lines.feed(b"\r10%|#\r50%|###Traceback (most recent call last):")
    assert lines.end() == [(b"50%|###", True), (b"Traceback (most recent call last):", False)]


@pytest.mark.parametrize(
    ("row", "numbers"),
    [
        (b"train:  45%|##| 45/100 [00:04<00:05, 9.9it/s, loss=0.31]", (45,)),
        (b"Epoch 3:  12%|#| 1/8 [00:00<00:00, 18.67it/s]", (3, 12)),
        (b"epochs:  50%|##| 1/2 [00:00<00:00]", (50,)),
        (b"Epoch 0/9 \x1b[38;2;98;6;224m----\x1b[0m 45/100 0:00:04 - 0:00:05 9.9it/s", (0, 45)),
        (b"1200it [00:10, 120.00it/s]", (1200,)),
        (b"step 7 loss 0.25", (7,)),
        (b"working", ()),
    ],
)
def test_how_far_a_bar_is(row: bytes, numbers: tuple[float, ...]):
    assert find_place([row]).numbers == numbers


# Bars of the ranks -> what the terminal shows.
FOLDED = {
    "one rank alone": ({0: "45%|##|"}, "[r0] 45%|##|"),
    "all alike": ({0: "45%|##|", 1: "45%|##|", 2: "45%|##|"}, "[r0] 45%|##| +2 alike"),
    "the slowest is shown": ({0: "48%|##|", 1: "45%|##|", 2: "46%|##|"}, "[r1] 45%|##| +2 ranks: 46-48%"),
    "of two": ({0: "48%|##|", 1: "45%|##|"}, "[r1] 45%|##| +1 rank: 48%"),
    "an epoch behind": ({0: "Epoch 1: 3%|", 1: "Epoch 0: 97%|"}, "[r1] Epoch 0: 97%| +1 rank: epoch 1"),
    "without a total": ({0: "1200it [00:10]", 1: "1100it [00:10]"}, "[r1] 1100it [00:10] +1 rank: 1200"),
    "another bar": ({0: "load: 3%|", 1: "train: 5%|", 2: "train: 6%|"}, "[r1] train: 5%| +1 rank: 6% +1 other"),
}


@pytest.mark.parametrize("case", FOLDED)
def test_of_several_bars_the_slowest_stands_for_all(case: str):
    bars, expected = FOLDED[case]
    states = [(b"[r%d] " % rank, [text.encode()]) for rank, text in bars.items()]
    assert [row.decode() for row in fold(states)] == [expected]


def test_no_bar_is_folded_to_nothing():
    assert fold([]) == []


def test_of_two_rows_the_outer_one_tells_who_is_behind():
    states = [(b"[r0] ", [b"epochs: 50%", b"batch: 1%"]), (b"[r1] ", [b"epochs: 0%", b"batch: 99%"])]
    assert fold(states) == [b"[r1] epochs: 0%", b"[r1] batch: 99% +1 rank: 50%"]


def test_last_states_of_the_same_bar_are_one_line_and_each_rank_keeps_its_order():
    written = {0: ["*train: 100%", "loss 1", "*test: 100%", "*train: 100%", "loss 2"], 1: ["*train: 100%", "loss 3"]}
    waiting = [
        (rank, b"[r%d] " % rank, FinishedLine(line.removeprefix("*").encode(), line.startswith("*")))
        for rank, lines in written.items()
        for line in lines
    ]
    assert fold_last(waiting) == [
        (None, b"[r0] train: 100% +1 alike\n"),
        (0, b"loss 1\n"),
        (1, b"loss 3\n"),
        (None, b"[r0] test: 100%\n"),
        (None, b"[r0] train: 100%\n"),
        (0, b"loss 2\n"),
    ]


def test_the_last_states_of_different_epochs_stay_apart():
    ended = [
        (rank, b"[r%d] " % rank, FinishedLine(b"Epoch %d: 100%%" % epoch, True))
        for rank, epoch in ((0, 1), (1, 0), (2, 1))
    ]
    assert [line for _, line in fold_last(ended)] == [b"[r0] Epoch 1: 100% +1 alike\n", b"[r1] Epoch 0: 100%\n"]


@pytest.mark.parametrize(
    ("row", "words", "columns", "expected"),
    [
        ("x" * 30, " +3 alike", None, "x" * 30 + " +3 alike"),
        ("x" * 60, " +3 alike", 50, "x" * 40 + " +3 alike"),
        ("x" * 60, " +3 alike", 30, "x" * 29),
        ("\u65e5" * 30, "", 41, "\u65e5" * 20),
        ("\x1b[90m" + "x" * 50, "", 31, "\x1b[90m" + "x" * 30 + "\x1b[0m"),
    ],
)
def test_a_row_does_not_wrap(row: str, words: str, columns: int | None, expected: str):
    assert fit(row.encode(), words, columns).decode() == expected


GAMES = [
    *(
        b"\x1b[99999B",
        b"\x1b[99999C",
        b"\x1b[99999A",
        b"\x1b[9A\x1b[9B",
        b"\x1b[99999;99999H",
        b"\x1b[?25l\r\n",
        b"\x1b[J",
    ),
    *(b"\r", b"\rx", b"\r\n", b"x", b"\x1b", b"\x1b[", b"\x1b[9", b"\x1b[mx", b"\x00", b"\xff", b"1/", b"epoch 1 "),
]


@pytest.mark.parametrize("unit", [*GAMES, b"\x1b[" + b"9" * 20_000 + b"A", b"\x1b[" + b"1;" * 20_000])
@pytest.mark.parametrize("begin", [b"", b"\r50%"])
def test_whatever_is_written_few_bytes_are_kept(begin: bytes, unit: bytes):
    lines = TerminalLines()
    lines.feed(begin)
    for _ in range(4):
        lines.feed(unit * (50_000 // len(unit) + 1))
        find_place(lines.rows)
    assert len(lines._rows) <= 17
    left = lines.end()
    assert sum(len(line.text) for line in left) <= 17 * (1 << 16)
    assert len(left) <= 17


@pytest.mark.parametrize("row", [b"9" * 60_000 + b"%", b"epoch " + b"1" * 60_000 + b"%", b"1/" * 30_000, b"\xff" * 9])
def test_numbers_of_any_length_are_read(row: bytes):
    assert len(find_place([row]).numbers) <= 2
    assert fold([(b"[r0] ", [row]), (b"[r1] ", [b"9%"])])


def test_a_line_that_redraws_itself_without_an_end_is_cut():
    lines = TerminalLines()
    lines.feed(b"\r10%" + b"x" * 10_000)
    lines.feed(b"y" * 1_000_000)
    assert [len(row) for row in lines.rows] == [4096]
