"""Build a release, check it, and tag it. Nothing is uploaded.

    python packaging/release.py --dry-run      # everything but the tag
    python packaging/release.py                # then: git push --tags, twine upload dist/*

The checkout must be clean, CHANGELOG.md must have a section with a date for the version in src/allranks/__init__.py
(`## 0.1.0, 2026-12-01`), and the version must not be tagged yet. The wheel is built from the unpacked source
distribution, so a file that is missing there is noticed here. Needs `pip install --group release`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path


class Refused(Exception):
    """The checkout cannot be released as it is."""


def main() -> None:
    """Build, check, tag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="build and check, but set no tag")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout (default: this one)")
    options = parser.parse_args()
    try:
        release(options.root, is_dry_run=options.dry_run)
    except Refused as exc:
        sys.exit(f"error: {exc}")


def release(root: Path, *, is_dry_run: bool) -> None:
    """Release a checkout.

    Raises:
        Refused: something is not ready, or a step failed.
    """
    version = read_version(root)
    check_checkout(root, version)
    dist = root / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    built = build(root, dist)
    run(root, sys.executable, "-m", "twine", "check", "--strict", *map(str, built))
    print("built and checked:", *(path.name for path in built))
    if is_dry_run:
        print(f"dry run: no tag; without --dry-run it is v{version}")
        return
    run(root, "git", "tag", "--annotate", f"v{version}", "--message", f"allranks {version}")
    print(f"tagged v{version}; to publish: git push origin v{version}; twine upload dist/*")


def read_version(root: Path) -> str:
    """Return the version of the package."""
    found = re.search(r'^__version__ = "([^"]+)"$', (root / "src/allranks/__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise Refused("src/allranks/__init__.py has no __version__")
    return found[1]


def check_checkout(root: Path, version: str) -> None:
    """Refuse a checkout that is not what would be tagged."""
    if changed := run(root, "git", "status", "--porcelain"):
        raise Refused(f"the checkout has changes; commit them first:\n{changed.rstrip()}")
    if run(root, "git", "tag", "--list", f"v{version}"):
        raise Refused(f"v{version} is tagged already; raise __version__ in src/allranks/__init__.py")
    heading = rf"^## {re.escape(version)}, [0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}$"
    if not re.search(heading, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise Refused(f"CHANGELOG.md has no section with a date for {version}: expected '## {version}, YYYY-MM-DD'")
    citation = root / "CITATION.cff"
    if f"\nversion: {version}\n" not in citation.read_text():
        raise Refused(f"CITATION.cff has another version than {version}")


def build(root: Path, dist: Path) -> list[Path]:
    """Build the source distribution, and the wheel from what it contains."""
    hatchling = (sys.executable, "-m", "hatchling", "build", "--directory", str(dist))
    run(root, *hatchling, "--target", "sdist")
    (sdist,) = dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        run(next(Path(folder).iterdir()), *hatchling, "--target", "wheel")
    (wheel,) = dist.glob("*.whl")
    return [sdist, wheel]


def run(where: Path, *command: str) -> str:
    """Return what a command prints.

    Raises:
        Refused: it failed.
    """
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"{' '.join(command)} ended with code {done.returncode}:\n{(done.stdout + done.stderr).rstrip()}")
    return done.stdout


if __name__ == "__main__":
    main()
