#!/usr/bin/env python3
"""A training loop with Hugging Face's Accelerate: DDP, FSDP2 or DeepSpeed.

    torchrun --nproc-per-node 2 client/python/examples/accelerate_loop.py --with fsdp2
"""

import argparse
import os

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch import nn

import muond.deepspeed
import muond.torch

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values):
        return values + self.down(torch.tanh(self.up(values)))


def accelerator_of(way):
    cpu = not torch.cuda.is_available()
    if way == "deepspeed":
        if cpu:  # of which Accelerate would make DDP
            deepspeed.init_distributed("gloo", verbose=False)
        return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={
            "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3}}))
    if way == "fsdp2":
        return Accelerator(cpu=cpu, fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"]))
    return Accelerator(cpu=cpu)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--with", dest="way", choices=("ddp", "fsdp2", "deepspeed"), default="ddp")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    accelerator = accelerator_of(options.way)
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))
    optimizer = muond.torch.Muon(model.named_parameters(), lr=0.02, adamw={"lr": 3e-3},
                                 local="MUOND_ENDPOINT" not in os.environ)
    model, prepared = accelerator.prepare(model, optimizer)
    if options.way == "deepspeed":
        muond.deepspeed.bind_deepspeed(model)

    generator = torch.Generator().manual_seed(accelerator.process_index)
    for step in range(options.steps):
        values = torch.randn(16, WIDTH, generator=generator).to(accelerator.device)
        loss = nn.functional.mse_loss(model(values), values[:, :4].flip(1))
        accelerator.backward(loss)
        prepared.step()
        prepared.zero_grad()
        if step in (0, options.steps - 1):
            mean = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.print(f"step {step}: loss {mean:.3f}, "
                              f"{optimizer.last_outcome.newton_schulz_calls} matrices "
                              "orthogonalized", flush=True)
    optimizer.close()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
