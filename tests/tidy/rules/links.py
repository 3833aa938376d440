"""Relative links in Markdown lead to a file of the repository, and their anchors to a heading."""

import posixpath
import re

from tree import Violation

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|<img[^>]*\bsrc=\"([^\"]+)\"")
_FENCE = re.compile(r"^\s*(```|~~~)")


def _prose(lines):
    """(number, line) outside of code fences, inline code removed."""
    fenced = False
    for number, line in enumerate(lines, 1):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "", line)


def _anchors(lines):
    anchors, fenced = set(), False
    for line in lines:
        if _FENCE.match(line):
            fenced = not fenced
        heading = re.match(r"#+\s+(.*?)\s*$", line)
        if heading and not fenced:
            slug = re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
            anchors.add(slug)
    return anchors


def check(tree):
    folders = {posixpath.dirname(p) for p in tree.files}
    folders |= {posixpath.dirname(f) for f in folders}
    for path in tree.matching(".md"):
        for number, line in _prose(tree.lines(path)):
            for match in _LINK.finditer(line):
                link = match[1] or match[2]
                if re.match(r"[a-z][a-z+.-]*:", link):
                    continue
                file, _, anchor = link.partition("#")
                target = path
                if file:
                    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
                if target not in tree.files and target not in folders:
                    yield Violation(path, number, f"broken link: {link}")
                elif anchor and target.endswith(".md") and anchor not in _anchors(
                        tree.lines(target)):
                    yield Violation(path, number, f"no such heading: {link}")
