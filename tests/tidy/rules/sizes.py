"""Files have at most 400 lines, functions at most 70 (100 in .cu): else they have two jobs."""

import ast

from cpp import functions
from tree import Violation

FILE_LINES = 400
FUNCTION_LINES = {".cc": 70, ".h": 70, ".cu": 100, ".cuh": 100}
SOURCES = (".cc", ".h", ".cu", ".cuh", ".py", ".sh", ".proto", ".cmake", "CMakeLists.txt")


def _python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.end_lineno, node.name


def check(tree):
    scripts = tree.scripts("bash") + tree.scripts("python")
    for path in sorted(set(tree.matching(*SOURCES) + scripts)):
        count = len(tree.lines(path))
        if count > FILE_LINES:
            yield Violation(path, FILE_LINES + 1, f"{count} lines, at most {FILE_LINES}")
        limit, found = 70, ()
        if path.endswith(tuple(FUNCTION_LINES)):
            limit = FUNCTION_LINES["." + path.rsplit(".", 1)[1]]
            found = functions(tree.text(path))
        elif path in tree.scripts("python"):
            found = _python_functions(tree.text(path))
        for first, last, name in found:
            if last - first + 1 > limit:
                count = last - first + 1
                yield Violation(path, first, f"{name} has {count} lines, at most {limit}")
