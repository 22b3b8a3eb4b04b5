"""Keeps a directory of checkpoints for one run while it lives: writes the owner file, renews it, removes it.

    holding = Holding(directory, identify(os.environ), find_running=..., say=say)
    other = holding.begin()              # the living owner of another run, or None
    holding.end()

Everything is done in a thread: a file server that hangs delays nobody for more than ANSWER_S. How it is done, with what
every file system has, so that of several that begin at once exactly one gets it, and none that is killed locks it:

    nobody's      a draft is linked to owner.json: link(2) fails where there is one
    a dead one's  a draft is linked to owner.json.next; owner.json is read again; if it is still the dead one's, the one
                  is renamed to the other, which replaces it. Who is killed in between is itself a dead owner of
                  owner.json.next, which the next one removes in the same way.
    held          read and touched every RENEW_S; if it is another's by then, that is said, and looked at again

Where the owner file cannot be written (full disk, read-only, another user's), a run goes on without: it may only read.
The thread tries again every RENEW_S.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from allranks.state.saved.owner import (
    OWNER,
    RENEW_S,
    SILENT_S,
    Owner,
    OwnerFile,
    Ruling,
    describe,
    judge,
    patience_s,
    read,
    sees,
    to_bytes,
)
from allranks.state.saved.parts import Mount

NEXT = f"{OWNER}.next"
DRAFT = f".{OWNER}."
"""How the names of drafts begin."""
ANSWER_S = 10.0
"""How long the start of a run waits for a file system that does not answer."""
ASK_S = 30.0
"""How long SLURM may take to answer besides, and how long its answer counts."""
LOOK_S = 0.5
"""Between two looks at an owner that is to be seen alive or dead."""
SETTLED_S = 5.0
"""What takes milliseconds is over after this: one file in the place of another, a file that is half written."""
END_S = 2.0
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_SAID_BY_SAVES = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
"""Where nobody can write, nobody is in the way; a save says it."""


class Holding:
    """One directory, as one process holds it."""

    def __init__(
        self,
        directory: Path,
        me: Owner,
        *,
        find_running: Callable[[str], bool | None],
        say: Callable[[str], None],
        is_made: bool = True,
    ) -> None:
        """Touch nothing yet.

        Args:
            find_running: whether SLURM runs a job; None: it does not say. Called in the thread.
            say: takes lines for the user.
            is_made: whether the directory is made; else it is held as soon as it is there.
        """
        self._directory, self._me, self._is_made = directory, me, is_made
        self._find_running, self._say = find_running, say
        self._changed = threading.Condition()
        self._is_over = self._is_new = False
        self._mount = Mount(directory)
        self._ruling: Ruling | None = None
        """Of the last look. OWN: it is held; FREE: it cannot be held; None: there was none."""
        self._other: Owner | None = None
        self._busy_until_s = 0.0
        """Until when the thread may be busy before the file system is taken for one that hangs."""
        self._watched: tuple[object, float] | None = None
        """An owner file as it was seen, and since when it has not changed, by the monotonic clock."""
        self._asked: tuple[str, float, bool | None] | None = None
        self._told: set[object] = set()
        self.unmade = ""
        """Why the directory is not there: it cannot be made, however long one waits."""
        self._thread = threading.Thread(target=self._run, name="allranks-owner", daemon=True)

    def begin(self, check: Callable[[], object] = lambda: None) -> Owner | None:
        """Hold the directory from now on; return the living owner of another run, and hold nothing then.

        Args:
            check: called meanwhile; what it raises ends the wait.
        """
        self.begin_later()
        try:
            with self._changed:
                while self._ruling in (None, Ruling.UNSURE):
                    if time.monotonic() > self._busy_until_s:
                        self._say(f"{self._directory} does not answer; whether another run writes there is not known")
                        break
                    self._changed.wait(0.1)
                    check()
                if self._ruling is not Ruling.TAKEN:
                    return None
        except BaseException:
            self.end()
            raise
        self.end()
        return self._other

    def begin_later(self) -> None:
        """Hold it as soon as that can be, without a wait."""
        self._busy_until_s = time.monotonic() + ANSWER_S
        self._thread.start()

    def end(self) -> None:
        """Hold it no more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(END_S)

    # The thread

    def _run(self) -> None:
        while not self._is_over:
            try:
                ruling, other = self._look()
            except OSError as exc:
                ruling, other = self._look_only(exc)
            with self._changed:
                if self._ruling in (Ruling.OWN, Ruling.FREE) and ruling is Ruling.TAKEN and other is not None:
                    self._tell_loss(other)
                self._ruling, self._other = ruling, other
                self._busy_until_s = time.monotonic() + ANSWER_S
                self._changed.notify_all()
                if not self._is_over:
                    self._changed.wait(LOOK_S if ruling is Ruling.UNSURE else RENEW_S)
        with contextlib.suppress(OSError):
            self._let_go()

    def _look(self) -> tuple[Ruling, Owner | None]:
        """Take the directory if it can be had, renew it if it is held."""
        if self._mount.is_gone(self._directory / OWNER):
            self._tell("its file system is gone: was it unmounted?")
            return Ruling.FREE, None
        if self._is_made and self._ruling is None:
            self._is_new = not self._directory.exists()
            self._directory.mkdir(parents=True, exist_ok=True)
        elif not self._directory.is_dir():
            return Ruling.FREE, None
        found = read(self._directory)
        if self._is_mine(found):
            os.utime(self._directory / OWNER)
            return Ruling.OWN, None
        draft = self._directory / f"{DRAFT}{self._me.host}.{self._me.pid}.{threading.get_ident()}"
        draft.write_bytes(to_bytes(self._me))
        try:
            deadline_s = time.monotonic() + SETTLED_S
            while time.monotonic() < deadline_s:  # again each time that somebody else was faster
                os.utime(draft)
                ruling = self._rule(found, draft.stat().st_mtime_ns) if found is not None else Ruling.FREE
                is_held = ruling is Ruling.OWN and bool(self._me.agent_pid or self._is_mine(found))
                if is_held or ruling in (Ruling.TAKEN, Ruling.UNSURE):
                    return ruling, found.owner if found else None
                if self._replace(found, draft) if found else _publish(draft, self._directory / OWNER):
                    self._remove_drafts(draft)
                    return Ruling.OWN, None
                found = read(self._directory)
            return Ruling.UNSURE, None
        finally:
            draft.unlink(missing_ok=True)

    def _look_only(self, exc: OSError) -> tuple[Ruling, Owner | None]:
        """What can be told where no owner file can be written: whether somebody else certainly lives."""
        is_lasting = exc.errno in (*_SAID_BY_SAVES, errno.ENOENT)
        if self._is_made and is_lasting and not os.path.isdir(self._directory):  # noqa: PTH112 (raises nothing)
            self.unmade = exc.strerror or str(exc)
            return Ruling.FREE, None
        if exc.errno in _SAID_BY_SAVES:
            return Ruling.FREE, None
        with contextlib.suppress(OSError):
            found = read(self._directory)
            if found is not None and found.owner is not None and self._judge(found.owner, None) is Ruling.TAKEN:
                return Ruling.TAKEN, found.owner
        self._tell(f"no {OWNER} can be written ({exc.strerror or exc}), so another run there is not kept out")
        return Ruling.FREE, None

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._say(f"{self._directory}: {what}")

    def _rule(self, found: OwnerFile, now_ns: int) -> Ruling:
        """Decide about an owner file.

        Args:
            now_ns: the time that the file system has just given to another file.
        """
        now_s = time.monotonic()
        if self._watched is None or self._watched[0] != found:
            has_waited = self._watched is not None and self._ruling in (Ruling.UNSURE, Ruling.TAKEN)
            self._watched = found, now_s
            if has_waited and found.owner is not None and found.owner == self._other:
                return Ruling.TAKEN  # it was renewed
        unrenewed_s = max((now_ns - found.mtime_ns) / 1e9, now_s - self._watched[1])
        if found.owner is None:
            return Ruling.FREE if unrenewed_s > SETTLED_S else Ruling.UNSURE
        ruling = self._judge(found.owner, unrenewed_s)
        if ruling is Ruling.UNSURE and found.owner.process not in self._told:
            self._told.add(found.owner.process)
            left_s = max(1.0, patience_s(found.owner, self._me) - unrenewed_s)
            who = describe(found.owner)
            self._say(f"{self._directory}: waiting up to {left_s:.0f} s to see whether {who} still lives")
        return ruling

    def _judge(self, owner: Owner, unrenewed_s: float | None) -> Ruling:
        is_running = lambda: self._ask(owner.slurm_job)  # noqa: E731
        lives = sees(owner, self._me)
        return judge(owner, self._me, lives=lives, is_running=is_running, unrenewed_s=unrenewed_s)

    def _ask(self, slurm_job: str) -> bool | None:
        now_s = time.monotonic()
        if self._asked is None or self._asked[0] != slurm_job or now_s > self._asked[1] + ASK_S:
            self._busy_until_s = now_s + ASK_S
            self._asked = slurm_job, now_s, self._find_running(slurm_job)
        return self._asked[2]

    def _replace(self, dead: OwnerFile, draft: Path) -> bool:
        """Take the place of a dead owner; False: things have changed since it was looked at."""
        ours = self._directory / NEXT
        if not _publish(draft, ours):
            self._clear_next(draft)
            return False
        if read(self._directory) != dead:
            ours.unlink(missing_ok=True)
            return False
        with contextlib.suppress(FileNotFoundError):  # another one has taken this process for dead
            ours.rename(self._directory / OWNER)
        return self._is_mine(read(self._directory))

    def _clear_next(self, draft: Path) -> None:
        """Remove what somebody has left that was killed while it took the place of a dead owner."""
        path, aside = self._directory / NEXT, draft.with_name(f"{draft.name}.old")
        left = read(self._directory, NEXT)
        if left is None:
            return
        is_dead = left.owner is not None and sees(left.owner, self._me) is False
        if is_dead or (draft.stat().st_mtime_ns - left.mtime_ns) / 1e9 > SETTLED_S:
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
                if read(self._directory, aside.name) != left:  # another one has removed it, and begun itself
                    with contextlib.suppress(FileExistsError):
                        os.link(aside, path)
            aside.unlink(missing_ok=True)
        else:
            time.sleep(0.02)

    def _remove_drafts(self, own: Path) -> None:
        """Remove drafts that killed processes have left."""
        with contextlib.suppress(OSError):
            now_s = own.stat().st_mtime
            for path in self._directory.glob(f"{DRAFT}*"):
                if now_s - path.lstat().st_mtime > SILENT_S:
                    path.unlink(missing_ok=True)

    def _is_mine(self, found: OwnerFile | None) -> bool:
        return found is not None and found.owner is not None and found.owner.process == self._me.process

    def _tell_loss(self, other: Owner) -> None:
        if other.process not in self._told and not other.is_of_run(self._me):
            self._told.add(other.process)
            self._say(f"{self._directory} is {describe(other)}'s now; this run's checkpoints are refused there")

    def _let_go(self) -> None:
        found = read(self._directory)
        owner = found.owner if found else None
        if owner and owner.is_kin(self._me) and (self._is_mine(found) or sees(owner, self._me) is False):
            (self._directory / OWNER).unlink(missing_ok=True)
        if self._is_new:
            self._directory.rmdir()  # if it is still empty


def _publish(draft: Path, path: Path) -> bool:
    """Give a draft a name that nothing has yet; False: something has it."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        with contextlib.suppress(FileExistsError), path.open("xb") as file:  # without links, not whole at once
            file.write(draft.read_bytes())
            return True
        return False
    return True
