"""tests/regressions.md is true: each test that a row names is there."""

import fnmatch
import posixpath
import re

from tree import Violation

TABLE = "tests/regressions.md"


def _tests(tree):
    """All tests as ctest names them: Suite.Name, and e2e.name of scripts."""
    names = set()
    for path in tree.matching("_test.cc", "_test.cu", ".cc"):
        for suite, test in re.findall(r"^(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)",
                                      tree.text(path), re.MULTILINE):
            names.add(f"{suite}.{test}")
    for path in tree.matching("_test.py"):
        folder, name = posixpath.split(path)
        names.add(f"{posixpath.basename(folder)}.{name.removesuffix('_test.py')}")
    return names


def check(tree):
    if TABLE not in tree.files:
        return
    tests = _tests(tree)
    for number, line in enumerate(tree.lines(TABLE), 1):
        if not line.startswith("|"):
            continue
        for pattern in re.findall(r"`([\w*]+\.[\w*]+|\w+\*)`", line):
            if pattern.endswith((".md", ".h", ".cc")):
                continue
            wanted = pattern if "." in pattern else f"{pattern}.*"
            if not fnmatch.filter(tests, wanted):
                yield Violation(TABLE, number, f"no test is named {pattern}")
