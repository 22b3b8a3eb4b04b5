"""Is a report one safe file that shows what the run directory tells, whatever anybody has written there?"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from allranks.model.curve import CurvePoint
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Verdict
from allranks.model.job_status import JobStatus, write_status
from allranks.model.ledger import Category, Ledger, LostTime
from allranks.report.machine import to_json
from allranks.report.page import render
from allranks.report.page_cards import FAILED, parse_roll_call
from allranks.report.page_charts import draw, split_budget, thin_out
from allranks.report.page_curves import PageCurve, draw_values
from allranks.report.page_data import RunOutcome, judge_outcome, read_page
from allranks.report.readback import parse_job_status
from allranks.report.rundir import event_line, is_own_file
from conftest import Tell
from made_run import BEGUN_S, HANG, make_run

FAILURE = Verdict(job="4711", attempt=0, exit_code=124, findings=(HANG,))
EVIL = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}\x1b[31m\x7f\u202e'\"&"
LATER_S = BEGUN_S + 7260.0


class Read(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("failed"), verdict=FAILURE)


@pytest.fixture(scope="module")
def failed_page(failed: Path) -> str:
    return render(read_page(failed, now_s=LATER_S))


def test_a_page_needs_nothing_outside_of_it(failed_page: str) -> None:
    read = Read(failed_page)
    assert not [value for _, attributes in read.tags for name, value in attributes.items() if name in ("src", "href")]
    assert {name for name, _ in read.tags}.isdisjoint({"link", "img", "iframe", "object", "embed", "base", "form"})
    assert not re.search(r"url\(|@import|https?://|\bfetch\(|XMLHttpRequest|import\(", failed_page)


def test_no_script_runs_but_its_own(failed_page: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", failed_page, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = next(tag for tag in Read(failed_page).all("meta") if tag.get("http-equiv") == "Content-Security-Policy")
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';" in (policy["content"] or "")
    assert not [name for _, attributes in Read(failed_page).tags for name in attributes if name.startswith("on")]


def test_the_verdict_comes_first_then_the_fault_then_the_time(failed_page: str) -> None:
    sections = [tag["id"] for tag in Read(failed_page).all("section")]
    assert sections == [
        "verdict", "fault", "time", "lanes", "curves", "ranks", "nodes", "checkpoints", "commands", "environment",
        "events",
    ]  # fmt: skip
    text = Read(failed_page).text
    assert "Failed exit code 124 AR420 hang · node03 · rank 3 rank 3 never called all_reduce number 1841" in text
    assert "Waited or were ended ranks 0-2,4-5" in text
    assert "allranks explain AR420" in text


def test_the_fault_has_the_culprits_stack_first_and_culprit_and_victim_side_by_side(failed: Path) -> None:
    page = read_page(failed, now_s=LATER_S)
    assert [(place.ranks, place.is_culprit) for place in page.places] == [((3,), True), ((0, 1, 2, 4, 5), False)]
    assert page.places[0].stack.startswith('state S\n\nThread "MainThread"\n    run (evaluate.py:88)')
    assert [(last.role, last.rank, last.node, last.lines[-1]) for last in page.last_lines] == [
        ("culprit", 3, "node03", "step 1840 loss 2.30 of rank 3"),
        ("victim", 0, "node00", "step 1840 loss 2.30 of rank 0"),
    ]


def test_a_healthy_run_says_what_it_lost_and_shows_no_fault(tmp_path: Path) -> None:
    page = read_page(make_run(tmp_path), now_s=LATER_S)
    text = Read(render(page)).text
    told = "Succeeded 6 ranks, 2:00:00, 1840 steps; goodput 81 %. Lost: wait 8.1 % (rank 5 on node05), "
    assert told + "data 2.8 % (ranks 3,5 on node05), redo 2.4 %" in text
    assert (page.places, page.last_lines) == ((), ())
    assert ("Run it again", "cd /home/ada/gpt && allranks run --nnodes 6 --nproc-per-node 1 train.py --lr 1e-4") in (
        page.commands
    )


def test_secrets_are_not_in_it(tmp_path: Path) -> None:
    told = "HF_TOKEN=hf_abcdefghijklmnopqrst0123"
    warned = msgspec.structs.replace(HANG, message=told, evidence=(Evidence(seen=told),))
    run = make_run(tmp_path, verdict=Verdict(job="4711", attempt=0, exit_code=1, findings=(warned,)))
    for name in ("node03/rank_3.err", "node03/rank_3.stack.txt", "node00/rank_0.err"):
        (run / "attempt_0" / name).write_text(told + "\n")
    with (run / "attempt_0/events.jsonl").open("a") as file:
        for event in ("started", "straggler"):
            file.write(json.dumps({"event": event, "command": ["a.py", told], "rank": 1, "message": told}) + "\n")
    page = read_page(run, now_s=LATER_S)
    assert "WANDB_API_KEY" in render(page)
    for text in (render(page), to_json(page)):
        assert text.count("HF_TOKEN=(hidden)") >= 6
        assert "hf_abcdef" not in text
        assert "0123456789abcdef" not in text


def test_no_name_in_a_file_leads_out_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/env.json").write_text(json.dumps([{"name": "OF_ANOTHER", "value": "1"}]))
    with (run / "attempt_0/events.jsonl").open("w") as file:
        file.write(json.dumps({"event": "started", "members": ["../../../other"]}) + "\n")
    assert (run / "attempt_0/../../../other/env.json").exists()
    assert read_page(run, now_s=LATER_S).settings == ()


def test_foreign_texts_are_escaped_everywhere(tmp_path: Path) -> None:
    finding = Finding(
        cause=f"AR590 {EVIL}", severity=Severity.FAIL, confidence=Confidence.CERTAIN, node="node03", ranks=(3,),
        message=EVIL, evidence=(Evidence(seen=EVIL, source=EVIL),), fix=EVIL, ask=EVIL, notes=(EVIL,), waiting=EVIL,
        interface=EVIL, subject=EVIL, victims=(0,),
    )  # fmt: skip
    run = make_run(tmp_path, verdict=Verdict(job=EVIL, attempt=0, exit_code=1, findings=(finding, finding)))
    attempt = run / "attempt_0"
    for name in ("rank_3.err", "rank_3.stack.txt"):
        (attempt / "node03" / name).write_text(EVIL + "\n")
    settings = [{"name": EVIL, "value": EVIL, "reason": EVIL, "source": EVIL}]
    (attempt / "node03" / "env.json").write_text(json.dumps(settings))
    with (attempt / "events.jsonl").open("a") as file:
        about = {"members": [EVIL], "command": ["python", EVIL], "cwd": EVIL, "cause": EVIL, "node": EVIL}
        for event in ("verdict", "node_lost", "started"):
            file.write(json.dumps({"event": event, "time_s": 1.0, **about}) + "\n")
    roll_call = json.loads((attempt / "roll_call.json").read_bytes())
    roll_call["cards"]["1"] |= {"host": EVIL, "data_interface": EVIL}
    roll_call["cards"]["1"]["facts"]["packages"] = {EVIL: EVIL}
    roll_call["results"][0]["problem"] = EVIL
    (attempt / "roll_call.json").write_text(json.dumps(roll_call))
    status = parse_job_status((run / "status.json").read_bytes())
    (run / "status.json").write_bytes(
        write_status(msgspec.structs.replace(status, nodes=tuple(
            msgspec.structs.replace(row, name=EVIL) for row in status.nodes
        )))
    )  # fmt: skip
    (attempt / EVIL.replace("/", "")).mkdir()
    page = read_page(run, now_s=LATER_S)
    text = render(page)
    read = Read(text)
    assert text.count("{{ 7 * 7 }}") > 20
    assert {name for name, _ in read.tags}.isdisjoint({"img", "iframe"})
    assert len(read.all("script")) == 2  # the lanes' data, and its own
    assert {"\x1b", "\x7f", "\u202e"}.isdisjoint(text + to_json(page))
    assert {tag["id"] for tag in read.all("section")} >= {"verdict", "findings", "fault", "environment", "events"}


def test_the_lanes_are_packed_as_a_browser_unpacks_them(failed: Path, failed_page: str) -> None:
    told = re.search(r'<script type="application/json" id="lanes-data">(.*?)</script>', failed_page, re.DOTALL)
    assert told is not None
    lanes = json.loads(told[1])
    cells = zlib.decompress(base64.b64decode(lanes["data"]))
    assert len(cells) == 6 * lanes["columns"]
    assert lanes["rows"][5] == [5, "node05"]
    assert lanes["states"][cells[0]] == "start"
    assert lanes["marks"] == [[3000.0, "restart 1: AR407 dead-rank"]]


@pytest.mark.parametrize(
    ("num_nodes", "per_node", "limit_mb"), [(6, 1, 2), (128, 8, 10)], ids=["six ranks", "1,024 ranks"]
)
def test_a_page_is_small(tmp_path: Path, num_nodes: int, per_node: int, limit_mb: int) -> None:
    run = make_run(tmp_path, num_nodes=num_nodes, per_node=per_node)
    text = render(read_page(run, now_s=LATER_S))
    assert len(text.encode()) < limit_mb * 1e6 / 4
    assert len(Read(text).tags) < 10_000  # a browser opens it at once


def test_ten_thousand_points_keep_their_peaks_in_few() -> None:
    points = tuple((float(step), 1000.0 if step == 7790 else step % 7) for step in range(10_000))
    shown = thin_out(points)
    assert len(shown) <= 720
    assert (7790.0, 1000.0) in shown
    assert shown == sorted(shown)
    chart = draw(PageCurve(name="loss", points=points, is_of_time=False))
    assert chart.text == "last 3, lowest 0, highest 1,000"
    assert len(chart.path) < 12_000


def test_values_of_step_log_are_curves_and_lost_steps_are_not(failed: Path) -> None:
    curves = {curve.name: curve for curve in read_page(failed).curves}
    assert list(curves)[:3] == ["Rate", "loss", "lr"]
    assert (len(curves["loss"].points), curves["loss"].num_not_finite) == (9999, 1)
    before = [CurvePoint(step, 0.0, {"loss": float(step)}) for step in (1, 2, 3, 4)]
    after = [CurvePoint(3, 9.0, {"loss": 30.0}), CurvePoint(4, 9.0, {"loss": None})]
    (curve,) = draw_values([before, after])
    assert (curve.points, curve.num_not_finite) == (((1.0, 1.0), (2.0, 2.0), (3.0, 30.0)), 1)


def test_checkpoints_are_listed(failed: Path, failed_page: str) -> None:
    assert [checkpoint.step for checkpoint in read_page(failed).checkpoints][-2:] == [1700, 1800]
    assert "1,800 2026-11-28" in Read(failed_page).text


def test_saves_of_a_script_are_listed_apart_and_as_not_verified(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_values=10)
    told = {"optimizer_steps": 1234, "save_s": 2.5, "generation": 0, "is_verified": False}
    with (run / "attempt_0/events.jsonl").open("a") as file:
        file.write(event_line("checkpoint", **told) + "\n")
    page = read_page(run)
    assert [(save.optimizer_steps, save.save_s) for save in page.saves] == [(1234, 2.5)]
    assert page.checkpoints[-1].step == 1800
    text = Read(render(page)).text
    assert "torch.distributed.checkpoint), not verified" in text
    assert "1,234 " in text


def test_work_comes_first_then_the_losses_by_size() -> None:
    ledger = Ledger(
        begun_s=0.0, until_s=100.0, rank_s=200.0, is_steps_seen=True,
        seconds={"data": 20.0, "step": 120.0, "wait": 40.0, "transfer": 20.0, "made up": 1.0},
        losses=(LostTime(category=Category.WAIT, rank_s=40.0, ranks=(3, 1), nodes=("n1",), is_estimated=True),),
    )  # fmt: skip
    parts = split_budget(ledger, job="7")
    assert [(part.key, part.share, part.wall_s) for part in parts] == [
        ("step", 0.6, 60.0), ("transfer", 0.1, 10.0), ("wait", 0.2, 20.0), ("data", 0.1, 10.0),
    ]  # fmt: skip
    assert [part.whom for part in parts] == ["", "", "ranks 1,3 on n1", ""]
    assert parts[2].advice.startswith("The others wait for ranks 1,3.")
    assert (parts[2].is_estimated, parts[3].is_estimated) == (True, False)


def test_links_are_compared_with_their_median_and_failures_come_first(failed: Path) -> None:
    links = read_page(failed).links
    assert links is not None
    assert (links.num_tried, links.num_failed, links.worst[0].problem) == (30, 1, "no answer in 1.0 s")
    slow, good, own, broken = links.rows[0][2], links.rows[0][1], links.rows[0][0], links.rows[3][5]
    assert slow is not None
    assert good is not None
    assert broken is not None
    assert (own, broken.level) == (None, FAILED)
    assert good.level < 4 < slow.level


def test_values_that_differ_name_the_odd_node(failed: Path) -> None:
    odd = {one.what: (one.usual, one.num_usual, one.odd) for one in read_page(failed).odd_values}
    assert odd["package numpy"] == ("2.4.6", 5, (("2.3.1", "node04"),))
    assert odd["NCCL_DEBUG"] == ("not set", 5, (("INFO", "node04"),))
    assert odd["MTU"] == ("9000", 5, (("1500", "node01"),))
    assert "Python" not in odd


def test_a_roll_call_of_one_node_has_no_links() -> None:
    assert parse_roll_call(b'{"cards": {"0": {"host": "a"}}}').links is None
    assert parse_roll_call(b"\xff") == parse_roll_call(b"[]")


def test_an_empty_directory_still_has_a_page(tmp_path: Path) -> None:
    page = read_page(tmp_path, now_s=LATER_S)
    text = Read(render(page)).text
    assert (page.outcome, page.attempts) == (RunOutcome.UNKNOWN, 0)
    assert "no attempt: no agent has started; no verdict.json" in text


@pytest.mark.parametrize("damage", ["cut", "noise", "types", "directory", "link", "gone"])
def test_damaged_files_cost_their_part_only(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path, verdict=FAILURE)
    for path in sorted(path for path in run.rglob("*") if path.is_file() and path.name != "verdict.json"):
        data = path.read_bytes()
        path.unlink()
        if damage == "directory":
            path.mkdir()
        elif damage == "link":
            path.symlink_to("/etc/passwd")
        elif damage != "gone":
            path.write_bytes(
                {"cut": data[: len(data) // 2], "noise": os.urandom(300), "types": b'{"cards": 1}'}[damage]
            )
    page = read_page(run, now_s=LATER_S)
    text = Read(render(page)).text
    assert page.outcome is RunOutcome.FAILED
    assert "rank 3 never called all_reduce number 1841" in text
    assert "root:x:0" not in text
    assert page.missing


def test_numbers_that_nobody_measured_break_no_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_values=10)
    ledger = msgspec.json.decode((run / "goodput.json").read_bytes())
    huge = {"begun_s": 1.0, "until_s": 3.9e9, "rank_s": 1e-320, "seconds": {"step": 1e15, "wait": 5e-324}}
    (run / "goodput.json").write_bytes(msgspec.json.encode(ledger | huge))
    status = msgspec.json.decode((run / "status.json").read_bytes())
    about = {"checkpoint_s": 3.9e9, "steps_per_s": 1e15, "rates": [1e15, 0.0, 5e-324], "step": 1 << 60}
    (run / "status.json").write_bytes(msgspec.json.encode(status | about))
    values = [{"loss": 1e308, "small": 5e-324, "wide": 1e149}, {"loss": -1e308, "small": 0.0, "wide": -1e149}]
    lines = [{"step": step, "time_s": 0.0, "values": told} for step, told in zip((0, 1 << 60), values, strict=True)]
    (run / "attempt_0/curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = read_page(run, now_s=LATER_S)
    assert page.ledger is not None
    assert page.status is not None
    text = render(page)
    assert "Succeeded" in text
    assert not re.search(r'd="[^"]*(?:nan|inf)', text)


def test_the_outcome_without_a_verdict_is_that_of_a_fresh_status() -> None:
    status = JobStatus(job="7", written_s=1000.0, started_s=0.0, phase="running")
    assert judge_outcome(None, status, now_s=1010.0) is RunOutcome.RUNNING
    assert judge_outcome(None, status, now_s=1100.0) is RunOutcome.UNKNOWN
    assert judge_outcome(None, msgspec.structs.replace(status, phase="over"), now_s=1010.0) is RunOutcome.UNKNOWN
    assert judge_outcome(Verdict(job="7", attempt=0, exit_code=143), status, now_s=1010.0) is RunOutcome.STOPPED


def test_state_is_never_told_by_colour_alone(failed_page: str) -> None:
    read = Read(failed_page)
    for canvas in read.all("canvas"):
        assert canvas["role"] == "img"
        assert canvas["aria-label"]
        assert canvas["tabindex"] == "0"
    assert all(svg.get("role") == "img" and svg.get("aria-label") for svg in read.all("svg"))
    assert 'class="mark fail"><span aria-hidden="true">✗</span> failure' in failed_page
    css = re.search(r"<style>(.*?)</style>", failed_page, re.DOTALL)
    assert css is not None
    for scheme in ("color-scheme: light dark", "prefers-color-scheme: dark", "@media print"):
        assert scheme in css[1]


# The verbs


def test_report_writes_the_page_where_it_is_told(tmp_path: Path, tell: Tell) -> None:
    run = make_run(tmp_path / "runs", verdict=FAILURE)
    assert tell("report", "4711") == (0, "runs/4711/report.html\n", "")
    assert is_own_file(run / "report.html")
    assert tell("report", "4711", "-o", "mine.html").out == "mine.html\n"
    assert (tmp_path / "mine.html").read_text().startswith("<!doctype html>")
    (tmp_path / "link.html").symlink_to("mine.html")
    assert tell("report", "4711", "-o", "link.html").out == "link.html\n"
    assert (tmp_path / "link.html").is_symlink()
    told = json.loads(tell("report", "--json", "4711").out)
    assert (told["version"], told["outcome"], told["findings"][0]["ranks"]) == (1, "failed", [3])
    assert tell("report", "4712").code == 2
    answer = tell("report", "4711", "-o", "no/such.html")
    assert (answer.code, answer.err) == (
        2,
        "error: no/such.html: no such file or directory; name another file\n",
    )


@pytest.mark.parametrize("leave", [lambda path: path.symlink_to("../../mine"), os.mkfifo], ids=["link", "pipe"])
def test_what_others_left_in_the_place_of_a_report_is_replaced(
    tmp_path: Path, tell: Tell, leave: Callable[[Path], object]
) -> None:
    page = make_run(tmp_path / "runs", verdict=FAILURE) / "report.html"
    (tmp_path / "mine").write_text("kept")
    leave(page)
    assert tell("report", "4711").code == 0
    assert is_own_file(page)
    assert (tmp_path / "mine").read_text() == "kept"


def test_why_makes_a_page_of_foreign_logs(tmp_path: Path, tell: Tell) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank_1.err").write_text(
        f'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\nValueError: {EVIL}\n'
    )
    answer = tell("why", "--html", "why.html", "logs")
    assert (answer.code, answer.out) == (1, "why.html\n")
    read = Read((tmp_path / "why.html").read_text())
    assert "Failed AR590 user-code-error" in read.text
    assert len(read.all("script")) == 1
    assert not read.all("img")
