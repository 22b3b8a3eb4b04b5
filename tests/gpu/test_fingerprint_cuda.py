"""Does a GPU compute the fingerprints that a CPU does, and fast enough to be asked while it trains?"""

from __future__ import annotations

import pytest

from .conftest import Note
from .job import run_one

IMPORTS = """\
import time
import torch
from rank import device, is_rehearsal, synchronize, tell
from allranks.state.truth.fingerprint import fingerprint

"""


@pytest.mark.rehearsable
def test_a_gpu_computes_the_numbers_of_a_cpu(tmp_path, note: Note):
    """Expected: tensors of each dtype, contiguous, transposed, sliced, conjugated, misaligned, empty and scalar, have
    the same 64 bits on the GPU as on the CPU.
    """
    script = (
        IMPORTS
        + """\
torch.manual_seed(1)
kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
made = [(torch.randn(300, 70) * 9).to(kind) for kind in kinds]
big, waves = torch.randn(1023, 513), torch.randn(9, 99, dtype=torch.complex64)
made += [big, big.T, big[::3, 5:77], big.view(-1)[1:], waves.conj(), torch.ones(()), torch.empty(0, 3)]
there = [own.to(device) for own in made]
there[8], there[9], there[10] = there[7].T, there[7][::3, 5:77], there[7].view(-1)[1:]
tell(wrong=[at for at, pair in enumerate(zip(fingerprint(made), fingerprint(there))) if pair[0] != pair[1]])
"""
    )
    assert run_one(tmp_path / "numbers", script) == {"wrong": []}


def test_300_million_numbers_take_10_ms(tmp_path, note: Note):
    """Expected: fingerprints of 300 M float32 in 300 tensors take at most 10 ms, the copy of the numbers to the CPU
    included: they are copied together by 64 MB, and summed up by rows and by columns, which moves 5 GB in some 200
    launches.
    """
    script = (
        IMPORTS
        + """\
made, times = [torch.randn(1_000_000, device=device) for _ in range(300)], []
for _ in range(6):
    synchronize()
    began_s = time.perf_counter()
    fingerprint(made)
    times.append(1000 * (time.perf_counter() - began_s))
tell(ms=round(min(times), 2))
"""
    )
    told = run_one(tmp_path / "speed", script)
    note("ms for 300 M numbers in 300 tensors", told["ms"])
    assert told["ms"] <= 10.0
