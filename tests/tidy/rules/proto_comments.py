"""Each field of a message has a comment, before it or at its end: meaning, unit or invariant."""

import re

from tree import Violation

_FIELD = re.compile(
    r"^\s*(?:repeated |optional |map<[^>]*>\s*)?[\w.]*\s*(\w+)\s*=\s*\d+\s*(\[.*\])?;")


def check(tree):
    for path in tree.matching(".proto"):
        inside = []  # kinds of the open blocks
        previous = ""
        for number, line in enumerate(tree.lines(path), 1):
            code = line.split("//")[0]
            opening = re.match(r"\s*(message|enum|service|oneof|extend|rpc)\b", code)
            field = _FIELD.match(code)
            if field and inside and inside[-1] in ("message", "oneof"):
                if "//" not in line and not previous.strip().startswith("//"):
                    yield Violation(path, number, f'field "{field[1]}" has no comment')
            for char in code:
                if char == "{":
                    inside.append(opening[1] if opening else "other")
                elif char == "}" and inside:
                    inside.pop()
            previous = line
