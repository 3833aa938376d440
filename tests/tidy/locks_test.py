#!/usr/bin/python3
"""Clang's analysis must find each fault that is planted in planted_lock_fault.cc, and no other."""

import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE / "planted_lock_fault.cc"


def main():
    clang = shutil.which("clang++")
    if clang is None:
        print("NO clang++ HERE: whether it finds planted faults is not tested")
        return 77
    result = subprocess.run(
        [clang, "-std=c++20", "-fsyntax-only", "-Wthread-safety", "-Werror=thread-safety",
         "-fno-caret-diagnostics", "-I", str(HERE.parents[1]), str(SOURCE)],
        capture_output=True, text=True)
    found = {int(line) for line in re.findall(r"cc:(\d+):\d+: error: ", result.stderr)}
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    planted = {number for number, line in enumerate(lines, 1) if line.endswith("// FAULT")}
    for number in sorted(planted - found):
        print(f"{SOURCE.name}:{number}: not found: {lines[number - 1].strip()}")
    for number in sorted(found - planted):
        print(f"{SOURCE.name}:{number}: a false alarm: {lines[number - 1].strip()}")
    if found != planted or result.returncode == 0:
        print(result.stderr)
        return 1
    print(f"{len(planted)} planted faults found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
