"""The real DeepSpeed on two ranks: what must change a result, what must not, what is refused."""

import os
import unittest

import launch

LONG = bool(os.environ.get("MUOND_TEST_LONG"))
SAME = ("plain", "subgroups", "persistent", "round_robin", "no_scatter", "offload2", "offload3")
SHORT = ["plain", "subgroups", "round_robin", "offload2", "tagged", "clip2", "clip3", "frozen3",
         "poison2", "unnamed", "refused", "accumulate1", "accumulate4", "resume2", "resume3",
         "unbound1", "unbound3"]


class Variants(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ranks = launch.run("variants_program.py", *([] if LONG else SHORT), timeout=900)
        cls.report = cls.ranks[0]

    def row(self, name):
        if name not in self.report:
            self.assertFalse(LONG, name)
            self.skipTest(f"*** {name}: ONLY WITH MUOND_TEST_LONG ***")
        return self.report[name]

    def test_layouts_do_not_change_a_bit(self):
        digests = {name: self.report[name]["digest"] for name in SAME if name in self.report}
        self.assertGreater(len(digests), 3)
        self.assertEqual(len(set(digests.values())), 1, digests)

    def test_own_muon_of_deepspeed_keeps_its_hands_off_parameters_tagged_use_muon(self):
        self.assertEqual(self.row("tagged")["digest"], self.report["plain"]["digest"])

    def test_DeepSpeed8439_clipping_is_the_services_and_the_same_in_all_stages(self):
        rows = [self.report[name] for name in ("clip2", "clip3", "clip_bf16")
                if name in self.report]
        for row in rows:
            self.assertTrue(all(0 < clip < 1 for clip in row["clips"]), row["clips"])
            self.assertEqual(row["digest"], rows[0]["digest"])
        self.assertNotEqual(rows[0]["digest"], self.report["plain"]["digest"],
                            "AdamW's part is clipped, so something must differ")

    def test_frozen_parameters_stay_out(self):
        row = self.row("frozen3")
        self.assertEqual(row["calls"], [13] * 3)
        self.assertNotIn("layers.0.mlp.up_proj", row["describe"])
        self.assertEqual(row["moved"], 21 - 2)
        if "frozen2" in self.report:
            self.assertEqual(row["digest"], self.report["frozen2"]["digest"])

    def test_learning_rates_of_deepspeeds_scheduler_are_used(self):
        row = self.row("warmup")
        self.assertEqual(len(set(row["lr"])), 1)
        self.assertNotEqual(row["digest"], self.report["plain"]["digest"])

    def test_a_step_that_the_service_skips_is_one_that_the_engine_skips(self):
        row = self.row("poison2")  # bf16: DeepSpeed does not look for what is not finite
        self.assertEqual(row["applied"], [True, False, True])
        self.assertEqual(row["skipped"], 1)
        # Warm-up from 0, by 0.0025 from the second step that counts on: the skipped one does not.
        for lr in row["lr"]:
            self.assertAlmostEqual(lr, 0.01 / 4, places=6)
        if "poison0" in self.report:
            self.assertEqual(self.report["poison0"]["skipped"], 1)

    def test_without_names_the_engines_are_taken(self):
        row = self.row("unnamed")
        self.assertIn("model.layers.1.self_attn.q_proj.weight", row["describe"])

    def test_contradictions_are_refused(self):
        row = self.row("refused")
        self.assertIn("DeepSpeed scales the loss", row["loss_scale"][1])
        self.assertIn("async_push", row["async_push"][1])
        self.assertIn("gradient_clipping of the engine's configuration is 1.0",
                      row["max_grad_norm"][1])
        self.assertEqual(row["direct"][0], "RunStateError")
        self.assertEqual(row["again"][0], "True")

    def test_DeepSpeed8443_accumulation_calls_newton_schulz_once_a_step(self):
        self.assertEqual(self.row("accumulate1")["calls"], [14] * 4)
        row = self.row("accumulate4")
        self.assertEqual(row["calls"], [14] * 4)
        # Newton-Schulz amplifies the rounding of a sum in another order; 0.1 was the fault's size.
        self.assertLess(row["difference"], 1e-3)

    def check_resume(self, name):
        row = self.row(name)
        self.assertEqual(row["applied"], [True] * 3)
        self.assertTrue(row["same"], "parameters differ from the undisturbed run's")
        self.assertEqual(*row["digests"])
        self.assertEqual(row["dtype"], "torch.bfloat16")
        self.assertEqual(row["steps"], [6])
        self.assertEqual(row["old"][0], "StateLost")

    def test_DeepSpeed7746_resumed_in_bf16_as_if_undisturbed(self):
        for name in [key for key in self.report if key.startswith("resume")]:
            with self.subTest(name):
                self.check_resume(name)

    def test_a_flat_tensor_without_a_binding_raises(self):
        for name in ("unbound1", "unbound3"):
            kind, message = self.row(name)["raised"]
            self.assertEqual(kind, "RegistrationError")
            self.assertIn("an engine has flattened them", message)
            self.assertIn("bind_deepspeed", message)


if __name__ == "__main__":
    unittest.main()
