#!/usr/bin/python3
"""Holds the tree against the project's habits: one rule a module in rules/.

tidy.py              checks the whole repository
tidy.py RULE ...     checks those rules only
tidy.py --list       what the rules are
tidy.py --self-test  proves that each rule catches its bad example and passes the good one
"""

import argparse
import pathlib
import sys

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from rules import all_rules  # noqa: E402
from selftest import self_test  # noqa: E402
from tree import Tree  # noqa: E402


def check_tree(rules, root):
    """Prints every violation; returns how many there are."""
    tree = Tree(root)
    total = 0
    for name, rule in rules.items():
        why = getattr(rule, "unavailable", lambda: None)()
        if why:
            print(f"tidy: {name}: CHECKED IN PART ONLY: {why}")
        for violation in sorted(set(rule.check(tree))):
            print(f"{violation} [{name}]")
            total += 1
    print(f"tidy: {len(tree.files)} files, {len(rules)} rules, {total} violations")
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", metavar="RULE")
    parser.add_argument("--root", default=HERE.parent.parent, help="tree to check")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()

    rules = all_rules()
    unknown = [name for name in arguments.rules if name not in rules]
    if unknown:
        parser.error(f"no such rule: {', '.join(unknown)}")
    if arguments.rules:
        rules = {name: rules[name] for name in arguments.rules}
    if arguments.list:
        for name, rule in rules.items():
            print(f"{name:16} {' '.join(rule.__doc__.split())}")
        return 0
    if arguments.self_test:
        return 1 if self_test(rules, HERE) else 0
    return 1 if check_tree(rules, arguments.root) else 0


if __name__ == "__main__":
    sys.exit(main())
