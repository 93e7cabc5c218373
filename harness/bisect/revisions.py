"""Versions of the code as an axis: a revision of this repository becomes a folder of its own to run from.

[Note: Nothing of the user's is touched] Files are written through a separate index. The user's index, branches, stashes
and files do not change; contents only in the working tree become loose objects, as by `git stash create`.

`<root>/.code/<tree>/files` is the version, read-only, named by its git tree, so that equal versions are one.
`<root>/.code/<tree>/runs/<words>` is a store for each request: runs of two versions may have one name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.config.errors import refuse
from harness.store.errors import StoreError
from harness.store.provenance import OF_ANOTHER, PACKAGE


class GitError(StoreError):
    """Message of git."""


WORKTREE = "WORKTREE"
FOLDER = ".code"
SHORT = 7
LISTED = 8
FIELDS = "%H%x09%T"


@dataclass(frozen=True)
class Version:
    """One version of the code.

    asked: revision as typed. commit: 40 digits; the base of WORKTREE. tree: git tree.
    """

    asked: str
    commit: str
    tree: str

    @property
    def label(self) -> str:
        """`main (1a2b3c4)`, or the commit alone."""
        if self.asked == WORKTREE:
            return f"{WORKTREE} (on {self.commit[:SHORT]})"
        return self.word if self.commit.startswith(self.asked) else f"{self.asked} ({self.commit[:SHORT]})"

    @property
    def word(self) -> str:
        return WORKTREE if self.asked == WORKTREE else self.commit[:SHORT]


class Repository:
    def __init__(self, top: Path, cache: Path) -> None:
        """top: the checkout. cache: `<root>/.code`, made at the first write."""
        self.top, self.cache = top, cache

    @classmethod
    def own(cls, root: Path | str) -> Repository:
        """Repository of the running code, with versions cached under the store's `root`.

        Raises `BadRequest`: none (a wheel), or Python could not import a version from there.
        """
        home = PACKAGE.parent
        cache = Path(root).expanduser().absolute() / FOLDER
        if os.pathsep in str(cache):
            problem = f"holds {os.pathsep} , which ends an entry of PYTHONPATH, by which a version finds its own files"
            raise refuse(f"--root {root}", problem, fix="a folder without")
        try:
            top, why = cls(home, cache)._git("rev-parse", "--show-toplevel").strip(), ""
        except GitError as error:
            top, why = "", f" ({error})"
        if not top or Path(top).resolve() != home.resolve():
            fix = "git clone the project, pip install -e . there, and ask from inside the clone"
            raise refuse(f"the code in {home}", f"is no git checkout of its own: it has one version{why}", fix=fix)
        return cls(home, cache)

    def version(self, revision: str) -> Version:
        """Raises `BadRequest`: git knows no such commit."""
        if revision == WORKTREE:
            return self._worktree()
        commit = self._commit(revision) or self._commit(f"origin/{revision}")  # a clone has its own branch alone
        if not commit:
            names = self._git("for-each-ref", "--format=%(refname:short)", "--sort=-committerdate", "refs/heads")
            heads = names.split()
            branches = ", ".join(heads[:LISTED]) + (", ..." if len(heads) > LISTED else "")
            choices = f"a commit, a tag, or a branch ({branches or 'none'}); {WORKTREE} for the files as they are"
            fix = "git log --oneline; git fetch --unshallow where a clone has no history"
            raise refuse(repr(revision), "is no commit of this repository", choices=choices, fix=fix)
        return self._described(revision, commit)

    def _commit(self, revision: str) -> str:
        try:
            return self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
        except GitError:
            return ""

    def _described(self, asked: str, commit: str) -> Version:
        line = self._git("rev-list", "--max-count=1", f"--format={FIELDS}", commit).splitlines()[-1]
        return Version(asked, *line.split("\t"))

    def _worktree(self) -> Version:
        head = self._described(WORKTREE, self._git("rev-parse", "HEAD").strip())
        inside = self.cache.parent.is_relative_to(self.top) and self.cache.parent != self.top
        hidden = [f"--exclude=/{self.cache.parent.relative_to(self.top)}/"] if inside else []
        with self._own_index() as index:
            self._git("read-tree", "HEAD", variables=index)
            self._git("add", "--update", variables=index)
            new = self._git("ls-files", "-z", "--others", "--exclude-standard", *hidden, variables=index)
            self._git("update-index", "-z", "--add", "--stdin", variables=index, given=new)
            tree = self._git("write-tree", variables=index).strip()
        return Version(WORKTREE, head.commit, tree)

    def is_dirty(self) -> bool:
        return bool(self._git("status", "--porcelain", "--untracked-files=no").strip())

    def parents(self, version: Version) -> list[str]:
        return [each[:SHORT] for each in self._git("rev-parse", f"{version.commit}^@").split()]

    def files(self, version: Version) -> Path:
        """Folder of a version's files, created atomically and reused.

        Raises `BadRequest` (git cannot write them) and `OSError` (the store cannot be written).
        """
        target = self.folder(version) / "files"
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".files.{secrets.token_hex(6)}.tmp")
        try:
            with self._own_index() as index:
                self._git("read-tree", version.tree, variables=index)
                self._git("checkout-index", "--all", f"--prefix={draft}/", variables=index)
            _protect(draft)
            os.rename(draft, target)
        except OSError:
            if not target.is_dir():  # else another request was faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target

    def folder(self, version: Version) -> Path:
        return self.cache / version.tree[:16]

    @contextlib.contextmanager
    def _own_index(self) -> Iterator[dict[str, str]]:
        self.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache, prefix=".index.") as folder:
            yield {"GIT_INDEX_FILE": str(Path(folder) / "index")}

    def _git(self, *arguments: str, variables: Mapping[str, str] | None = None, given: str = "") -> str:
        outer = {name: value for name, value in os.environ.items() if name not in OF_ANOTHER}
        command = ["git", "--no-optional-locks", "-C", str(self.top), *arguments]
        try:
            done = subprocess.run(
                command,
                env=outer | {"LC_ALL": "C"} | dict(variables or {}),
                input=given.encode(errors="surrogateescape"),
                capture_output=True,
                check=False,
            )
        except OSError as error:
            raise GitError(f"git cannot be started: {error.strerror}") from error
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise GitError(lines[-1] if lines else f"git {arguments[0]} ended with {done.returncode}")
        return done.stdout.decode(errors="surrogateescape")


def _protect(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
