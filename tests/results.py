"""Reads a ctest JUnit report: prints "passed failed skipped", and names skipped tests on stderr.

A test whose program is missing was meant to run: it counts as failed.

usage: results.py REPORT.xml
"""

import re
import sys
import xml.etree.ElementTree


def reason(case):
    """Why a test was skipped: GoogleTest's message where there is one, else ctest's."""
    output = case.findtext("system-out", "")
    said = re.search(r": Skipped\n(.+)", output)
    if said:
        return said[1].strip()
    last = output.strip().splitlines()[-1:] or [""]
    skipped = case.find("skipped")
    return last[0] or (skipped.get("message", "") if skipped is not None else "")


def main():
    passed = failed = skipped = 0
    for case in xml.etree.ElementTree.parse(sys.argv[1]).getroot().iter("testcase"):
        why = reason(case)
        if case.get("status") == "run":
            passed += 1
        elif case.get("status") == "fail":
            failed += 1
        elif why.startswith("Unable to find executable"):
            failed += 1
            print(f"NOT BUILT {case.get('name')}", file=sys.stderr)
        else:
            skipped += 1
            print(f"SKIPPED {case.get('name')}: {why}", file=sys.stderr)
    print(passed, failed, skipped)


if __name__ == "__main__":
    main()
