"""A small transformer, trained by torch.optim.Muon with AdamW and by ours from the same start on
the same data: ours must be no further from the exact trajectory than twice torch's own distance.

The exact trajectory is the same rule in float64: Newton-Schulz in float64, too, where torch's
iterates in bf16.
"""

import copy
import statistics
import unittest

from harness import TorchTest

import torch
from torch import nn

from muond.torch import routing

STEPS = 200
WIDTH, HEADS, CONTEXT, SYMBOLS, BATCH = 32, 2, 24, 27, 8
MUON = {"lr": 0.01, "weight_decay": 0.1}
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.05}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        return self.lm_head(self.norm(self.blocks(x)))


def text():
    """Something to learn: words of a made-up language, by a rule."""
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(1, SYMBOLS, (40, 5), generator=generator)
    chosen = words[torch.randint(0, 40, (2000,), generator=generator)]
    return torch.cat([chosen, torch.zeros(2000, 1, dtype=torch.int64)], 1).flatten()


def exact_newton_schulz(update, coefficients, steps, eps):
    """What torch's routine computes, without its bf16."""
    a, b, c = coefficients
    x = update.T if update.shape[0] > update.shape[1] else update
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if update.shape[0] > update.shape[1] else x


class Exact(torch.optim.Optimizer):
    """torch.optim.Muon's rule in float64."""

    def __init__(self, params, **options):
        super().__init__(params, {"momentum": 0.95, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = exact_newton_schulz(p.grad.lerp(buffer, group["momentum"]),
                                             (3.4445, -4.7750, 2.0315), 5, 1e-7)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


class Parity(TorchTest):
    def optimizers(self, way, model):
        if way == "ours":
            return [self.local(model.named_parameters(), **MUON, adamw=ADAMW)]
        routes = {name: routing.decide(name, p).algorithm for name, p in model.named_parameters()}
        chosen = {half: [p for name, p in model.named_parameters() if routes[name] == half]
                  for half in ("muon", "adamw")}
        muon = Exact if way == "exact" else torch.optim.Muon
        return [muon(chosen["muon"], **MUON), torch.optim.AdamW(chosen["adamw"], **ADAMW)]

    def train(self, way, start):
        """(parameters in float64, losses)"""
        model = copy.deepcopy(start)
        if way == "exact":
            model.double()
        optimizers = self.optimizers(way, model)
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 2 * STEPS) for o in optimizers]
        tokens, generator, losses = text(), torch.Generator().manual_seed(11), []
        for _ in range(STEPS):
            at = torch.randint(0, len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
            rows = torch.stack([tokens[i:i + CONTEXT + 1] for i in at])
            logits = model(rows[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for one in optimizers + schedules:
                one.step()
            losses.append(loss.item())
        return [p.detach().double() for p in model.parameters()], losses

    def test_a_momentum_in_bf16_is_rounded_once_a_step_and_nothing_else_is(self):
        torch.manual_seed(5)
        start, lr, beta = torch.randn(6, 4), 0.1, 0.95
        gradients = [torch.randn(6, 4) for _ in range(5)]

        def train(build, **options):
            weights = nn.Parameter(start.clone())
            optimizer = build([("w", weights)], lr=lr, weight_decay=0., **options)
            for gradient in gradients:
                weights.grad = gradient.clone()
                optimizer.step()
            return weights.detach().clone()

        def exact(kept):
            weights, momentum = start.double(), torch.zeros(6, 4, dtype=torch.float64)
            for gradient in gradients:
                gradient = gradient.double()
                momentum = (momentum + (1 - beta) * (gradient - momentum)).to(kept).double()
                update = exact_newton_schulz((1 - beta) * gradient + beta * momentum,
                                             (3.4445, -4.7750, 2.0315), 5, 1e-7)
                weights = weights - lr * (6 / 4) ** 0.5 * update
            return weights

        daemon, trained = self.daemon(), {}
        for name, kept, other in (("bf16", torch.bfloat16, torch.float32),
                                  (torch.bfloat16, torch.bfloat16, torch.float32),
                                  ("f32", torch.float32, torch.bfloat16)):
            trained[name] = train(self.local, momentum_dtype=name)
            near = (trained[name].double() - exact(kept)).abs().max().item()
            far = (trained[name].double() - exact(other)).abs().max().item()
            self.assertLess(near, 1e-5, name)
            self.assertGreater(far, 1e-4, name)
        by_daemon = train(lambda params, **options: self.remote(params, daemon, **options),
                          momentum_dtype="bf16")
        for other in (trained[torch.bfloat16], by_daemon):
            self.assertTrue(torch.equal(other, trained["bf16"]))

    def test_no_further_from_the_exact_trajectory_than_torch(self):
        torch.manual_seed(6)
        start = Transformer()
        exact, exact_losses = self.train("exact", start)
        theirs, their_losses = self.train("torch", start)
        ours, our_losses = self.train("ours", start)
        self.assertLess(statistics.mean(exact_losses[-10:]), 0.8 * exact_losses[0])

        def distance(parameters):
            return sum((p - q).square().sum().item() for p, q in zip(parameters, exact)) ** 0.5

        print(f"{STEPS} steps: distance from float64: torch {distance(theirs):.4g}, ours "
              f"{distance(ours):.4g}; loss {their_losses[-1]:.4f}, {our_losses[-1]:.4f}, exact "
              f"{exact_losses[-1]:.4f}")
        self.assertLessEqual(distance(ours), 2 * distance(theirs))
        for (name, _), p, q, r in zip(start.named_parameters(), ours, theirs, exact):
            self.assertLessEqual((p - r).norm(), 2 * (q - r).norm() + 1e-4 * r.norm(), name)
        for one, other in zip(our_losses, exact_losses):
            self.assertLessEqual(abs(one - other), 0.005 * other)


if __name__ == "__main__":
    unittest.main()
