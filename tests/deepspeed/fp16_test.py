"""DeepSpeed #8432 under the real DeepSpeed: fp16, dynamic loss scale from 65536, thirty steps on
two ranks. The overflows at the start change nothing, then ten of ten parameters move."""

import os
import unittest

import launch

PARAMETERS = 10


def fp16_works():
    import torch
    try:
        layer = torch.nn.Linear(8, 8).half()
        layer(torch.ones(2, 8).half()).sum().backward()
        return True
    except RuntimeError:
        return False


class Fp16(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not fp16_works():
            raise unittest.SkipTest("*** THIS TORCH COMPUTES NO FP16 ON A CPU: NOT TESTED ***")
        names = [] if os.environ.get("MUOND_TEST_LONG") else ["zero_steps", "dynamic1", "dynamic2",
                                                              "static2"]
        cls.report = launch.run("fp16_program.py", *names, timeout=900)[0]

    def test_DeepSpeed8432_overflows_change_nothing_and_then_all_parameters_move(self):
        for name in [key for key in self.report if key.startswith("dynamic")]:
            row = self.report[name]
            with self.subTest(name):
                self.assertEqual(row["scales"][0], 65536)
                if name != "dynamic0":  # without ZeRO nothing overflows at this scale
                    self.assertTrue(row["skips"][0], "no overflow at the start: nothing is tested")
                self.assertEqual((row["moved"], row["of"]), (PARAMETERS, PARAMETERS))
                self.assertTrue(row["finite"])
                self.assertEqual(row["momentum"], [PARAMETERS] * 3, "finite, non-zero, of all")
                self.assertEqual(set(row["nonfinite"].values()), {0.0})

    def test_skips_in_the_metrics_are_the_engines(self):
        for name, row in self.report.items():
            if name == "zero_steps":
                continue
            with self.subTest(name):
                self.assertEqual(row["steps"]["skipped_overflow"], row["engine_skips"])
                self.assertEqual(row["steps"]["applied"], 30 - row["engine_skips"])
                self.assertEqual(row["service_skips"], row["engine_skips"])
                self.assertEqual(sum(row["skips"]), row["engine_skips"])

    def test_scale_1_skips_nothing_and_moves_all(self):
        for name in [key for key in self.report if key.startswith("static")]:
            row = self.report[name]
            with self.subTest(name):
                self.assertEqual((row["moved"], row["engine_skips"]), (PARAMETERS, 0))
                self.assertEqual(row["momentum"], [PARAMETERS] * 3)

    def test_zero_steps_move_nothing(self):
        row = self.report["zero_steps"]
        self.assertEqual((row["moved"], row["of"]), (0, PARAMETERS))
        self.assertEqual(row["dtype"], "torch.float16")


if __name__ == "__main__":
    unittest.main()
