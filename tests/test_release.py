"""What does packaging/release.py refuse? What it builds and tags is tested in test_install.py, by hand."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "packaging/release.py"


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with all that is looked at before anything is built, ready for a release."""
    folder = tmp_path / "checkout"
    for name in ("src/allranks/__init__.py", "CITATION.cff", "CHANGELOG.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "CHANGELOG.md").write_text("# Changes\n\n## 0.1.0, 2026-12-01\n\n- First release.\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "All")
    return folder


def refusal(checkout: Path) -> str:
    """Run the script, which must refuse, and return why."""
    command = [sys.executable, str(SCRIPT), "--root", str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    tags = subprocess.run(["git", "tag"], cwd=checkout, capture_output=True, text=True, check=True)
    assert tags.stdout in {"", "v0.1.0\n"}
    return done.stderr.strip()


def test_a_checkout_with_changes_is_refused(checkout: Path) -> None:
    (checkout / "new.py").write_text("")
    assert refusal(checkout) == "error: the checkout has changes; commit them first:\n?? new.py"


def test_a_version_that_is_tagged_is_refused(checkout: Path) -> None:
    git(checkout, "tag", "v0.1.0")
    assert refusal(checkout) == "error: v0.1.0 is tagged already; raise __version__ in src/allranks/__init__.py"


def test_a_changelog_without_a_date_is_refused(checkout: Path) -> None:
    changes = checkout / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("2026-12-01", "unreleased"))
    git(checkout, "commit", "--quiet", "--all", "--message", "No date")
    assert refusal(checkout) == (
        "error: CHANGELOG.md has no section with a date for 0.1.0: expected '## 0.1.0, YYYY-MM-DD'"
    )


def test_another_version_in_the_citation_is_refused(checkout: Path) -> None:
    citation = checkout / "CITATION.cff"
    citation.write_text(citation.read_text().replace("version: 0.1.0", "version: 0.0.9"))
    git(checkout, "commit", "--quiet", "--all", "--message", "Old citation")
    assert refusal(checkout) == "error: CITATION.cff has another version than 0.1.0"


def test_what_cannot_be_built_gets_no_tag(checkout: Path) -> None:
    """This checkout has no pyproject.toml."""
    assert "hatchling build" in refusal(checkout)
    assert not (checkout / ".git/refs/tags/v0.1.0").exists()
