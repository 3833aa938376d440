#!/usr/bin/env python3
"""The same steps by torch.optim on the same GPU, and how many times faster muond was.

Times torch.optim.Muon with fused AdamW on the three models, fused AdamW alone on a billion
parameters, and torch's Newton-Schulz on the shapes of muond_cuda_benchmark; fp32 parameters,
gradients and state, as torch wants them. With --figures, puts muond's times from the same run
beside them.
"""

import argparse
import json
import statistics

import torch
from torch.optim._muon import _zeropower_via_newtonschulz

MODELS = {
    "llama1b": (16, [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048),
                     (8192, 2048), (2048, 8192)],
                [(128256, 2048), (2048,)], [(2048,), (2048,)]),
    "gpt2": (12, [(2304, 768), (768, 768), (3072, 768), (768, 3072)],
             [(50304, 768), (1024, 768)], []),
    "7b8": (8, [(4096, 4096)] * 4 + [(11008, 4096), (11008, 4096), (4096, 11008)],
            [(32000, 4096)], []),
}
SHAPES = [(1, 1024, 1024), (1, 2048, 2048), (1, 4096, 4096), (1, 8192, 8192), (1, 1024, 4096),
          (1, 2048, 8192), (1, 4096, 11008), (1, 4096, 16384), (16, 2048, 2048), (64, 1024, 1024),
          (128, 768, 3072), (64, 1408, 2048), (24, 2048, 7168)]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def milliseconds(call, repeats=5):
    """The median time of `call` on the device, after two calls for warming up."""
    call()
    call()
    times = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def parameter(shape):
    tensor = torch.nn.Parameter(torch.randn(shape, device="cuda") * 0.02)
    tensor.grad = torch.randn(shape, device="cuda") * 1e-3
    return tensor


def model_step(name):
    layers, matrices, rest, rest_of_layer = MODELS[name]
    muon = [parameter(shape) for _ in range(layers) for shape in matrices]
    others = [parameter(shape) for shape in rest]
    others += [parameter(shape) for _ in range(layers) for shape in rest_of_layer]
    optimizers = [torch.optim.Muon(muon, lr=1e-3), torch.optim.AdamW(others, lr=1e-3, fused=True)]

    def step():
        for optimizer in optimizers:
            optimizer.step()
    return milliseconds(step)


def newton_schulz(count, rows, cols):
    matrices = [torch.randn(rows, cols, device="cuda") for _ in range(count)]

    def run():
        for matrix in matrices:
            _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
    return milliseconds(run)


def adamw():
    tensors = [parameter((1 << 24,)) for _ in range(64)]
    return milliseconds(torch.optim.AdamW(tensors, lr=1e-3, fused=True).step)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", help="what muond_cuda_benchmark --figures wrote")
    ours = {}
    path = parser.parse_args().figures
    if path:
        with open(path, encoding="utf-8") as file:
            ours = json.load(file)
    print(f"\n== beside torch {torch.__version__} (ms)\n"
          f"{'':36} {'torch':>9} {'muond':>9} {'times faster':>13}")

    def row(label, time, figure):
        mine = ours.get(figure)
        print(f"{label:36} {time:9.3f} {mine:9.3f} {time / mine:13.2f}" if mine
              else f"{label:36} {time:9.3f} {'-':>9}", flush=True)

    for name in MODELS:
        time = model_step(name)
        torch.cuda.empty_cache()
        row(f"step {name}, fp32 gradients", time, f"step {name} f32 ms")
        row(f"step {name}, ours from bf16 gradients", time, f"step {name} bf16 ms")
    time = adamw()
    torch.cuda.empty_cache()
    row("fused adamw, 2^30 fp32 parameters", time, "elementwise adamw f32 -> w, m, v ms")
    for count, rows, cols in SHAPES:
        label = f"{count} x {rows} x {cols}"
        row(f"newton-schulz {label}", newton_schulz(count, rows, cols),
            f"newton-schulz {label} ms")


if __name__ == "__main__":
    main()
