"""The project speaks only of itself: no paths of the machine it was written on, no folders outside
of it, no hosts of package registries."""

import re

from tree import Violation

# Written so that no pattern matches its own source.
FORBIDDEN = {
    r"(?<![\w.$}])/work[/]": "a path of somebody's machine",
    r"(?<![\w.$}])/root[/]": "a path of somebody's machine",
    r"(?<![\w.$}])/home[/]\w": "a path of somebody's machine",
    r"[.][.]/shared\b": "a folder outside of the repository",
    r"\b(?:deb|security|snapshot)[.]debian[.]org\b": "the host of a package registry",
    r"\bpypi[.]org\b|\bpythonhosted[.]org\b": "the host of a package registry",
    r"\bregistry[.]npmjs[.]org\b|\bproxy[.]golang[.]org\b": "the host of a package registry",
}


def check(tree):
    patterns = [(re.compile(pattern), why) for pattern, why in FORBIDDEN.items()]
    for path in tree.files:
        for number, line in enumerate(tree.lines(path), 1):
            for pattern, why in patterns:
                match = pattern.search(line)
                if match:
                    yield Violation(path, number, f"{why}: {match[0]}")
