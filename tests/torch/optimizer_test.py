"""What a training loop and its tools expect of an optimizer: groups, schedulers, closures, hooks,
state, and a routing that is said aloud."""

import copy
import gc
import pathlib
import tempfile
import unittest
import warnings

from harness import TorchTest, batch, copy_of, local, loss_of, mlp, moved, train

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint

import muond.torch
from muond import errors
from muond.torch import Route


class Routing(TorchTest):
    def test_one_group_becomes_two_with_learning_rates_of_their_own(self):
        opt = self.local(mlp().named_parameters(), lr=0.02, adamw={"lr": 3e-4, "betas": (.8, .9)})
        self.assertIsInstance(opt, torch.optim.Optimizer)
        self.assertEqual([g["algorithm"] for g in opt.param_groups], ["muon", "adamw"])
        self.assertEqual([g["lr"] for g in opt.param_groups], [0.02, 3e-4])
        self.assertEqual(opt.param_groups[0]["param_names"],
                         [f"layer{i}.weight" for i in range(3)])
        self.assertEqual(opt.param_groups[1]["betas"], (.8, .9))
        self.assertEqual(opt.param_groups[1]["weight_decay"], 0.01)
        self.assertEqual(opt.param_groups[1]["eps"], 1e-8)

    def test_describe_has_a_reason_for_each_parameter(self):
        model = mlp()
        model.layer2.weight.requires_grad_(False)
        opt = self.local(model.named_parameters())
        self.assertIn("not joined", opt.describe())
        train(model, opt, 1)
        text = opt.describe()
        for words in ("layer0.weight", "hidden matrix", '"embed" in its name', '"lm_head" in its',
                      "a vector", "1 of 16 x 16", "frozen", "in-process", "read in place",
                      "2 parameters by Muon, 7 by AdamW, 1 frozen"):
            self.assertIn(words, text)
        self.assertEqual(opt.last_outcome.newton_schulz_calls, 2)

    def test_the_caller_decides_by_function_attribute_and_group(self):
        model = mlp()
        model.layer0.weight.use_muon = False
        opt = self.local(
            [{"params": list(model.embed.named_parameters()), "use_muon": True},
             {"params": [(f"layers.{n}", p) for i in range(3)
                         for n, p in getattr(model, f"layer{i}").named_parameters(f"{i}")],
              "lr": 0.5}],
            route=lambda name, p: Route("muon", reason="why not") if name == "layers.0.weight"
            else None)
        self.assertEqual([(g["algorithm"], len(g["params"]), g["lr"]) for g in opt.param_groups],
                         [("muon", 1, 1e-3), ("muon", 3, .5), ("adamw", 3, .5)])
        self.assertIn("why not", opt.describe())

    def test_the_model_itself_tells_its_embeddings(self):
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
        self.assertEqual(len(self.local(model).param_groups[0]["params"]), 2)
        self.assertEqual(len(self.local(model.named_parameters()).param_groups[0]["params"]), 3)

    def test_kinds_of_three_and_more_dimensions(self):
        torch.manual_seed(1)
        model = nn.ParameterDict({"conv": torch.randn(4, 3, 2, 2), "stack": torch.randn(3, 4, 5),
                                  "row": torch.randn(1, 7), "scalar": torch.randn(())})
        with self.assertRaisesRegex(errors.ShapeMismatch, "stack.*three dimensions"):
            self.local(model.named_parameters())
        model["stack"].muond_kind = "experts"
        opt = self.local(model.named_parameters())
        sum((p * p).sum() for p in model.values()).backward()
        opt.step()
        self.assertEqual(opt.last_outcome.newton_schulz_calls, 1 + 3)
        self.assertIn("1 x 7 is no proper matrix", opt.describe())

    def test_DeepSpeed8438_muon_is_never_silently_inactive(self):
        placeholder = nn.Parameter(torch.empty(0))
        with self.assertRaisesRegex(errors.ShapeMismatch, r'"w".*\(0,\).*placeholder'):
            self.local([("w", placeholder)])
        with self.assertRaisesRegex(errors.MuonInactive, '"flat" .* a vector'):
            self.local([("flat", nn.Parameter(torch.zeros(64)))])
        self.assertEqual(len(self.local([("flat", nn.Parameter(torch.zeros(64)))],
                                        require_muon=False).param_groups), 1)

    def test_a_flat_shard_with_its_logical_shape_is_orthogonalized_as_a_whole(self):
        torch.manual_seed(2)
        whole, flat = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.empty(24))
        flat.data.copy_(whole.data.reshape(-1))
        flat.muond_shape, flat.muond_offset = (4, 6), 0
        for name, parameter in (("whole", whole), ("flat", flat)):
            opt = self.local([(name, parameter)], lr=0.1)
            parameter.grad = torch.arange(24.).reshape(parameter.shape)
            opt.step()
            self.assertEqual(opt.last_outcome.newton_schulz_calls, 1)
        self.assertTrue(torch.equal(whole.reshape(-1), flat))

    def test_unsupported_switches_and_values_are_refused(self):
        params = list(mlp().named_parameters())
        for flag in ("foreach", "fused", "maximize", "capturable", "differentiable"):
            with self.assertRaisesRegex(RuntimeError, flag):
                self.local(params, **{flag: True})
        for options in ({"lr": -1.}, {"momentum": 1.}, {"weight_decay": -1.},
                        {"adjust_lr_fn": "x"}, {"ns_steps": 100}, {"ns_coefficients": (1., 2.)},
                        {"momentum_dtype": "f16"}, {"momentum_dtype": torch.float64},
                        {"amp_scaling": "x"}, {"loss_scale": -1}):
            with self.assertRaises(ValueError, msg=options):
                self.local(params, **options)
        for options in ({"endpiont": "x"}, {"adamw": {"beta": 1}}):
            with self.assertRaises(TypeError, msg=options):
                self.local(params, **options)


class Steps(TorchTest):
    def test_groups_are_read_at_every_step(self):
        model = mlp()
        opt = self.local(model, lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: float(step != 1))
        train(model, opt, 1)
        schedule.step()
        before = copy_of(model)
        train(model, opt, 1)
        self.assertEqual(moved(model, before), 0, "lr 0 moves nothing")
        schedule.step()
        train(model, opt, 1)
        self.assertEqual(moved(model, before), 10)
        opt.param_groups[0]["nesterov"] = False
        with self.assertRaisesRegex(errors.RegistrationError, "nesterov"):
            train(model, opt, 1)

    def test_weight_decay_of_each_half(self):
        # keras #21856: one decay for both halves. Far above rounding: lr * decay is 0.1 and 0.2.
        model = nn.ParameterDict({"w": torch.ones(2, 2), "b": torch.ones(2)})
        opt = self.local(model.named_parameters(), lr=0.1, weight_decay=1.,
                         adamw={"lr": 0.1, "weight_decay": 2.})
        for p in model.values():
            p.grad = torch.zeros_like(p)
        opt.step()
        self.assertTrue(torch.equal(model["w"], torch.full((2, 2), 0.9)))
        self.assertTrue(torch.equal(model["b"], torch.full((2,), 0.8)))
        self.assertEqual(opt.last_outcome.zero_inputs, 1)

    def test_closure_hooks_and_zero_grad(self):
        model, seen = mlp(), []
        opt = self.local(model)
        opt.register_step_pre_hook(lambda *_: seen.append("pre"))
        opt.register_step_post_hook(lambda *_: seen.append("post"))

        def closure():
            seen.append("closure")
            opt.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        self.assertGreater(opt.step(closure).item(), 0)
        self.assertEqual(seen, ["pre", "closure", "post"])
        opt.zero_grad()
        self.assertTrue(all(p.grad is None for p in model.parameters()))

    def test_NorMuon3_a_parameter_without_gradient_is_left_alone(self):
        model = mlp()
        opt = self.local(model, lr=0.1, weight_decay=1.)
        train(model, opt, 1)
        before = copy_of(model)
        loss_of(model, 1).backward()
        model.layer1.weight.grad = None
        opt.step()
        self.assertEqual(moved(model, before), 9)
        self.assertEqual(opt.last_outcome.newton_schulz_calls, 2)
        self.assertEqual(int(opt.state[model.layer1.weight]["step"]), 1)
        self.assertEqual(int(opt.state[model.layer0.weight]["step"]), 2)

    def test_half_precision_parameters_have_masters(self):
        # pytorch #120376: bf16 weights lose updates of 1e-4; fp32 masters keep them.
        for dtype in (torch.bfloat16, torch.float16):
            p = nn.Parameter(torch.ones(2, 2, dtype=dtype))
            opt = self.local([("w", p)], lr=1e-4, weight_decay=0.)
            for _ in range(100):
                p.grad = torch.eye(2, dtype=dtype)
                opt.step()
            self.assertEqual(p.dtype, dtype)
            self.assertLess(p[0, 0].item(), 0.9925)
            self.assertEqual(p[0, 1].item(), 1.)

    def test_gradients_that_are_not_contiguous(self):
        torch.manual_seed(3)
        gradient = torch.randn(6, 4)
        results = []
        for value in (gradient.t(), gradient.t().contiguous()):
            p = nn.Parameter(torch.zeros(4, 6))
            opt = self.local([("w", p)])
            p.grad = value
            opt.step()
            results.append(p.detach())
        self.assertTrue(torch.equal(*results))
        q = nn.Parameter(torch.zeros(6, 4).t())
        opt = self.local([("w", q)])
        q.grad = gradient.t()
        opt.step()
        self.assertTrue(torch.equal(q, results[0]))
        self.assertIn("not contiguous", opt.describe())

    def test_binding_is_lazy_and_parameters_may_be_exchanged_before(self):
        model, other = mlp(), mlp(seed=1)
        opt = self.local(model.named_parameters(), endpoint="unix:///nowhere")
        exchanged = dict(zip(model.parameters(), other.parameters()))
        for group in opt.param_groups:
            group["params"] = [exchanged[p] for p in group["params"]]
        before = copy_of(other)
        train(other, opt, 1)
        self.assertEqual(moved(other, before), 10)

    def test_a_step_inside_a_compiled_function(self):
        digests = []
        for compile_it in (lambda f: f, lambda f: torch.compile(f, backend="eager")):
            model, calls = mlp(), []
            opt = self.local(model)
            opt.register_step_post_hook(lambda *_, calls=calls: calls.append(1))

            @compile_it
            def step(inputs, targets, model=model, opt=opt):
                opt.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                opt.step()
            for number in range(3):
                step(*batch(number))
            self.assertEqual(len(calls), 3)
            digests.append(opt.digest())
        self.assertEqual(*digests)

    def test_a_phantom_step_joins_no_run(self):
        # torch.distributed.checkpoint fills `state` so: zero gradients, lr 0, step().
        model = mlp()
        opt = muond.torch.Muon(model, lr=0., adamw={"lr": 0.}, endpoint="unix:///nowhere")
        opt.step()
        self.assertEqual(len(opt.state), 0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        opt.step()
        self.assertEqual(len(opt.state), 10)

    def test_values_changed_by_others_are_not_overwritten(self):
        model = mlp()
        opt = self.local(model)
        train(model, opt, 2)
        with torch.no_grad():
            model.layer0.weight.fill_(1.)
        with self.assertRaisesRegex(errors.ParameterChanged, "layer0.weight"):
            train(model, opt, 1)
        opt.restart_from_parameters()
        train(model, opt, 1)
        self.assertAlmostEqual(model.layer0.weight.mean().item(), 1., delta=0.01)


class Daemons(TorchTest):
    def test_a_run_over_two_daemons_is_that_of_one(self):
        with tempfile.TemporaryDirectory(prefix="muond-torch-", dir="/tmp") as folder:
            folders = [pathlib.Path(folder) / name for name in "ab"]
            peers = ",".join(f"unix://{each}/muond.sock" for each in folders)
            daemons = []
            for each in folders:
                each.mkdir()
                daemons.append(self.daemon("--peers", peers, directory=each))
            ends = []
            for make in (self.local, lambda model: self.remote(model, daemons[1])):
                model = mlp()
                opt = make(model)
                train(model, opt, 3)
                ends.append((model, opt.describe(), opt.last_outcome.newton_schulz_calls))
                opt.close()
            self.assertSame(ends[0][0], ends[1][0])
            self.assertEqual([calls for _, _, calls in ends], [3, 3])
            for each in folders:
                self.assertIn(f"{each}/muond.sock  ", ends[1][1])
            for daemon in daemons:
                daemon.stop()


class State(TorchTest):
    def test_load_verifies_what_the_service_has(self):
        model = mlp()
        opt = self.local(model)
        train(model, opt, 2)
        state = opt.state_dict()
        self.assertEqual(state["muond"]["version"], 2)
        opt.load_state_dict(copy.deepcopy(state))
        train(model, opt, 1, first=2)
        with self.assertRaisesRegex(errors.StateLost, "version 2 .* version 3"):
            opt.load_state_dict(state)
        state["muond"].update(version=3)
        with self.assertRaisesRegex(errors.StateLost, "digest"):
            opt.load_state_dict(state)

    def test_another_process_goes_on_with_the_run(self):
        daemon = self.daemon()
        model, undisturbed = mlp(), mlp()
        expected = train(undisturbed, self.local(undisturbed), 5)
        first = self.remote(model, daemon)
        losses = train(model, first, 3)
        state = copy.deepcopy(first.state_dict())
        first.release()
        model = mlp(seed=9)
        second = self.remote(model, daemon)
        second.load_state_dict(state)
        second._bound()
        losses += train(model, second, 2, first=3)
        self.assertEqual(losses, expected)
        self.assertSame(model, undisturbed)
        self.assertEqual(int(second.state[model.norm.weight]["step"]), 5)

    def test_state_that_the_service_does_not_have_is_no_state(self):
        model = mlp()
        opt = self.local(model)
        train(model, opt, 1)
        state = opt.state_dict()
        taken = self.local(mlp())
        taken.load_state_dict(state)
        with self.assertRaisesRegex(errors.RunTaken, "of this process"):
            taken._bound()
        opt.close()
        lost = self.local(mlp())
        lost.load_state_dict(state)
        with self.assertRaisesRegex(errors.StateLost, "new and has none"):
            lost._bound()
        fresh_model = mlp()
        fresh = self.local(fresh_model, on_lost_state="fresh")
        fresh.load_state_dict(state)
        train(fresh_model, fresh, 1)
        p = nn.Parameter(torch.ones(2, 2))
        reference = torch.optim.Muon([p])
        p.grad = torch.ones(2, 2)
        reference.step()
        with self.assertRaisesRegex(errors.StateLost, "another optimizer's momentum"):
            self.local([("w", nn.Parameter(torch.ones(2, 2)))]).load_state_dict(
                reference.state_dict())

    def test_torch_distributed_checkpoint_carries_which_state_it_is(self):
        model = mlp()
        opt = self.local(model, lr=0.02)
        self.assertEqual(len(checkpoint.get_optimizer_state_dict(model, opt)["state"]), 10)
        self.assertIsNone(opt._binding, "filling `state` joins no run")
        train(model, opt, 2)
        state = checkpoint.get_optimizer_state_dict(model, opt)
        expected = copy_of(model)
        opt.release()
        model = mlp(seed=8)
        second = self.local(model, lr=0.5)
        checkpoint.set_optimizer_state_dict(model, second, state)
        self.assertEqual(second.param_groups[0]["lr"], 0.02)
        second._bound()
        self.assertEqual(moved(model, expected), 0)
        train(model, second, 1)
        self.assertEqual(second.last_outcome.applied_steps, 3)
        with self.assertRaisesRegex(errors.StateLost, "version 2"):
            checkpoint.set_optimizer_state_dict(model, second, state)

    def test_a_copy_has_groups_but_no_run(self):
        model = mlp()
        opt = self.local(model, lr=0.3)
        clone = copy.deepcopy(opt)
        self.assertEqual(clone.param_groups[0]["lr"], 0.3)
        clone.param_groups[0]["params"][0].grad = torch.ones(16, 16)
        clone.step()
        self.assertEqual(clone.last_outcome.newton_schulz_calls, 1)
        clone.close()
        train(model, opt, 1)
        clone = copy.deepcopy(opt)
        clone.param_groups[0]["params"][0].grad = torch.ones(16, 16)
        with self.assertRaisesRegex(errors.RunStateError, "is a copy"):
            clone.step()
        train(model, opt, 1)
        self.assertEqual(opt.last_outcome.applied_steps, 2)

    def test_optimizers_that_nobody_holds_any_more_hold_no_runs(self):
        for round in range(20):  # the service takes 16 runs at a time
            model = mlp()
            opt = local(model, async_push=round % 2 == 0)
            train(model, opt, 1)
            del opt
            gc.collect()

    def test_no_warning_in_an_ordinary_loop(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = mlp()
            opt = self.local(model)
            schedule = torch.optim.lr_scheduler.OneCycleLR(opt, [.1, .01], total_steps=5)
            for step in range(3):
                train(model, opt, 1, first=step)
                schedule.step()


if __name__ == "__main__":
    unittest.main()
