#!/usr/bin/env python3
"""A small GPT trained by torch.optim.Muon with AdamW and by muond: losses, step times, memory.

usage: PYTHON tests/bench/torch_training.py [--endpoint ADDRESS] [--device cuda] [--json FILE]
       tests/bench/torch_training.py --plot FILE.json FILE.png

PYTHON is one that has torch >= 2.9. Without --endpoint the service lives in this process. Both see
the same start and the same data for each seed, byte by byte; the text is Python's standard library.
`step` is all of an iteration, `exposed` what the optimizer's step() takes of it, the device waited
for at both ends; medians after five warm-up steps. `memory` is torch's peak on its device, `device`
what everybody has of it at the end, the daemon included.
"""

import argparse
import datetime
import gc
import json
import pathlib
import statistics
import sysconfig
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MUON = {"lr": 0.02, "weight_decay": 0.01}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}
WARMUP = 5


def corpus(size):
    """The first bytes of the standard library's sources."""
    folder, data = pathlib.Path(sysconfig.get_paths()["stdlib"]), bytearray()
    for path in sorted(folder.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= size:
            break
    return data[:size]


class Training:
    """One model, one optimizer, one seed."""

    def __init__(self, way, seed, arguments):
        import torch
        from char_lm import CharLM, batches
        self.torch, self.way = torch, way
        self.device = torch.device(arguments.device)
        torch.manual_seed(seed)
        self.model = CharLM(256, arguments.width, arguments.layers, arguments.width // 64 or 1,
                            arguments.context).to(self.device)
        tokens = torch.frombuffer(corpus(4_000_000), dtype=torch.uint8).long()
        self.data = batches(tokens, arguments.context, arguments.batch, seed)
        self.optimizers = self._optimizers(seed, arguments)

    def _optimizers(self, seed, arguments):
        torch = self.torch
        if self.way == "muond":
            import muond.torch
            return [muond.torch.Muon(self.model, **MUON, adamw=ADAMW, run=f"gpt-{seed}",
                                     endpoint=arguments.endpoint, local=not arguments.endpoint,
                                     backend="auto")]
        hidden = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        chosen = set(map(id, hidden))
        rest = [p for p in self.model.parameters() if id(p) not in chosen]
        return [torch.optim.Muon(hidden, **MUON),
                torch.optim.AdamW(rest, **ADAMW, fused=self.device.type == "cuda")]

    def _now(self):
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def run(self, steps):
        """Losses, and seconds of each step and of its exposed part."""
        torch, losses, times, exposed = self.torch, [], [], []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(steps):
            start = self._now()
            inputs, targets = (part.to(self.device) for part in next(self.data))
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.model(inputs)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            ready = self._now()
            for optimizer in self.optimizers:
                optimizer.step()
            end = self._now()
            losses.append(loss.item())
            times.append(end - start)
            exposed.append(end - ready)
        memory = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        used = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            used = total - free
        return {"device_bytes": used, "loss": losses,
                "step_ms": 1e3 * statistics.median(times[WARMUP:]),
                "exposed_ms": 1e3 * statistics.median(exposed[WARMUP:]), "memory_bytes": memory}

    def close(self):
        """The run's description, where there is one; frees everything."""
        words = ""
        if self.way == "muond":
            words = self.optimizers[0].describe()
            self.optimizers[0].close()
        self.model = self.optimizers = None
        gc.collect()  # what refers to itself would count in the next one's memory
        return words


def show(result):
    """The table for people."""
    print(f"\n{result['model']}\n{result['machine']}, torch {result['torch']}, {result['date']}\n")
    print(f"{'':8}{'seed':>5}{'last loss':>11}{'step ms':>10}{'exposed ms':>12}{'memory MiB':>12}"
          f"{'device MiB':>12}")
    for run in result["runs"]:
        print(f"{run['way']:8}{run['seed']:5}{statistics.mean(run['loss'][-10:]):11.4f}"
              f"{run['step_ms']:10.2f}{run['exposed_ms']:12.2f}{run['memory_bytes'] / 2**20:12.0f}"
              f"{run['device_bytes'] / 2**20:12.0f}")
    times = {way: statistics.median(run["exposed_ms"] for run in result["runs"]
                                    if run["way"] == way) for way in ("torch", "muond")}
    print(f"\nexposed time, torch / muond: {times['torch'] / times['muond']:.3f}")


def plot(source, target):
    """Mean and range over the seeds, by steps and by seconds."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot
    result = json.loads(pathlib.Path(source).read_text())
    _, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for way, color in (("torch", "tab:orange"), ("muond", "tab:blue")):
        runs = [run for run in result["runs"] if run["way"] == way]
        columns = list(zip(*(run["loss"] for run in runs)))
        mean = [statistics.mean(column) for column in columns]
        seconds = statistics.median(run["step_ms"] for run in runs) / 1e3
        for axis, scale in zip(axes, (1, seconds)):
            x = [scale * step for step in range(len(mean))]
            axis.plot(x, mean, color=color, label=way, linewidth=1)
            axis.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=color,
                              alpha=0.2)
    axes[0].set(xlabel="step", ylabel="loss", title=result["model"])
    axes[1].set(xlabel="seconds", title=f"{result['machine']}, {result['date']}")
    axes[0].legend()
    pyplot.tight_layout()
    pyplot.savefig(target, dpi=110)


def main():
    import sys
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--endpoint", help="of a daemon on this machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=pathlib.Path, help="write the result there, too")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "PNG"), help="draw a former result")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(*arguments.plot)
        return
    sys.path[:0] = [str(ROOT / "client" / "python"), str(ROOT / "client" / "python" / "examples")]
    import torch
    runs, words = [], ""
    for seed in range(1, arguments.seeds + 1):
        for way in ("torch", "muond"):
            training = Training(way, seed, arguments)
            parameters = sum(p.numel() for p in training.model.parameters())
            runs.append({"way": way, "seed": seed, **training.run(arguments.steps)})
            words = training.close() or words
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    result = {"date": datetime.date.today().isoformat(), "machine": machine,
              "torch": torch.__version__, "runs": runs,
              "model": f"GPT of {parameters / 1e6:.1f} million parameters, batch "
                       f"{arguments.batch} x {arguments.context}"}
    print(words[words.find("\nrun  "):])
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
