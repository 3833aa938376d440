#!/usr/bin/env python3
"""How a step scales over the GPUs of one host: one daemon that drives N of them, and N daemons with
one each, against one GPU; beside them torch.optim.Muon on every rank under DDP.

usage: tests/bench/gpu_scaling.py --bin DIR [--libraries PATH] [--models gpt2,llama1b,llama7b]
                                  [--gpus N] [--steps 3] [--no-torch] [--json FILE]

  --bin DIR         muond, muond-bench and muonctl
  --libraries PATH  LD_LIBRARY_PATH of these, and of nothing else
  --gpus N          at most so many; all that there are

One line a configuration: "step" is Finish, from gradients that have arrived to applied parameters;
"imbalance" the busiest owner's load over the mean, by muonctl plan; efficiency T(1) / (N T(N)).
Every configuration of a model must end in the same digest: exits with 1 when one does not, or
fails.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import gpu_service  # noqa: E402

TORCH = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist, torch_gpu_step
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
layers, matrices, rest, rest_of_layer = torch_gpu_step.MODELS[sys.argv[2]]
muon = [torch_gpu_step.parameter(s) for _ in range(layers) for s in matrices]
others = [torch_gpu_step.parameter(s) for s in rest]
others += [torch_gpu_step.parameter(s) for _ in range(layers) for s in rest_of_layer]
optimizers = [torch.optim.Muon(muon, lr=1e-3), torch.optim.AdamW(others, lr=1e-3, fused=True)]
def step():  # gradients reduced, tensor by tensor, then what every rank does with all parameters
    for work in [dist.all_reduce(p.grad, async_op=True) for p in muon + others]:
        work.wait()
    for optimizer in optimizers:
        optimizer.step()
milliseconds = torch_gpu_step.milliseconds(step)
if rank == 0:
    print(json.dumps(milliseconds), flush=True)
dist.destroy_process_group()
"""
TORCH_NAMES = {"gpt2": "gpt2", "llama1b": "llama1b", "7b8": "7b8"}


def count_gpus():
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return len(re.findall(r"^GPU \d+:", done.stdout, re.M))


def counts(gpus):
    """1, 2, 4, ... and the last."""
    steps = [1 << i for i in range(gpus.bit_length()) if 1 << i <= gpus]
    return steps if steps[-1] == gpus else [*steps, gpus]


def imbalance(bin_dir, model, daemons, devices):
    done = subprocess.run([str(bin_dir / "muonctl"), "-o", "json", "plan", "--model", model,
                           "--daemons", str(daemons), "--devices", str(devices), "--backend",
                           "cuda", "--dtype", "bf16"], capture_output=True, text=True, check=True,
                          env=gpu_service.ENVIRONMENT)
    plan = json.loads(done.stdout)
    return plan["largest_flops"] / plan["mean_flops"]


def measure(arguments, model, daemons, devices):
    """A row, or None where it failed."""
    first = 17070
    addresses = [f"127.0.0.1:{first + i}" for i in range(daemons)]
    with contextlib.ExitStack() as stack:
        running = []
        for i, address in enumerate(addresses):
            flags = ["--devices", ",".join(map(str, range(devices)) if daemons == 1 else [str(i)])]
            if daemons > 1:
                flags += ["--listen", address, "--peers", ",".join(addresses)]
            running.append(stack.enter_context(gpu_service.Daemon(
                arguments.bin, *flags)))
        endpoint = running[0].endpoint if daemons == 1 else addresses[0]
        result, said = gpu_service.bench(arguments.bin, "--endpoint", endpoint, "--model", model,
                                         "--steps", arguments.steps, "--warmup", 1,
                                         "--run", "scaling")
        what = f"{model}, {daemons} daemons with {devices} GPUs each"
        if result is None or not result["check"]["passed"]:
            gpu_service.report(False, what, said[-300:])
            return None
    phases = {name: 1e3 * result["phases"][name]["median_seconds"]
              for name in ("push", "step", "pull")}
    return {"model": model, "daemons": daemons, "devices": devices, **phases,
            "digest": gpu_service.digest(result),
            "imbalance": imbalance(arguments.bin, model, daemons, devices)}


def torch_ms(model, gpus):
    processes = [subprocess.Popen(
        [sys.executable, "-c", TORCH, str(HERE), model], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(gpus), "LOCAL_RANK": str(rank),
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}) for rank in range(gpus)]
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        print(f"torch, {model}: {' | '.join(err.strip()[-200:] for _, err in said)}")
        return None
    return json.loads(said[0][0].splitlines()[-1])


def show(row, one):
    gpus = row["daemons"] * row["devices"]
    row["efficiency"] = one["step"] / (gpus * row["step"])
    print(f"{row['model']:10} {row['daemons']:7} x {row['devices']:<4} {row['step']:9.2f} "
          f"{row['push']:9.0f} {row['pull']:9.0f} {row['imbalance']:10.3f} "
          f"{100 * row['efficiency']:9.1f} %", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--libraries")
    parser.add_argument("--models", default="gpt2,llama1b,llama7b")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.libraries:
        gpu_service.ENVIRONMENT["LD_LIBRARY_PATH"] = arguments.libraries
    gpus = min(count_gpus(), arguments.gpus or 1 << 10)
    if gpus < 1:
        parser.error("--gpus: expected 1 or more, on a machine that has one")
    print(f"== a step on 1 to {gpus} GPUs, ms\n{'model':10} {'daemons x GPUs':>14} {'step':>9} "
          f"{'push':>9} {'pull':>9} {'imbalance':>10} {'efficiency':>11}", flush=True)
    rows = []
    for model in arguments.models.split(","):
        of_model = []
        for count in counts(gpus):
            for daemons, devices in {(1, count), (count, 1)}:
                row = measure(arguments, model, daemons, devices)
                if row is None:
                    continue
                of_model.append(row)
                if of_model[0]["daemons"] * of_model[0]["devices"] == 1:
                    show(row, of_model[0])
            if not arguments.no_torch and model in TORCH_NAMES:
                peer = torch_ms(TORCH_NAMES[model], count)
                if peer is not None:
                    print(f"{model:10} torch.optim.Muon on each of {count} ranks, gradients "
                          f"reduced before: {peer:.2f}", flush=True)
                    rows.append({"model": model, "torch_ranks": count, "step": peer})
        same = len({row["digest"] for row in of_model}) == 1
        gpu_service.report(same, f"{model}, one state by all ways",
                           ", ".join(sorted({row["digest"][:12] for row in of_model})))
        rows += of_model
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(gpu_service.FAILURES)} wrong" if gpu_service.FAILURES else "all ok")
    return 1 if gpu_service.FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
