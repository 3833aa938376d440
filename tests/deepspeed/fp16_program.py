"""fp16 with a loss scale on two ranks (DeepSpeed #8432): the steps that overflow change nothing,
and from the first that does not everything moves, with the service in a daemon."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.request

from ranks import FP16, ROOT, build, config, full, main, take

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file

sys.path.append(str(ROOT / "tests" / "e2e"))
from muond_process import Daemon, clean_environment, program  # noqa: E402

WIDTH, LAYERS, STEPS = 128, 5, 30
BACKEND = os.environ.get("MUOND_TEST_BACKEND", "cpu")


class Simple(torch.nn.Module):
    """Five layers; each is used beside an earlier one, so that activations and gradients grow."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, inputs, targets):
        for index, layer in enumerate(self.layers):
            inputs = self.layers[index // 2](inputs) + layer(inputs)
        return torch.nn.functional.cross_entropy(inputs, targets)


def loss_for(rank, device):
    def loss_of(engine, step, micro):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(4, WIDTH, generator=generator).half().to(device)
        targets = torch.randint(0, WIDTH, (4,), generator=generator).to(device)
        return engine(inputs, targets)
    return loss_of


class RankZeroDaemon:
    """A daemon of rank 0 that all ranks use."""

    def __init__(self, rank):
        self.folder = tempfile.TemporaryDirectory(prefix="muond-fp16-", dir="/tmp")
        box = [None]
        if rank == 0:
            os.mkdir(f"{self.folder.name}/checkpoints")
            self.daemon = Daemon("--backend", BACKEND, "--threads", "1", "--checkpoint-dir",
                                 f"{self.folder.name}/checkpoints", directory=self.folder.name)
            box[0] = self.daemon.unix
        dist.broadcast_object_list(box, src=0)
        self.rank, self.endpoint = rank, box[0]

    def metrics(self, run):
        """{outcome: steps} and {kind: non-finite tensors} of a run."""
        text = urllib.request.urlopen(f"{self.daemon.metrics}/metrics", timeout=10).read().decode()
        found = {"steps": {}, "nonfinite": {}}
        for name, key, label in (("muond_steps_total", "steps", "outcome"),
                                 ("muond_nonfinite_tensors", "nonfinite", "kind")):
            for line in text.splitlines():
                if line.startswith(name + "{") and f'run="{run}"' in line:
                    kind = re.search(f'{label}="([^"]*)"', line)[1]
                    found[key][kind] = float(line.rsplit(" ", 1)[1])
        return found

    def momentum(self, run):
        """(parameters whose momentum or first moment is finite, whose is not zero, all), from a
        checkpoint that the service writes."""
        done = subprocess.run(
            [program("muonctl"), "--endpoint", self.endpoint, "checkpoint", "save", "--run", run],
            env=clean_environment(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        newest = max(pathlib.Path(f"{self.folder.name}/checkpoints").rglob("manifest.json"),
                     key=lambda path: path.stat().st_mtime)
        moments = []
        for parameter in json.loads(newest.read_text(encoding="utf-8"))["parameters"]:
            for name, tensor in parameter["tensors"].items():
                if name in ("momentum", "exp_avg"):
                    moments.append(torch.cat([
                        load_file(newest.parent / piece["file"])[piece["key"]].reshape(-1)
                        for piece in tensor["pieces"]]))
        return (sum(bool(value.isfinite().all()) for value in moments),
                sum(bool(value.any()) for value in moments), len(moments))

    def stop(self):
        if self.rank == 0:
            self.daemon.stop()
        dist.barrier()


def moved(engine, before):
    """Parameters that differ, both in the model's own dtype."""
    now = full(engine)
    return sum(not torch.equal(value.half(), before[name].half()) for name, value in now.items())


def story(stage, scaling, steps, rank, device, decay=0.1):
    daemon = RankZeroDaemon(rank)
    run = f"fp16-{stage}-{len(scaling)}-{steps}"
    settings = config(stage, FP16, fp16=scaling, gradient_clipping=0.0)
    engine, optimizer = build(Simple, settings, run=run, lr=0.05, weight_decay=decay, local=False,
                              endpoint=daemon.endpoint)
    before = full(engine)
    scales, skipped = [], []
    losses = []
    for step in range(steps):
        scales.append(float(engine.optimizer.loss_scale if hasattr(engine.optimizer, "loss_scale")
                            else engine.optimizer.cur_scale))
        count = engine.skipped_steps
        losses += take(engine, optimizer, loss_for(rank, device), 1, first=step)[0]
        skipped.append(engine.skipped_steps > count)
    result = {"moved": moved(engine, before), "of": len(before), "scales": scales,
              "skips": skipped, "engine_skips": engine.skipped_steps,
              "dtype": str(next(engine.module.parameters()).dtype),
              "finite": all(bool(value.isfinite().all()) for value in full(engine).values())}
    if steps:
        result["calls"] = optimizer.last_outcome.newton_schulz_calls
        result["service_skips"] = optimizer.last_outcome.skipped_steps
        result["service_applied"] = optimizer.last_outcome.applied_steps
        dist.barrier()
        if rank == 0:
            result.update(daemon.metrics(run))
            result["momentum"] = daemon.momentum(run)
        dist.barrier()
        optimizer.close()
    engine.destroy()
    daemon.stop()
    return result


DYNAMIC = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 1}
STATIC = {"enabled": True, "loss_scale": 1}


def scenarios():
    found = {"zero_steps": lambda rank, device: story(2, DYNAMIC, 0, rank, device)}
    for stage in (0, 1, 2, 3):
        found[f"dynamic{stage}"] = (
            lambda rank, device, stage=stage: story(stage, DYNAMIC, STEPS, rank, device))
        found[f"static{stage}"] = (
            lambda rank, device, stage=stage: story(stage, STATIC, STEPS, rank, device))
    return found


if __name__ == "__main__":
    if not torch.cuda.is_available():
        # DeepSpeed says no where oneDNN has no fast fp16; torch computes it all the same.
        type(get_accelerator()).is_fp16_supported = lambda self: True
    main(scenarios())
