"""Lines have at most 100 columns, no tabs and no spaces at the end; files end with a newline."""

from tree import Violation

COLUMNS = 100
SOURCES = (".cc", ".h", ".cu", ".cuh", ".py", ".sh", ".proto", ".cmake", "CMakeLists.txt")


def check(tree):
    scripts = tree.scripts("bash") + tree.scripts("python")
    for path in sorted(set(tree.matching(*SOURCES) + scripts)):
        for number, line in enumerate(tree.lines(path), 1):
            if len(line) > COLUMNS:
                yield Violation(path, number, f"{len(line)} columns, at most {COLUMNS}")
            if "\t" in line:
                yield Violation(path, number, "a tab")
            if line != line.rstrip():
                yield Violation(path, number, "spaces at the end of the line")
        text = tree.text(path)
        if text and not text.endswith("\n"):
            yield Violation(path, len(tree.lines(path)), "no newline at the end of the file")
