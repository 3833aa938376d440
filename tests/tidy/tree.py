"""The files that tidy rules look at, read once.

A rule is a module in rules/ with a docstring, and check(tree) that yields violations.
"""

import dataclasses
import pathlib
import re

# Not ours (build output), or wrong on purpose (the bad examples).
SKIPPED = ("build", "out", ".git", ".cache", "tests/tidy/bad", "tests/tidy/good",
           "__pycache__")


@dataclasses.dataclass(frozen=True, order=True)
class Violation:
    path: str
    line: int
    message: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.message}"


class Tree:
    """A folder of sources; paths are strings relative to it, with forward slashes."""

    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.files = sorted(self._walk(self.root))
        self._texts = {}

    def _walk(self, folder):
        for entry in sorted(folder.iterdir()):
            name = entry.relative_to(self.root).as_posix()
            if name in SKIPPED or entry.name in SKIPPED[2:4] or entry.name == "__pycache__":
                continue
            if entry.is_dir() and not entry.is_symlink():
                yield from self._walk(entry)
            elif entry.is_file():
                yield name

    def text(self, path):
        """The file's text; the empty string for what is not text."""
        if path not in self._texts:
            data = (self.root / path).read_bytes()
            try:
                self._texts[path] = data.decode("utf-8") if b"\0" not in data else ""
            except UnicodeDecodeError:
                self._texts[path] = ""
        return self._texts[path]

    def lines(self, path):
        return self.text(path).splitlines()

    def matching(self, *suffixes):
        return [path for path in self.files if path.endswith(suffixes)]

    def scripts(self, interpreter):
        """Files that start with a #! line naming `interpreter`, or have its suffix."""
        suffix = {"bash": ".sh", "python": ".py"}[interpreter]
        first = re.compile(rf"#!.*\b{interpreter}")
        return [
            path
            for path in self.files
            if path.endswith(suffix) or ("." not in path.split("/")[-1].lstrip(".") and
                                         first.match(self.text(path)[:80]))
        ]


def cmake_files(tree):
    return [p for p in tree.files if p.endswith(("CMakeLists.txt", ".cmake"))]
