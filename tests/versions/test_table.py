"""Is the page of all versions what the runs said, and can the next run go on from it?"""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.launch.worker_environment import describe_torch
from versions.environment import lacking, requirement_of
from versions.table import FEATURES, Row, merge, read_rows, render, row_of

PAGE = Path(__file__).parents[2] / "docs/evidence/versions.md"
XML = """<testsuites><testsuite>
<testcase name="test_bring_up"><properties><property name="hook" value="yes"/>
<property name="flight recorder" value="none for gloo: ['a | b']"/></properties></testcase>
<testcase name="test_killed"><failure message="no">E  no</failure></testcase>
<testcase name="test_stopped"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def test_what_a_version_lacks_is_a_column():
    assert {lack.name for lack in describe_torch("2.4.0")[1:]} < FEATURES.keys()


def test_a_run_becomes_a_row_with_what_was_seen_and_what_failed():
    row = row_of("2.5.1+cu124", "3.11", XML, date="2026-11-23")
    assert row.jobs == "1 passed; failed: test_killed; skipped: test_stopped"
    assert (row.features["hook"], row.features["standbys"]) == ("yes", "-")
    assert read_rows(render([row])) == [row]


def test_a_run_that_left_nothing_is_no_row():
    with pytest.raises(ValueError, match="pytest left no result"):
        row_of("2.5.1", "3.11", "", date="2026-11-23")


def test_a_new_run_replaces_its_elder_and_the_oldest_version_comes_first():
    old = [Row("2.15.0+cu132", "3.11", "2026-11-22", "1 passed"), Row("2.5.1+cu124", "3.11", "2026-11-22", "1 passed")]
    rows = merge(old, Row("2.15.0", "3.11", "2026-11-23", "not run: no wheel"))
    read = read_rows(render(rows))
    assert [(row.torch, row.date) for row in read] == [("2.5.1+cu124", "2026-11-22"), ("2.15.0", "2026-11-23")]


def test_the_page_in_the_docs_is_of_this_form():
    text = PAGE.read_text()
    rows = read_rows(text)
    assert render(rows) == text
    assert rows


@pytest.mark.parametrize(
    ("words", "stems"),
    [
        ("\tlibcudart.so.12 => not found\n\tlibm.so.6 => /lib/libm.so.6\n\tlibcudart.so.12 => not found", ["cudart"]),
        ("ImportError: libcusparseLt.so.0: cannot open shared object file", ["cusparseLt"]),
        ("ValueError: libcublas.so.12 not found in the system path ['']", ["cublas"]),
        ("libc10_cuda.so: undefined symbol: cudaGetDriver, version libcudart.so.12", ["cudart"]),
        ("libtorch_cuda.so: undefined symbol: ncclGroupSimulateEnd\n", ["nccl"]),
        ("ok", []),
    ],
)
def test_what_the_loader_misses_is_read(words: str, stems: list[str]):
    assert lacking(words) == stems


TORCH_2_5 = ['nvidia-cuda-runtime-cu12 (==12.4.127) ; platform_system == "Linux"', "nvidia-nccl-cu12 (==2.21.5)"]
TORCH_2_15 = ['cuda-toolkit[cublas,cudart]==13.2.2; platform_system == "Linux"', "nvidia-cudnn-cu13==9.26.0.51; x"]


@pytest.mark.parametrize(
    ("stem", "requirements", "wanted"),
    [
        ("cudart", TORCH_2_5, "nvidia-cuda-runtime-cu12==12.4.127"),
        ("nccl", TORCH_2_5, "nvidia-nccl-cu12==2.21.5"),
        ("cublasLt", TORCH_2_15, "cuda-toolkit[cublas]==13.2.2"),
        ("cudart", TORCH_2_15, "cuda-toolkit[cudart]==13.2.2"),
        ("cudnn", TORCH_2_15, "nvidia-cudnn-cu13==9.26.0.51"),
        ("nccl", TORCH_2_15, None),
    ],
)
def test_a_library_leads_to_the_package_that_torch_asks_for(stem: str, requirements: list[str], wanted: str | None):
    assert requirement_of(stem, requirements) == wanted
