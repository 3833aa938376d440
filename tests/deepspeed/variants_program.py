"""Two ranks: everything that must not change what a stage computes, and what must be refused."""

import os
import pathlib
import sys

from ranks import (BF16, FP32, ROOT, build, config, engine_of, full, gathered_loss, language_loss,
                   llama, main, muon, raised, take, tokens)

import torch
import torch.distributed as dist

import muond.deepspeed
import muond.torch

sys.path.append(str(ROOT / "tests" / "e2e"))
from muond_process import Daemon  # noqa: E402

SCRATCH = pathlib.Path(os.environ.get("MUOND_SCRATCH", "/tmp"))


def loss_for(rank, device, poison=None):
    def loss_of(engine, step, micro):
        loss = language_loss(engine, tokens(step, rank, device=device))
        return loss * (float("nan") if step == poison and rank == 1 else 1.0)
    return loss_of


def tagged():
    """A Llama whose matrices carry the attribute that DeepSpeed's own Muon looks for."""
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.use_muon = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
    return model


def partly_frozen():
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.model.norm.weight.requires_grad_(False)
    return model


def variant(settings, rank, device, make=llama, steps=3, poison=None, **options):
    engine, optimizer = build(make, settings, **options)
    before = full(engine)
    losses, outcomes = take(engine, optimizer, loss_for(rank, device, poison), steps)
    now = full(engine)
    result = {"digest": optimizer.digest(), "calls": [o.newton_schulz_calls for o in outcomes],
              "clips": [o.clip_coefficient for o in outcomes],
              "applied": [o.applied for o in outcomes], "skipped": engine.skipped_steps,
              "wrapper": type(engine.optimizer).__name__, "describe": optimizer.describe(),
              "moved": sum(not torch.equal(now[name], before[name]) for name in now),
              "lr": [group["lr"] for group in optimizer.param_groups]}
    optimizer.close()
    engine.destroy()
    return result


OFFLOAD = {"zero_force_ds_cpu_optimizer": False}
CPU = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {
    "warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}}

SAME = {
    "plain": lambda: config(3),
    "subgroups": lambda: config(3, zero={"sub_group_size": 5000}),
    "persistent": lambda: config(3, zero={"stage3_param_persistence_threshold": 10 ** 6}),
    "offload3": lambda: config(3, zero={**CPU, "sub_group_size": 5000}, **OFFLOAD),
    "offload2": lambda: config(2, zero=CPU, **OFFLOAD),
    "round_robin": lambda: config(2, zero={"round_robin_gradients": True}),
    "no_scatter": lambda: config(1, zero={"reduce_scatter": False}),
}


def unbound(stage, rank, device):
    """An engine's step whose optimizer was not bound."""
    engine, optimizer = build(llama, config(stage), bind=False)
    result = {"raised": raised(lambda: take(engine, optimizer, loss_for(rank, device), 1))}
    return result


def accumulation(count, rank, device):
    """8 rows per rank and step, in one piece or in four."""
    engine, optimizer = build(llama, config(2, FP32, micro=8 // count, accumulate=count))

    def loss_of(engine, step, micro):
        rows = tokens(step, rank, count=8, device=device)
        size = 8 // count
        return language_loss(engine, rows[micro * size:(micro + 1) * size])

    _, outcomes = take(engine, optimizer, loss_of, 4, accumulate=count)
    torch.save(full(engine), SCRATCH / f"accumulated-{count}-{rank}.pt")
    result = {"calls": [o.newton_schulz_calls for o in outcomes]}
    if count == 4:
        one = torch.load(SCRATCH / f"accumulated-1-{rank}.pt")
        result["difference"] = max(float((full(engine)[name] - value).abs().max())
                                   for name, value in one.items())
        result["size"] = max(float(value.abs().max()) for value in one.values())
    optimizer.close()
    engine.destroy()
    return result


def resume(stage, rank, device):
    """Six steps, and three, a checkpoint, a new engine, and three more."""
    folder = SCRATCH / f"resume-{stage}"
    daemon, box = None, [None]
    if rank == 0:
        folder.mkdir()
        daemon = Daemon("--backend", "cpu", "--threads", "1", directory=folder)
        box[0] = daemon.unix
    dist.broadcast_object_list(box, src=0)
    options = {"local": False, "endpoint": box[0]}
    engine, optimizer = build(llama, config(stage), run=f"whole-{stage}", **options)
    take(engine, optimizer, loss_for(rank, device), 6)
    wanted, wanted_digest = full(engine), optimizer.digest()
    optimizer.close()
    engine.destroy()

    engine, optimizer = build(llama, config(stage), run=f"parts-{stage}", **options)
    take(engine, optimizer, loss_for(rank, device), 3)
    engine.save_checkpoint(str(folder), tag="three")
    optimizer.release()
    engine.destroy()
    engine, optimizer = build(llama, config(stage), seed=7, run=f"parts-{stage}", **options)
    engine.load_checkpoint(str(folder), tag="three")
    _, outcomes = take(engine, optimizer, loss_for(rank, device), 3, first=3)
    now = full(engine)
    result = {"same": all(torch.equal(now[name], value) for name, value in wanted.items()),
              "digests": [wanted_digest, optimizer.digest()],
              "steps": sorted({int(state["step"]) for state in optimizer.state.values()}),
              "applied": [o.applied for o in outcomes], "dtype": str(next(iter(
                  engine.module.parameters())).dtype)}
    # A checkpoint of another version than the service's must be refused.
    optimizer.release()
    engine.destroy()
    engine, optimizer = build(llama, config(stage), seed=7, run=f"parts-{stage}", **options)
    engine.load_checkpoint(str(folder), tag="three")
    result["old"] = raised(lambda: take(engine, optimizer, loss_for(rank, device), 1, first=3))
    if rank == 0:
        dist.barrier()
        daemon.kill()
    else:
        dist.barrier()
    return result


def refused(rank, device):
    """Options that contradict the engine."""
    cases = {"loss_scale": {"loss_scale": "dynamic"}, "async_push": {"async_push": True},
             "max_grad_norm": {"max_grad_norm": 2.0}}
    result = {}
    for name, options in cases.items():
        result[name] = raised(lambda: build(
            llama, config(2, gradient_clipping=1.0), **options))
    engine, optimizer = build(llama, config(2))
    result["direct"] = raised(optimizer.step)
    result["again"] = [str(muond.deepspeed.bind_deepspeed(engine) is optimizer), ""]
    engine.destroy()
    return result


def unnamed(rank, device):
    return variant(config(2), rank, device, named=False, steps=1)


SCENARIOS = {name: (lambda rank, device, make=make: variant(make(), rank, device))
             for name, make in SAME.items()}
SCENARIOS.update({
    "tagged": lambda rank, device: variant(config(2), rank, device, make=tagged),
    "clip2": lambda rank, device: variant(config(2, gradient_clipping=0.1), rank, device),
    "clip3": lambda rank, device: variant(config(3, gradient_clipping=0.1), rank, device),
    "clip_bf16": lambda rank, device: variant(
        config(1, gradient_clipping=0.1, data_types={"grad_accum_dtype": "fp32"}), rank, device),
    "frozen2": lambda rank, device: variant(config(2), rank, device, make=partly_frozen),
    "frozen3": lambda rank, device: variant(config(3), rank, device, make=partly_frozen),
    "warmup": lambda rank, device: variant(config(2, **WARMUP), rank, device),
    "poison2": lambda rank, device: variant(config(2, **WARMUP), rank, device, poison=1),
    "poison0": lambda rank, device: variant(config(0, FP32), rank, device, poison=1),
    "unnamed": unnamed, "refused": refused,
    "accumulate1": lambda rank, device: accumulation(1, rank, device),
    "accumulate4": lambda rank, device: accumulation(4, rank, device),
})
for _stage in (0, 1, 2, 3):
    SCENARIOS[f"resume{_stage}"] = lambda rank, device, stage=_stage: resume(stage, rank, device)
# Last: they leave engines in the middle of a step.
SCENARIOS["unbound1"] = lambda rank, device: unbound(1, rank, device)
SCENARIOS["unbound3"] = lambda rank, device: unbound(3, rank, device)

if __name__ == "__main__":
    main(SCENARIOS)
