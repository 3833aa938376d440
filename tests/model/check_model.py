#!/usr/bin/env python3
"""Checks step.pml with spin, exhaustively within the bounds that its configurations state.

usage: check_model.py [--mutants] [--only WORD]

Without options the model itself: no claim may fail. With --mutants the model with one rule taken
out, each in turn: a claim must fail. Prints a line for each; exit status 77 where spin is missing.
"""

import argparse
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

MODEL = pathlib.Path(__file__).resolve().parent / "step.pml"
SKIPPED = 77
MEMORY_MIB = 1900
SECONDS = 600  # for one search
DEPTH = 10000  # far above the longest run; a search that gets there fails

# Defines of the model, as its head comment names them. Together: two and three daemons, up to three
# steps and three attempts to raise the generation, a daemon that loses its state.
CONFIGURATIONS = (
    "D=2 STEPS=3 COORDINATORS=2",
    "D=2 STEPS=2 COORDINATORS=3 NO_OVERFLOW",
    "D=2 STEPS=1 COORDINATORS=3 TERMS",
    "D=2 STEPS=2 COORDINATORS=2 TERMS CRASHES=1",
    "D=3 STEPS=3 COORDINATORS=0",
    "D=3 STEPS=2 COORDINATORS=1",
    "D=3 STEPS=2 COORDINATORS=1 NO_OVERFLOW CRASHES=1",
    "D=3 STEPS=2 COORDINATORS=2 NO_OVERFLOW",
    "D=2 STEPS=2 COORDINATORS=2 REINIT",
    "D=2 STEPS=1 COORDINATORS=3 REINIT NO_OVERFLOW",
    "D=3 STEPS=1 COORDINATORS=2 REINIT NO_OVERFLOW",
    "LIVE D=2 STEPS=3 COORDINATORS=0",
    "LIVE D=2 STEPS=2 COORDINATORS=2",
    "LIVE D=3 STEPS=3 COORDINATORS=0",
    "LIVE D=3 STEPS=2 COORDINATORS=1",
)
# In this one every event of the model must happen, or its claims say less than they seem to.
COMPLETE = "D=2 STEPS=3 COORDINATORS=2"

MUTANTS = (
    "BUG_LOCAL_VERDICT D=2 COORDINATORS=0",
    "BUG_MISSING_VOTE D=2 COORDINATORS=0",
    "BUG_APPLY_TWICE D=2 COORDINATORS=0",
    "BUG_NO_TERMS_CHECK D=2 COORDINATORS=0 TERMS",
    "BUG_NO_GENERATION_CHECK D=2 COORDINATORS=1",
    "BUG_VOTE_AFTER_PROMISE D=2 COORDINATORS=1",
    "BUG_NO_SETTLE D=2 COORDINATORS=1",
    "BUG_RAISE_STOPS_COMMIT D=2 COORDINATORS=1",
    "BUG_KEEP_EARLY_VOTES D=2 COORDINATORS=1",
    "BUG_PROMISE_FORGETS D=2 COORDINATORS=2",
    "BUG_MIXED_LINEAGES D=2 COORDINATORS=2 REINIT",
    "BUG_RAISE_BELOW_PROMISE D=2 COORDINATORS=2",
    "BUG_NO_PASSING_ON LIVE D=2 COORDINATORS=0",
    "BUG_NOBODY_STARTS_OVER LIVE D=2 COORDINATORS=1",
)


class Failure(Exception):
    """The check could not be carried out, or did not say what it must."""


@dataclasses.dataclass(frozen=True)
class Search:
    """What pan found."""
    errors: int
    states: int
    depth: int
    seconds: float
    claim: str        # the first that failed, as pan writes it
    unreached: tuple  # statements


def run(folder, *command):
    try:
        done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Failure(f"{command[0]}: no end within {SECONDS} s") from None
    # pan's exit status says nothing: its output does.
    if done.returncode != 0 and not command[0].endswith("pan"):
        raise Failure(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def build(folder, configuration):
    defines = [f"-D{word}" for word in configuration.split()]
    said = run(folder, "spin", "-a", *defines, str(MODEL))
    if re.search(r"error|warning", said, re.IGNORECASE):
        raise Failure(f"spin: {said}")
    # All of the model is shared variables: partial order reduction has nothing to reduce.
    kind = [] if "LIVE" in configuration.split() else ["-DSAFETY"]
    run(folder, "gcc", "-O2", "-w", "-DNOREDUCE", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}", *kind,
        "-o", "pan", "pan.c")


def number(pattern, text):
    found = re.search(pattern, text)
    if not found:
        raise Failure(f"pan did not say \"{pattern}\":\n{text}")
    return int(found[1])


def search(configuration):
    """The outcome of an exhaustive search; Failure when it was none."""
    live = "LIVE" in configuration.split()
    with tempfile.TemporaryDirectory(prefix="step-model-") as folder:
        build(folder, configuration)
        start = time.monotonic()
        said = run(folder, "./pan", f"-m{DEPTH}", *(["-a", "-N", "progress"] if live else []))
        seconds = time.monotonic() - start
    errors = number(r"errors: (\d+)", said)
    if errors == 0:
        for phrase in ("Search not completed", "search depth too small", "out of memory"):
            if phrase in said:
                raise Failure(f"pan: {phrase}: raise the bound or make the model smaller\n{said}")
        if live and "never claim" not in said:
            raise Failure(f"pan did not check the claim of progress\n{said}")
    claim = re.search(r"^pan:\d+: (.+) \(at depth", said, re.MULTILINE)
    unreached = tuple(line for line in re.findall(r"^\t(.+, state \d+, .+)$", said, re.MULTILINE)
                      if '"-end-"' not in line)
    return Search(errors, number(r"(\d+) states, stored", said),
                  number(r"depth reached (\d+)", said), seconds, claim[1] if claim else "",
                  unreached)


def check(configuration, mutant):
    """A line about it; Failure where it is not as it must be."""
    found = search(configuration)
    line = (f"{found.states:>8} states, depth {found.depth:>3}, {found.seconds:5.1f} s, "
            f"{found.errors} errors")
    if mutant:
        if found.errors == 0:
            raise Failure(f"{line}: a rule is missing, and no claim noticed")
        return f"{line}: {found.claim}"
    if found.errors:
        raise Failure(f"{line}: {found.claim}\n"
                      f"to see how: spin -a, gcc, ./pan as here, then spin -t -p -g {MODEL.name}")
    if configuration == COMPLETE and found.unreached:
        raise Failure("never happens:\n" + "\n".join(found.unreached))
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", action="store_true", help="the model with a rule taken out")
    parser.add_argument("--only", default="", metavar="WORD", help="only what contains WORD")
    options = parser.parse_args()
    for tool in ("spin", "gcc"):
        if not shutil.which(tool):
            print(f"SKIPPED: {tool} is not installed: the model of the step protocol is unchecked "
                  "(deploy/install-packages --test brings it)")
            return SKIPPED
    wanted = [c for c in (MUTANTS if options.mutants else CONFIGURATIONS) if options.only in c]
    failed = 0
    for configuration in wanted:
        try:
            print(f"ok   {configuration:<48} {check(configuration, options.mutants)}", flush=True)
        except Failure as failure:
            failed += 1
            print(f"FAIL {configuration:<48} {failure}", flush=True)
    print(f"{len(wanted) - failed} of {len(wanted)} as they must be")
    return 0 if wanted and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
