"""Each header starts with a comment that says what it knows, then has #pragma once."""

from tree import Violation


def check(tree):
    for path in tree.matching(".h", ".cuh"):
        lines = tree.lines(path)
        if not lines or not lines[0].startswith("// "):
            yield Violation(path, 1, "the first line is no comment that says what the file knows")
        code = [(n, line) for n, line in enumerate(lines, 1)
                if line.strip() and not line.startswith("//")]
        if not code or code[0][1] != "#pragma once":
            line = code[0][0] if code else 1
            yield Violation(path, line, "#pragma once is not the first line of code")
