"""No notes to self: what is open is said in the documents, where a reader looks for it."""

import re

from tree import Violation

_MARKER = re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X|HA[C]K)\b")


def check(tree):
    for path in tree.files:
        for number, line in enumerate(tree.lines(path), 1):
            match = _MARKER.search(line)
            if match:
                yield Violation(path, number, f"a note to self: {match[0]}")
