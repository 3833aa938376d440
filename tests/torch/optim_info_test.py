"""torch's own optimizer database (torch.testing._internal.common_optimizers), its entry for Muon,
run against ours: inputs, error inputs and schedulers are torch's, the tests are after those of its
test_optim.py, which no wheel has.

What of test_optim.py does not apply, and why:

  foreach, fused, capturable, differentiable, maximize, multi-device, CUDA state: there is one
      implementation, and it is not torch's; asking for another is an error (optimizer_test.py).
  complex parameters' correctness: refused at the step, as torch.optim.Muon does.
  state_dict into a second optimizer while the first goes on: a run has one trainer per rank; the
      first releases it. State loaded without its run is refused (optimizer_test.py).
  loading state of older versions: there are none.
  float64: the service holds float32 masters; float64 parameters are refused by name.

require_muon=False: many inputs are 1 x 1, which is no proper matrix and goes to AdamW.
"""

import copy
import io
import unittest
import warnings

from harness import TorchTest

import torch
from torch.nn import Parameter
from torch.testing._internal import common_optimizers

import muond.torch

INFO = next(info for info in common_optimizers.optim_db if info.optim_cls is torch.optim.Muon)
Input, On = common_optimizers.OptimizerInput, common_optimizers.OptimizerErrorEnum


class Entry(TorchTest):
    def make(self, params, **kwargs):
        return self.local(params, require_muon=False, **kwargs)

    def inputs(self):
        for given in INFO.optim_inputs_func(device="cpu"):
            with self.subTest(given.desc):
                yield copy.deepcopy(given.kwargs)

    @staticmethod
    def problem():
        torch.manual_seed(4)
        weights = [Parameter(torch.randn(10, 5)), Parameter(torch.randn(3, 10))]
        data, target = torch.randn(5, 8), torch.randn(3, 8)

        def loss():
            return (weights[1] @ torch.tanh(weights[0] @ data) - target).square().mean()
        return weights, loss

    def run_steps(self, optimizer, loss, steps, schedulers=()):
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
            for scheduler in schedulers:
                if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(value.detach())
                else:
                    scheduler.step()
        return loss().item()

    def test_errors(self):
        checked = 0
        for error in INFO.optim_error_inputs_func(device="cpu", dtype=torch.float32):
            given = error.optimizer_error_input
            params = given.params
            if params is None:
                params = [Parameter(torch.randn(2, 3))]
            with self.subTest(given.desc):
                checked += 1
                if error.error_on == On.STEP_ERROR:
                    optimizer = self.make(params, **given.kwargs)
                    with self.assertRaisesRegex(error.error_type, error.error_regex):
                        optimizer.step()
                elif issubclass(error.error_type, Warning):
                    with self.assertWarnsRegex(error.error_type, error.error_regex):
                        self.make(params, **given.kwargs)
                else:
                    with self.assertRaisesRegex(error.error_type, error.error_regex):
                        self.make(params, **given.kwargs)
        self.assertGreaterEqual(checked, 10)

    def test_every_input_follows_torch(self):
        for kwargs in self.inputs():
            finals = []
            for kind in (torch.optim.Muon, self.make):
                weights, loss = self.problem()
                optimizer = kind(weights, **copy.deepcopy(kwargs))
                start = loss().item()
                end = self.run_steps(optimizer, loss, 20)
                self.assertLess(end, start)
                finals.append([w.detach() for w in weights])
            for theirs, ours in zip(*finals):
                # torch iterates in bf16: two digits of an update that all steps add up.
                self.assertLess((theirs - ours).norm() / theirs.norm(), 1e-2)

    def test_schedulers(self):
        for constructors in INFO.scheduler_inputs:
            traces = []
            for kind in (torch.optim.Muon, self.make):
                weights, loss = self.problem()
                optimizer = kind(weights, lr=0.05)
                schedulers = [constructor(optimizer) for constructor in constructors]
                lrs = []
                for _ in range(4):
                    self.run_steps(optimizer, loss, 6, schedulers)
                    lrs.append(optimizer.param_groups[0]["lr"])
                traces.append(lrs)
            self.assertEqual(*traces)
            self.assertLess(traces[0][-1], 0.05)

    def test_param_groups_lr_and_weight_decay(self):
        for key, values in (("lr", (0.1, 0.)), ("weight_decay", (0.5, 0.))):
            weights = [Parameter(torch.ones(2, 3)), Parameter(torch.ones(2, 3))]
            optimizer = self.make([{"params": [weights[0]], key: values[0]},
                                   {"params": [weights[1]], key: values[1]}],
                                  **({"lr": 0.1} if key == "weight_decay" else {}))
            self.assertEqual(len(optimizer.param_groups), 2)
            for w in weights:
                w.grad = torch.zeros_like(w)
            optimizer.step()
            self.assertFalse(torch.equal(weights[0], torch.ones(2, 3)))
            self.assertTrue(torch.equal(weights[1], torch.ones(2, 3)))

    def test_tensor_lr(self):
        results = []
        for lr in (0.05, torch.tensor(0.05, dtype=torch.float64)):
            weights, loss = self.problem()
            self.run_steps(self.make(weights, lr=lr), loss, 3)
            results.append(weights[0].detach())
        self.assertTrue(torch.equal(*results))

    def test_no_gradient_and_zero_gradient_are_no_step(self):
        for kwargs in self.inputs():
            weights, _ = self.problem()
            before = [w.detach().clone() for w in weights]
            optimizer = self.make(weights, **{**kwargs, "weight_decay": 0.})
            optimizer.step()
            for w in weights:
                w.grad = torch.zeros_like(w)
            optimizer.step()
            for w, old in zip(weights, before):
                self.assertTrue(torch.equal(w, old))

    def test_printing_and_non_empty_state(self):
        for kwargs in self.inputs():
            weights, loss = self.problem()
            optimizer = self.make(weights, **kwargs)
            self.assertIn("Parameter Group 0", repr(optimizer))
            self.run_steps(optimizer, loss, 1)
            self.assertEqual(len(optimizer.state_dict()["state"]), len(weights))
            repr(optimizer)

    def test_state_dict_goes_through_a_file_into_another_optimizer(self):
        for kwargs in self.inputs():
            weights, loss = self.problem()
            first = self.make(weights, **kwargs)
            self.run_steps(first, loss, 3)
            file = io.BytesIO()
            torch.save(first.state_dict(), file)
            kept = [w.detach().clone() for w in weights]
            expected = self.run_steps(first, loss, 3)
            undisturbed = [w.detach().clone() for w in weights]
            first.close()

            # The same again, with a second optimizer in the place of the first after three steps.
            weights, loss = self.problem()
            first = self.make(weights, **kwargs)
            self.run_steps(first, loss, 3)
            file = io.BytesIO()
            torch.save(first.state_dict(), file)
            first.release()
            file.seek(0)
            second = self.make(weights, **copy.deepcopy(kwargs))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                second.load_state_dict(torch.load(file, weights_only=True))
            for w, old in zip(weights, kept):
                self.assertTrue(torch.equal(w, old))
            self.assertEqual(self.run_steps(second, loss, 3), expected)
            for w, old in zip(weights, undisturbed):
                self.assertTrue(torch.equal(w, old))
            self.assertEqual(int(second.state[weights[0]]["step"]), 6)
            second.close()

    def test_hooks_of_steps_and_state(self):
        seen = []
        weights, loss = self.problem()
        optimizer = self.make(weights)
        optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
        optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
        optimizer.register_state_dict_pre_hook(lambda *_: seen.append("save"))
        optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
        optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("load"))
        optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
        self.run_steps(optimizer, loss, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        self.assertEqual(seen, ["step", "stepped", "save", "saved", "load", "loaded"])

    def test_named_and_unnamed_parameters(self):
        weights, loss = self.problem()
        named = self.make([("first", weights[0]), ("second", weights[1])])
        self.assertEqual(named.state_dict()["param_groups"][0]["param_names"],
                         ["first", "second"])
        unnamed = self.make(weights)
        self.assertIn("no name was given", unnamed.describe())
        self.run_steps(unnamed, loss, 1)
        self.assertIn("param.0.1", unnamed.describe())

    def test_add_param_group_before_the_first_step(self):
        weights, loss = self.problem()
        optimizer = self.make(weights[:1])
        optimizer.add_param_group({"params": weights[1:], "lr": 0.5})
        self.assertEqual([g["lr"] for g in optimizer.param_groups], [1e-3, 0.5])
        self.run_steps(optimizer, loss, 2)
        self.assertEqual(optimizer.last_outcome.newton_schulz_calls, 2)


if __name__ == "__main__":
    unittest.main()
