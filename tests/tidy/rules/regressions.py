"""Public faults that must not happen here each have a test of their name: every fault listed in
tests/public_faults.txt has a row in tests/regressions.md, every row names tests that exist, and
every test that carries an issue's name stands in a row."""

import fnmatch
import re

from tree import Violation

MAP = "tests/regressions.md"
WANTED = "tests/public_faults.txt"


def _scripts(tree):
    """"e2e.name" of each test in Python, as ctest names it."""
    return [f"{path.split('/')[-2]}.{path.split('/')[-1].removesuffix('_test.py')}"
            for path in tree.matching("_test.py")]


def _tests(tree):
    """(path, line, "Suite.Name") of each gtest test."""
    for path in tree.files:
        if not re.search(r"_test\.(cc|cu)$", path):
            continue
        for match in re.finditer(r"^TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", tree.text(path), re.M):
            yield path, tree.text(path).count("\n", 0, match.start()) + 1, ".".join(match.groups())


def _issues(cell):
    """"DeepSpeed #1, #2; dion #3" names three; what has no number is a name."""
    issues, project = [], ""
    for item in re.split(r"[,;] ", cell):
        name, numbered, number = item.rpartition("#")
        project = name.strip() or project
        issues.append(f"{project} #{number}" if numbered else item)
    return issues + [cell]


def _rows(tree):
    """(line, issues, patterns) of each row."""
    for number, line in enumerate(tree.lines(MAP), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and "`" in cells[2]:
            # Not the prefix of an instantiation, nor files that are mentioned.
            yield number, _issues(cells[0]), [
                glob.rpartition("/")[2] for glob in re.findall(r"`([^`]+)`", cells[2])
                if not re.search(r"\.(h|cc|md)$", glob)]


def check(tree):
    if MAP not in tree.files:
        return
    tests = list(_tests(tree))
    names = [name for _, _, name in tests] + _scripts(tree)
    issues, patterns = set(), []
    for number, named, globs in _rows(tree):
        issues.update(named)
        patterns += globs
        for glob in globs:
            if not any(fnmatch.fnmatchcase(name, glob) for name in names):
                yield Violation(MAP, number, f"no test matches {glob}")
    for number, line in enumerate(tree.lines(WANTED), 1):
        fault = line.strip()
        if fault and not fault.startswith("#") and fault not in issues:
            yield Violation(WANTED, number, f"{fault} has no row in {MAP}")
    for path, number, name in tests:
        if not re.match(r"[A-Z]\w*?[a-zA-Z]\d{1,8}_[A-Z]", name.split(".")[1]):
            continue
        if not any(fnmatch.fnmatchcase(name, glob) for glob in patterns):
            yield Violation(path, number, f"{name} has no row in {MAP}")
