#!/usr/bin/env python3
"""A step through the daemon with gradients and parameters in GPU memory, by each data path.

usage: tests/bench/gpu_paths.py --bin DIR [--libraries PATH] [--models gpt2,llama1b,7b8]
                                [--dtypes bf16,f32] [--steps 8] [--no-torch] [--json FILE]

  --bin DIR         muond, muond-bench and muond_cuda_benchmark
  --libraries PATH  LD_LIBRARY_PATH of these, and of nothing else

Prints one table: the backend's own step in-process (the bare engine), a whole step by CUDA IPC from
another process (gradients ready, to new parameters there), what is exposed behind the last gradient
when they become ready one by one, with the daemon's overlap off and on, the same by gRPC, and
torch.optim.Muon + fused AdamW. Exits with 1 when a path fails or leads to another state.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import gpu_service  # noqa: E402

AIMS = {"gpt2": 2.4, "llama1b": 42.0, "7b8": 155.0}
# What backward takes, roughly, of a step of each: gradients are ready one by one over this long.
BACKWARD_MS = {"gpt2": 15, "llama1b": 120, "7b8": 250}
TORCH = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, torch_gpu_step
print(json.dumps({m: torch_gpu_step.model_step(m) for m in sys.argv[2].split(',')}))
"""


def bench(arguments, endpoint, *more):
    done = subprocess.run(
        [str(arguments.bin / "muond-bench"), "--endpoint", endpoint, "--no-ceilings", "--json", "-",
         "--steps", str(arguments.steps), *map(str, more)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        env=gpu_service.ENVIRONMENT)
    if not done.stdout.startswith("{"):
        gpu_service.report(False, " ".join(map(str, more)), done.stderr.strip()[-400:])
        return None
    result = json.loads(done.stdout)
    if done.returncode != 0:
        gpu_service.report(False, " ".join(map(str, more)), done.stderr.strip()[-400:])
    return result


def milliseconds(result, transport):
    """Of the phases together, and what each path ended in."""
    if result is None:
        return None
    transport = result["transports"][transport]
    return {"step": transport["step_ms"], "exposed": transport["exposed_ms"],
            "digest": transport["digest"]}


def measure(arguments, model, dtype):
    row = {"model": model, "dtype": dtype}
    common = ("--model", model, "--dtype", dtype, "--gpu", 0)
    with gpu_service.Daemon(arguments.bin) as daemon:
        both = bench(arguments, daemon.endpoint, *common, "--transport", "ipc,grpc")
        row["ipc"] = milliseconds(both, "cuda-ipc")
        row["grpc"] = milliseconds(both, "grpc")
        late = bench(arguments, daemon.endpoint, *common, "--transport", "ipc", "--backward-ms",
                     BACKWARD_MS[model])
        row["overlap off"] = milliseconds(late, "cuda-ipc")
    with gpu_service.Daemon(arguments.bin, "--overlap") as daemon:
        early = bench(arguments, daemon.endpoint, *common, "--transport", "ipc", "--backward-ms",
                      BACKWARD_MS[model])
        row["overlap on"] = milliseconds(early, "cuda-ipc")
    digests = {row[way]["digest"] for way in ("ipc", "grpc", "overlap off", "overlap on")
               if row[way] is not None}
    gpu_service.report(len(digests) == 1, f"{model} {dtype}, one state by all ways",
                       ", ".join(digest[:12] for digest in digests))
    return row


def bare_steps(arguments):
    """Of the backend in-process, by model and dtype."""
    with tempfile.NamedTemporaryFile(suffix=".json") as figures:
        subprocess.run([str(arguments.bin / "muond_cuda_benchmark"), "--figures", figures.name,
                        "steps"], check=False, stdout=subprocess.DEVNULL,
                       env=gpu_service.ENVIRONMENT)
        text = pathlib.Path(figures.name).read_text()
    return json.loads(text) if text else {}


def torch_steps(models):
    done = subprocess.run([sys.executable, "-c", TORCH, str(HERE), ",".join(models)],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"torch: {done.stderr.strip()[-300:]}")
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def text(value, form="{:.2f}"):
    return "-" if value is None else form.format(value)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--libraries")
    parser.add_argument("--models", default="gpt2,llama1b,7b8")
    parser.add_argument("--dtypes", default="bf16,f32")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.libraries:
        gpu_service.ENVIRONMENT["LD_LIBRARY_PATH"] = arguments.libraries
    models = arguments.models.split(",")
    bare = bare_steps(arguments)
    peers = {} if arguments.no_torch else torch_steps(models)
    print("== a step with gradients and parameters on one GPU, ms\n"
          f"{'':14}{'bare':>8}{'ipc':>8}{'aim':>8}{'over bare':>11}"
          f"{'exposed, overlap off':>22}{'on':>8}{'grpc':>9}{'torch':>9}", flush=True)
    rows = []
    for dtype in arguments.dtypes.split(","):
        for model in models:
            row = measure(arguments, model, dtype)
            row["bare"] = bare.get(f"step {model} {dtype} ms")
            row["torch"] = peers.get(model)
            rows.append(row)
            ipc = row["ipc"] and row["ipc"]["step"]
            over = ipc and row["bare"] and f"{100 * (ipc / row['bare'] - 1):+.1f} %"
            exposed = [row[f"overlap {word}"] and row[f"overlap {word}"]["exposed"]
                       for word in ("off", "on")]
            print(f"{model + ' ' + dtype:14}{text(row['bare']):>8}{text(ipc):>8}"
                  f"{AIMS[model]:>8}{over or '-':>11}{text(exposed[0]):>22}{text(exposed[1]):>8}"
                  f"{text(row['grpc'] and row['grpc']['step'], '{:.0f}'):>9}"
                  f"{text(row['torch'], '{:.1f}'):>9}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(gpu_service.FAILURES)} wrong" if gpu_service.FAILURES else "all ok")
    return 1 if gpu_service.FAILURES else 0


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
