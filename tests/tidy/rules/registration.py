"""A test that nobody runs is worse than none: each *_test.cc stands in a muond_test, each script in
tests/e2e in its CMakeLists.txt (or in a script that does)."""

import posixpath
import re

from tree import Violation


def _cmake_names(tree, folder):
    """Words of the muond_test and add_test calls that can mean files of `folder`."""
    names = set()
    while True:
        path = posixpath.join(folder, "CMakeLists.txt")
        if path in tree.files:
            text = re.sub(r"#[^\n]*", "", tree.text(path))
            for call in re.finditer(r"\b(?:\w*_test|add_test|foreach)\s*\(([^)]*)\)", text):
                for word in re.split(r"[\s\"]+", call[1]):
                    word = re.sub(r"\$\{\w+\}/", "", word)
                    names.add(posixpath.normpath(posixpath.join(folder, word)))
        if not folder:
            return names
        folder = posixpath.dirname(folder)


def _check_script(tree, path):
    folder, name = posixpath.split(path)
    cmake = posixpath.join(folder, "CMakeLists.txt")
    others = [p for p in tree.files if p.startswith(folder + "/") and p != path]
    stem = name.removesuffix(".py")
    for other in others:
        word = stem if other.endswith(".py") else name
        if re.search(rf"\b{re.escape(word)}\b", tree.text(other)):
            return
    yield Violation(path, 1, f"not registered in {cmake}")


def check(tree):
    for path in tree.files:
        if re.search(r"_test\.(cc|cu)$", path):
            if not re.search(r"^(TYPED_)?TEST(_[FP])?\(", tree.text(path), re.MULTILINE):
                yield Violation(path, 1, "no test in it")
            if path not in _cmake_names(tree, posixpath.dirname(path)):
                yield Violation(path, 1, "not registered: name it in a muond_test")
        elif re.match(r"tests/e2e/.*\.(sh|py)$", path):
            yield from _check_script(tree, path)
