#!/usr/bin/env python3
"""Trainers that are killed, paused and cut off at every phase of a step, and daemons that stand
still.

usage: trainer_faults_test.py [--seeds FIRST:END] [unittest's arguments]

With --seeds, a story for each of those seeds in place of the short tests: the long form. It prints
a line for each, and what happened in those that fail.
"""

import collections
import sys
import time
import unittest

from fault_story import FaultStory
from muond_process import ProcessTest

SEEDS = None  # of the long form


class StoryTest(ProcessTest):

    def test_pieces_of_steps(self):
        FaultStory(self, seed=1).run()

    def test_whole_steps(self):
        FaultStory(self, seed=2, steps=6, whole_steps=True).run()


class LongForm(ProcessTest):
    """Every other seed takes whole steps."""

    def test_seeds(self):
        happened = collections.Counter()
        for seed in SEEDS:
            with self.subTest(seed=seed):
                start = time.monotonic()
                story = FaultStory(self, seed, whole_steps=seed % 2 == 1)
                story.run()
                happened.update(story.happened)
                print(f"seed {seed}: {len(story.told)} faults, {time.monotonic() - start:.1f} s",
                      flush=True)
            self.doCleanups()
        for what, times in sorted(happened.items()):
            print(f"{times:5} {what}")


if __name__ == "__main__":
    if "--seeds" in sys.argv:
        at = sys.argv.index("--seeds")
        first, end = map(int, sys.argv[at + 1].split(":"))
        SEEDS = range(first, end)
        unittest.main(argv=[sys.argv[0], "LongForm", *sys.argv[at + 2:]])
    unittest.main(argv=[sys.argv[0], *(sys.argv[1:] or ["StoryTest"])])
