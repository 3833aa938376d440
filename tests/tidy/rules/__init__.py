"""One rule a module: its docstring is the rule, check(tree) yields violations."""

import importlib
import pathlib


def all_rules():
    """Name to module, in alphabetical order."""
    names = sorted(p.stem for p in pathlib.Path(__file__).parent.glob("[a-z]*.py"))
    return {name: importlib.import_module(f"rules.{name}") for name in names}
