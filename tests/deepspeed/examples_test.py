"""The examples of DeepSpeed, Hugging Face's Trainer, Accelerate and Lightning, as a user runs them:
each learns, and orthogonalizes its matrices."""

import os
import pathlib
import re
import subprocess
import sys
import unittest

from launch import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONG = bool(os.environ.get("MUOND_TEST_LONG"))


class Examples(unittest.TestCase):
    def check(self, name, *arguments, ranks=1, matrices, below=0.8):
        """Runs it; its last loss must be below `below` of its first."""
        launcher = [] if ranks == 1 else [
            "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port",
            str(free_port())]
        done = subprocess.run(
            [sys.executable, "-B", *launcher, str(ROOT / "client/python/examples" / name),
             *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT / "client/python"), "OMP_NUM_THREADS": "1",
                 "DS_BUILD_OPS": "0", "MASTER_PORT": str(free_port())},
            capture_output=True, text=True, timeout=400, check=False)
        said = f"{done.stdout}\n{done.stderr[-6000:]}"
        self.assertEqual(done.returncode, 0, said)
        rows = re.findall(r"loss ([\d.]+), (\d+) matrices", done.stdout)
        self.assertGreater(len(rows), 1, said)
        self.assertEqual(int(rows[-1][1]), matrices, said)
        self.assertLess(float(rows[-1][0]), below * float(rows[0][0]), said)
        return done.stdout

    def long(self):
        if not LONG:
            self.skipTest("*** ONLY WITH MUOND_TEST_LONG ***")

    def test_deepspeed(self):
        out = self.check("deepspeed_zero.py", "--stage", "3", ranks=2, matrices=2)
        self.assertIn("1 of 256 x 64", out)

    def test_trainer_under_deepspeed(self):
        self.check("hf_trainer.py", "--deepspeed", ranks=2, matrices=14, below=0.95)

    def test_trainer(self):
        self.long()
        self.check("hf_trainer.py", matrices=14, below=0.95)

    def test_accelerate_deepspeed(self):
        self.check("accelerate_loop.py", "--with", "deepspeed", ranks=2, matrices=5)

    def test_accelerate_fsdp2(self):
        self.check("accelerate_loop.py", "--with", "fsdp2", ranks=2, matrices=5)

    def test_accelerate_ddp(self):
        self.long()
        self.check("accelerate_loop.py", "--with", "ddp", ranks=2, matrices=5)

    def test_lightning(self):
        self.check("lightning_module.py", matrices=2, below=0.9)

    def test_lightning_ddp(self):
        self.long()
        self.check("lightning_module.py", "--ranks", "2", matrices=2, below=0.9)


if __name__ == "__main__":
    unittest.main()
