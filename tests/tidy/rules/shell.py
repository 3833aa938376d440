"""Bash scripts are strict (set -euo pipefail) and clean under shellcheck, where it is installed."""

import json
import shutil
import subprocess

from tree import Violation


def _run(tree, command, path):
    return subprocess.run([*command, path], cwd=tree.root, text=True, capture_output=True,
                          check=False)


def check(tree):
    for path in tree.scripts("bash"):
        if not any(line.strip() == "set -euo pipefail" for line in tree.lines(path)):
            yield Violation(path, 1, "no `set -euo pipefail`")
        syntax = _run(tree, ["bash", "-n"], path)
        if syntax.returncode:
            yield Violation(path, 1, "bash can't read it: " + syntax.stderr.strip())
        elif shutil.which("shellcheck"):
            report = _run(tree, ["shellcheck", "--format=json", "--external-sources"], path)
            for entry in json.loads(report.stdout or "[]"):
                yield Violation(path, entry["line"], f"SC{entry['code']}: {entry['message']}")


def unavailable():
    """Why part of the rule can't be checked here, or None."""
    return None if shutil.which("shellcheck") else "shellcheck is not installed"
