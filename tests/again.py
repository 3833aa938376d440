"""Which failed tests get a second try, alone: those of whole processes and services, on which the
load of a small machine tells; none that a sanitizer has spoken about, which was right the first
time. Prints their numbers for `ctest -I 0,0,0,...`, or nothing.

usage: again.py BUILD_FOLDER REPORT.xml
"""

import json
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree

LABELS = {"cluster", "e2e"}
SANITIZER = re.compile(r"(Address|Thread|Leak|UndefinedBehavior)Sanitizer|runtime error:")


def labels(test):
    for one in test["properties"]:
        if one["name"] == "LABELS":
            return set(one["value"])
    return set()


def numbers(listing, outputs, failed):
    """`listing`: ctest's tests in order; `outputs`: by name, of the run; `failed`: names."""
    return [number for number, test in enumerate(listing, 1)
            if test["name"] in failed and labels(test) & LABELS
            and not SANITIZER.search(outputs.get(test["name"], ""))]


def main():
    build, report = pathlib.Path(sys.argv[1]), sys.argv[2]
    log = build / "Testing" / "Temporary" / "LastTestsFailed.log"
    if not log.exists():
        return
    # Its numbers are of the tests that the run chose from; names are the same everywhere.
    failed = {line.split(":", 1)[1] for line in log.read_text().splitlines() if line}
    listing = json.loads(subprocess.run(
        ["ctest", "--test-dir", build, "--show-only=json-v1"], capture_output=True, check=True,
        text=True).stdout)["tests"]
    outputs = {case.get("name"): case.findtext("system-out", "")
               for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase")}
    print(",".join(str(number) for number in numbers(listing, outputs, failed)))


if __name__ == "__main__":
    main()
