#!/usr/bin/env python3
"""The model of char_lm.py on several ranks, by DDP or FSDP2:

    torchrun --nproc-per-node 2 distributed.py --way ddp
    torchrun --nproc-per-node 3 distributed.py --way fsdp --endpoint unix:///run/muond/muond.sock

Without an endpoint the service lives in rank 0's process. The optimizer is made in the same way for
both: it sees from the parameters what they are. Under DDP each gradient is sent by one rank only;
under FSDP2 each rank sends its shards, and the service puts the matrices together: no rank ever
holds one whole.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import muond.torch
from char_lm import CharLM, batches, read_text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--way", choices=("ddp", "fsdp"), default="fsdp")
    parser.add_argument("--text", help="a file to learn")
    parser.add_argument("--endpoint", help="of a daemon")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=24, help="of all ranks together")
    arguments = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(1)  # the same start on all ranks
    tokens, alphabet = read_text(arguments.text)
    model = CharLM(len(alphabet)).to(device)
    if arguments.way == "ddp":
        called = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        called = fully_shard(model, mesh=mesh)

    optimizer = muond.torch.Muon(
        model.named_parameters(), lr=0.02, weight_decay=0.01, adamw={"lr": 3e-3},
        endpoint=arguments.endpoint, local=arguments.endpoint is None)
    data = batches(tokens, model.context, arguments.batch, 1, rank, ranks)
    for step in range(arguments.steps):
        inputs, targets = (part.to(device) for part in next(data))
        loss = nn.functional.cross_entropy(called(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == arguments.steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:4d}  loss {mean.item() / ranks:.4f}", flush=True)
    digest = optimizer.digest()
    if rank == 0:
        print(f"\n{optimizer.describe()}\ndigest of the state: {digest}")
    dist.barrier()
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
