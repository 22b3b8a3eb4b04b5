"""Whether the kernel says that its clock is kept."""

from __future__ import annotations

import pytest

from allranks.host.clock import is_synchronised, read_clock_state


@pytest.mark.parametrize(
    ("state", "status", "answer"),
    [(0, 0x2001, True), (0, 0x2041, False), (5, 0x2040, False), (5, 0, False), (1, 0x11, True)],
)
def test_a_kept_clock_has_neither_the_state_nor_the_bit(state, status, answer):
    assert is_synchronised(state, status) is answer


def test_the_kernel_answers_without_privileges():
    state, status = read_clock_state()
    assert 0 <= state <= 5
    assert status >= 0
