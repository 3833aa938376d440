"""A rule that can't fail proves nothing: each must catch its bad example, line by line.

bad/<rule>/ is a small tree with the file `expected`: "path:line" of each violation; nothing else
may be found. good/ is a small tree that every rule passes. In the examples "@{}" stands for nothing
(so that an example of a forbidden word is not itself one), "@{N times}" repeats the rest of its
line.
"""

import pathlib
import re
import shutil
import tempfile

from tree import Tree


def _expand(text):
    def repeat(match):
        return (match[2] + "\n") * int(match[1])

    text = re.sub(r"^@\{(\d+) times\}(.*)\n", repeat, text, flags=re.MULTILINE)
    return text.replace("@{}", "")


def _materialize(example, folder):
    shutil.copytree(example, folder, dirs_exist_ok=True)
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file():
            path.write_text(_expand(path.read_text(encoding="utf-8")), encoding="utf-8")
    expected = pathlib.Path(folder) / "expected"
    lines = expected.read_text(encoding="utf-8").split() if expected.exists() else []
    expected.unlink(missing_ok=True)
    return sorted(lines)


def _places(rule, folder):
    return sorted({f"{v.path}:{v.line}" for v in rule.check(Tree(folder))})


def _check_example(name, rule, example):
    """Prints what is wrong; true when the rule finds exactly what the example expects."""
    with tempfile.TemporaryDirectory() as folder:
        expected = _materialize(example, folder)
        found = _places(rule, folder)
    for place in sorted(set(expected) - set(found)):
        print(f"self-test: {name}: missed {place} of {example.name}")
    for place in sorted(set(found) - set(expected)):
        print(f"self-test: {name}: false alarm at {place} of {example.name}")
    return expected == found


def self_test(rules, here):
    """Returns the number of rules that fail their examples."""
    failed = 0
    for name, rule in rules.items():
        bad = here / "bad" / name
        if not (bad / "expected").exists():
            print(f"self-test: {name}: no bad example in {bad.relative_to(here)}")
            failed += 1
            continue
        good = _check_example(name, rule, here / "good")
        caught = _check_example(name, rule, bad)
        failed += not (good and caught)
    print(f"tidy self-test: {len(rules) - failed} of {len(rules)} rules hold")
    return failed
