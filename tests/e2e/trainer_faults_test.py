#!/usr/bin/env python3
"""Trainers that are killed, paused and cut off at every phase of a step.

usage: trainer_faults_test.py [--seeds FIRST:END] [unittest's arguments]

With --seeds, stories of those seeds and nothing else, one line each: the long form.
"""

import sys
import time
import unittest

from fault_story import FaultStory
from muond_process import ProcessTest


class StoryTest(ProcessTest):

    def test_pieces_of_steps(self):
        FaultStory(self, seed=1).run()

    def test_whole_steps(self):
        FaultStory(self, seed=2, steps=6, whole_steps=True).run()


if __name__ == "__main__":
    unittest.main()
