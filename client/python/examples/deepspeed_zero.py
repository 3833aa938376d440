#!/usr/bin/env python3
"""A small language model under DeepSpeed, any ZeRO stage.

    MUOND_ENDPOINT=unix:///run/muond/muond.sock \\
        torchrun --nproc-per-node 2 client/python/examples/deepspeed_zero.py --stage 3

Without MUOND_ENDPOINT the service lives in rank 0's process.
"""

import argparse
import os

import deepspeed
import torch
from torch import nn

import muond.deepspeed
import muond.torch

WIDTH, WORDS = 64, 32


class Model(nn.Module):
    """Predicts the next of a sequence from the one before."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        hidden = self.embed(words[:, :-1])
        hidden = hidden + self.down(torch.relu(self.up(self.norm(hidden))))
        logits = self.lm_head(hidden).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    torch.manual_seed(0)
    model = Model()
    optimizer = muond.torch.Muon(
        model.named_parameters(), lr=0.02, adamw={"lr": 3e-3},
        local="MUOND_ENDPOINT" not in os.environ)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": options.stage},
    })
    muond.deepspeed.bind_deepspeed(engine)

    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for step in range(options.steps):
        starts = torch.randint(0, WORDS, (8, 1), generator=generator)
        words = (starts + 5 * torch.arange(12)) % WORDS
        loss = engine(words.to(engine.device))
        engine.backward(loss)
        engine.step()
        if torch.distributed.get_rank() == 0 and step in (0, options.steps - 1):
            outcome = optimizer.last_outcome
            print(f"step {outcome.step}: loss {loss.item():.3f}, "
                  f"{outcome.newton_schulz_calls} matrices orthogonalized", flush=True)
    if torch.distributed.get_rank() == 0:
        print(optimizer.describe())
    optimizer.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
