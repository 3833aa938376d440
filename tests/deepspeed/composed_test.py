"""A two-layer Llama under the real DeepSpeed on two ranks: every stage, built plainly and under
zero.Init, orthogonalizes every hidden matrix once a step, and all stages compute the same bits."""

import unittest

import launch

MATRICES = 14
ROWS = {"stage3_init": "DeepSpeedZeroOptimizer_Stage3", "stage3": "DeepSpeedZeroOptimizer_Stage3",
        "stage2": "DeepSpeedZeroOptimizer", "stage1": "DeepSpeedZeroOptimizer",
        "stage0": "FP16_UnfusedOptimizer", "bf16_optimizer": "BF16_Optimizer",
        "stage0_fp32": "Muon", "stage3_fp32": "DeepSpeedZeroOptimizer_Stage3"}


class Composed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ranks = launch.run("composed_program.py")
        cls.report = cls.ranks[0]

    def check(self, name, steps):
        row = self.report[name]
        with self.subTest(name):
            self.assertEqual(row["muon"], MATRICES)
            self.assertEqual(row["calls"], MATRICES * steps)
            self.assertEqual(row["applied"], steps)
            self.assertEqual(row["skipped"], 0)
            self.assertTrue(row["finite"])
            self.assertLess(row["losses"][-1], row["losses"][0] - 0.2)
            self.assertEqual(row["promoted"], [], "a partitioned vector is no matrix")
            self.assertEqual(row["decays"], [0.0, 0.1])
            self.assertEqual(row["digest"], self.ranks[1][name]["digest"])

    def test_DeepSpeed8438_zero_init_and_plain_call_newton_schulz_84_times_in_6_steps(self):
        self.check("first_plain", 6)
        self.check("first_init", 6)

    def test_DeepSpeed8441_8442_every_stage_and_wrapper_is_muon(self):
        for name, wrapper in ROWS.items():
            self.assertEqual(self.report[name]["wrapper"], wrapper, "what this row is about")
            self.check(name, 4)

    def test_stages_0_to_3_and_bf16_optimizer_end_in_the_same_bits(self):
        digests = {name: self.report[name]["digest"]
                   for name in ("stage3", "stage2", "stage1", "stage0", "bf16_optimizer")}
        self.assertEqual(len(set(digests.values())), 1, digests)

    def test_slices_tile_the_layers_without_padding(self):
        # Of 32 x 49 elements two ranks hold 784 each; 49 x 32 as well; a norm's 32 are 16 each.
        describe = self.report["stage3"]["describe"]
        row = next(line for line in describe.splitlines() if "layers.0.mlp.down_proj" in line)
        self.assertIn("[32, 49]", row)
        self.assertIn("[784]", row)
        self.assertIn("1 of 32 x 49", row)


if __name__ == "__main__":
    unittest.main()
