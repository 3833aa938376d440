"""The examples run as their own help says, with few steps."""

import os
import re
import subprocess
import sys
import unittest

from harness import LONG, ROOT, TorchTest

EXAMPLES = ROOT / "client" / "python" / "examples"
PATH = {"PYTHONPATH": str(ROOT / "client" / "python"), "OMP_NUM_THREADS": "1"}


class Examples(TorchTest):
    def python(self, *arguments):
        done = subprocess.run([sys.executable, "-B", *map(str, arguments)], capture_output=True,
                              text=True, timeout=300, check=False, env={**os.environ, **PATH})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr[-4000:])
        losses = [float(loss) for loss in re.findall(r"step +\d+ +loss (\d+\.\d+)", done.stdout)]
        self.assertGreater(losses[0], losses[-1] + 0.5)
        return done.stdout, losses

    def launch(self, ranks, *arguments):
        return self.python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks,
                           EXAMPLES / "distributed.py", *arguments)

    def test_char_lm_through_a_daemon_while_backward_runs(self):
        daemon = self.daemon()
        out, _ = self.python(EXAMPLES / "char_lm.py", "--steps", 12, "--batch", 4, "--async-push",
                             "--endpoint", daemon.unix)
        self.assertIn("12 parameters by Muon, 23 by AdamW, 0 frozen", out)
        self.assertIn(daemon.unix, out)

    def test_fsdp_on_two_ranks(self):
        out, _ = self.launch(2, "--way", "fsdp", "--steps", 8, "--batch", 6)
        self.assertIn("[144, 96]", out)  # half of a block's fused qkv

    @unittest.skipUnless(LONG, "the long form has all: tests/run --full")
    def test_all_ways_have_one_loss(self):
        losses = [self.launch(2, "--way", way, "--steps", 8, "--batch", 6)[1]
                  for way in ("ddp", "fsdp")]
        for one, other in zip(*losses):
            self.assertAlmostEqual(one, other, places=3)
        ends = [self.python(EXAMPLES / "char_lm.py", "--steps", 40, "--optimizer", name)[1][-1]
                for name in ("muond", "torch")]
        self.assertAlmostEqual(*ends, delta=0.05)


if __name__ == "__main__":
    unittest.main()
