"""One rank of a small training, under torchrun or not:
`distributed_program.py WAY OUT [ENDPOINT [STEPS PAUSE [SAVE DEATHS PIDFILE]]]`.

Writes the full parameters, losses, digest and layouts that rank 0 ends with to OUT (torch.save).
Global batches are the same for every number of ranks, so all ways must end alike. With PAUSE,
seconds, rank 0 prints the number of each step before it is taken, and waits so long. Before step
SAVE a checkpoint is saved. DEATHS, "3:0,5:01": in step 3 the daemon whose process PIDFILE names is
killed when rank 0 has its new parameters and no other rank has; in step 5 when 0 and 1 have.
"""

import os
import pathlib
import signal
import sys
import time

import harness  # noqa: F401 - finds the package

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                               parallelize_module)

import muond.torch

STEPS, BATCH, GROWS_AT = 4, 12, 2


class Model(nn.Module):
    """Odd sizes: rows that 2 and 3 ranks can't share evenly, and fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(17, 8)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)
        self.narrow = nn.Linear(8, 2)   # 2 rows: on 3 ranks one holds nothing
        self.odd = nn.Linear(2, 5)
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Parameter(torch.ones(3, 3))
        self.late = nn.Linear(5, 5)
        self.grown = False

    def forward(self, x):
        h = self.embed(x)
        h = self.norm(h + self.down(torch.tanh(self.up(h))))
        y = self.odd(torch.tanh(self.narrow(h)))
        return y + self.late(torch.tanh(y)) if self.grown else y


def data(step):
    generator = torch.Generator().manual_seed(step)
    return (torch.randint(0, 17, (BATCH,), generator=generator),
            torch.randint(0, 5, (BATCH,), generator=generator))


def prepare(way, model):
    """(the module to call, data-parallel rank and ranks)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    way = way.removesuffix("_grow")
    if way in ("ddp", "ddp_early"):
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), rank, ranks
    if way == "local":  # no DDP: the service averages
        return model, rank, ranks
    if way in ("fsdp", "fsdp_early", "fsdp_amp"):
        mesh = init_device_mesh("cpu", (ranks,))
        fully_shard(model.up, mesh=mesh)
        return fully_shard(model, mesh=mesh), rank, ranks
    if way == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh), rank, ranks
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if way == "tp":
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, plan)
        return model, 0, 1
    assert way == "fsdp_tp"
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], plan)
    # The rest must live on the same mesh: replicated over tp, sharded over dp.
    for module in (model.embed, model.narrow, model.odd, model.norm):
        parallelize_module(module, mesh["tp"], {"": Replicated()})
    model.unused = nn.Parameter(DTensor.from_local(model.unused.data, mesh["tp"]))
    fully_shard(model, mesh=mesh["dp"])
    return model, dist.get_rank() // 2, ranks // 2


class Replicated(torch.distributed.tensor.parallel.style.ParallelStyle):
    """Makes a module's parameters replicated DTensors, its inputs and outputs plain tensors."""

    def _apply(self, module, mesh):
        from torch.distributed.tensor import distribute_module

        def enter(_, inputs, mesh):
            return tuple(x if isinstance(x, DTensor) else DTensor.from_local(
                x, mesh, run_check=False) for x in inputs)

        def leave(_, output, mesh):
            return output.to_local()
        return distribute_module(module, mesh, None, enter, leave)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def die_between_pulls(opt, deaths, pid_file):
    """Has the daemon die in the named steps when the step is taken and just some ranks, by
    {step: ranks}, have pulled."""
    session, group = opt._binding.session, dist.new_group()
    rank, whole = dist.get_rank(), session.step_and_pull

    def step_and_pull(terms, slices, sinks, absent, scale):
        step = session.position().next_step
        have = deaths.pop(step, None)
        if have is None:
            return whole(terms, slices, sinks, absent, scale)
        if str(rank) in have:
            outcome = whole(terms, slices, sinks, absent, scale)
        else:
            outcome = session.step(terms, slices, absent, scale)
        dist.barrier(group)
        if rank == 0:
            os.kill(int(pathlib.Path(pid_file).read_text()), signal.SIGKILL)
            print(f"killed {step}", flush=True)
        dist.barrier(group)
        if str(rank) not in have:
            session.pull(outcome.version, sinks)
            raise AssertionError(f"step {step}: a dead daemon was pulled from")
        return outcome
    session.step_and_pull = step_and_pull


def main():
    way, out = sys.argv[1:3]
    endpoint = sys.argv[3] if len(sys.argv) > 3 else None
    alone = way.startswith("alone")
    if not alone:
        dist.init_process_group("gloo")
    model = Model()
    called, rank, ranks = (model, 0, 1) if alone else prepare(way, model)
    options = {"endpoint": endpoint, "run": f"{way}-{ranks}"} if endpoint else {
        "local": True, "threads": 1}
    named = list(model.named_parameters())
    late = [(name, p) for name, p in named if name.startswith("late.")]
    opt = muond.torch.Muon(
        [(name, p) for name, p in named if not name.startswith("late.")], lr=0.05,
        adamw={"lr": 0.05}, async_push=way.endswith("early"),
        gradients="local" if way == "local" else "reduced", **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64., enabled=way == "fsdp_amp")
    steps, pause = (int(sys.argv[4]), float(sys.argv[5])) if len(sys.argv) > 4 else (STEPS, 0)
    save, deaths, pid_file = sys.argv[6:9] if len(sys.argv) > 6 else (-1, "", "")
    if deaths:
        opt.next_step  # joins the run
        die_between_pulls(opt, {int(step): ranks for step, ranks in (
            death.split(":") for death in deaths.split(","))}, pid_file)
    saved = False
    for step in opt.steps(steps, rewind=[scaler]):
        if step == int(save) and not saved:
            saved = opt.save_checkpoint()
        if pause and rank == 0:
            print(f"step {step}", flush=True)
            time.sleep(pause)
        if step == GROWS_AT and way.endswith("_grow"):
            model.grown = True
            opt.add_param_group({"params": late})
        inputs, targets = data(step)
        share = BATCH // ranks
        mine = slice(rank * share, (rank + 1) * share)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(called(inputs[mine]), targets[mine])
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    digest = opt.digest()
    described = opt.describe()
    result = {"parameters": {name: full(p.detach()).clone()
                             for name, p in model.named_parameters()},
              "digest": digest, "describe": described, "applied": opt.last_outcome.applied_steps,
              "norm": opt.last_outcome.grad_norm,
              "calls": opt.last_outcome.newton_schulz_calls,
              "again": opt._early.again if opt._early else 0}
    if alone or dist.get_rank() == 0:
        torch.save(result, out)
    if not alone:
        dist.barrier()
        opt.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
