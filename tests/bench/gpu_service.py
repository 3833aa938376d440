#!/usr/bin/env python3
"""The daemon on a machine with GPUs: what it picks, what it holds, what it refuses, how fast it is.

usage: tests/bench/gpu_service.py --bin DIR [--libraries PATH] [--models gpt2,llama1b,7b8]
                                  [--steps 5]

  --bin DIR         muond, muond-bench and muonctl
  --libraries PATH  LD_LIBRARY_PATH of these, and of nothing else

Prints one line a check, `ok` or `WRONG`, and exits with 1 when anything is wrong.
"""

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

MIB = 1 << 20
MEMORY_TOLERANCE = 0.05
FAILURES = []
ENVIRONMENT = dict(os.environ)  # of the programs


def report(good, what, detail):
    if not good:
        FAILURES.append(what)
    print(f"{'ok   ' if good else 'WRONG'} {what}: {detail}", flush=True)


class Gpu:
    """The CUDA runtime of the machine, for what nvidia-smi says in MiB only."""

    def __init__(self):
        home = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
        names = [str(path) for path in sorted(home.glob("lib64/libcudart.so*"))]
        self.runtime = ctypes.CDLL((names or ["libcudart.so"])[-1])
        self.check(self.runtime.cudaFree(None))  # the context of this process, once and for all

    @staticmethod
    def check(error):
        if error != 0:
            raise RuntimeError(f"CUDA error {error}")

    def free_bytes(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.check(self.runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)))
        return free.value

    @contextlib.contextmanager
    def taken(self, count):
        """`count` bytes are somebody else's meanwhile."""
        memory = ctypes.c_void_p()
        self.check(self.runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(count)))
        try:
            yield
        finally:
            self.check(self.runtime.cudaFree(memory))


class LeastFree(threading.Thread):
    """Watches free memory from start() to stop(), which returns the least that was seen."""

    def __init__(self, gpu):
        super().__init__(daemon=True)
        self.gpu, self.least, self.done = gpu, gpu.free_bytes(), threading.Event()

    def run(self):
        while not self.done.wait(0.005):
            self.least = min(self.least, self.gpu.free_bytes())

    def stop(self):
        self.done.set()
        self.join()
        return self.least


class Daemon:
    def __init__(self, bin_dir, *arguments, environment=None):
        self.folder = tempfile.TemporaryDirectory(prefix="muond-gpu-", dir="/tmp")
        self.socket = pathlib.Path(self.folder.name) / "muond.sock"
        self.log = pathlib.Path(self.folder.name) / "log"
        listen = arguments if "--listen" in arguments else ("--listen", self.endpoint, *arguments)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [str(bin_dir / "muond"), "--metrics-address", "none", *listen],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**ENVIRONMENT, **(environment or {})})

    @property
    def endpoint(self):
        return f"unix://{self.socket}"

    def wait(self):
        deadline = time.monotonic() + 60
        while "listening on" not in self.text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"muond did not start: {self.text()}")
            time.sleep(0.05)
        return self

    def text(self):
        return self.log.read_text(errors="replace")

    def line_with(self, word):
        return next((line for line in self.text().splitlines() if word in line), "")

    def __enter__(self):
        return self.wait()

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=60)
        self.folder.cleanup()


def bench(bin_dir, *arguments):
    """The JSON of a muond-bench, or what it said when it failed."""
    done = subprocess.run([str(bin_dir / "muond-bench"), *map(str, arguments), "--no-ceilings",
                           "--dtype", "bf16", "--json", "-"], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False, env=ENVIRONMENT)
    return (json.loads(done.stdout) if done.stdout.startswith("{") else None), done.stderr.strip()


def plan_bytes(bin_dir, model):
    done = subprocess.run([str(bin_dir / "muonctl"), "-o", "json", "plan", "--model", model,
                           "--backend", "cuda", "--dtype", "bf16"], capture_output=True, text=True,
                          check=True, env=ENVIRONMENT)
    return json.loads(done.stdout)["daemons"][0]["memory_bytes"]


def describe(result):
    phases = result["phases"]
    times = ", ".join(f"{name} {phases[name]['median_seconds'] * 1e3:.1f}"
                      for name in ("push", "step", "pull"))
    return f"{times} ms; backend {result['backend']}, digest {digest(result)[:12]}"


def digest(result):
    return next(iter(result["transports"].values()))["digest"]


def check_result(what, result, said):
    if result is None:
        report(False, what, said)
        return False
    report(result["check"]["passed"] and result["backend"] == "cuda", what, describe(result))
    return True


def measure_model(bin_dir, gpu, endpoint, model, steps):
    """Step time and memory of a model, through a daemon that serves nothing else."""
    before = gpu.free_bytes()
    watch = LeastFree(gpu)
    watch.start()
    result, said = bench(bin_dir, "--endpoint", endpoint, "--model", model, "--steps", steps)
    used = before - watch.stop()
    if not check_result(f"{model}, through a unix socket", result, said):
        return None
    planned = plan_bytes(bin_dir, model)
    report(abs(used / planned - 1) <= MEMORY_TOLERANCE, f"{model}, memory",
           f"held {used / MIB:.0f} MiB at its peak, muonctl plan says {planned / MIB:.0f} "
           f"({100 * (used / planned - 1):+.1f} %)")
    return result


def check_refusal(bin_dir, gpu, endpoint, model, left):
    """With only `left` bytes of the device free, a run is refused and leaves nothing behind."""
    free = gpu.free_bytes()
    with gpu.taken(free - left):
        before = gpu.free_bytes()
        watch = LeastFree(gpu)
        watch.start()
        result, said = bench(bin_dir, "--endpoint", endpoint, "--model", model, "--steps", 1)
        least = watch.stop()
        refused = result is None and "needs" in said and "free" in said
        report(refused, "registration without enough memory", said[-300:])
        report(before - gpu.free_bytes() == 0 and before - least == 0,
               "a refused run takes nothing", f"free before {before}, least {least}, "
               f"after {gpu.free_bytes()} bytes")
    result, said = bench(bin_dir, "--endpoint", endpoint, "--model", "tiny", "--steps", 1)
    check_result("a run after a refused one", result, said)


def check_lost_device(bin_dir, gpu):
    """A kernel traps in a commit: the daemon says so and ends, its memory comes back, and a new
    process has the device."""
    free = gpu.free_bytes()
    with Daemon(bin_dir, "--fault-points", "kernel_trap:2") as daemon:
        trainer = subprocess.Popen(
            [str(bin_dir / "muond-bench"), "--endpoint", daemon.endpoint, "--model", "tiny",
             "--no-ceilings"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=ENVIRONMENT)
        try:
            code = daemon.process.wait(timeout=60)
        finally:
            trainer.kill()  # it would wait for a daemon that comes back
            trainer.wait()
        last = daemon.text().strip().splitlines()[-1]
        report(code == 3 and "can't use the device any more" in last, "a kernel that traps",
               f"exit code {code}: {last[-330:]}")
    report(gpu.free_bytes() >= free, "memory of a lost device",
           f"{free} bytes free before, {gpu.free_bytes()} after")
    with Daemon(bin_dir) as daemon:
        result, said = bench(bin_dir, "--endpoint", daemon.endpoint, "--model", "tiny",
                             "--steps", 2)
        check_result("a run of the next process", result, said)


def check_one_gpu(arguments):
    bin_dir, gpu = arguments.bin, Gpu()
    with Daemon(bin_dir) as daemon:
        choice = daemon.line_with("cuda")
        report("cuda" in choice, "auto with a device", choice.strip()[-160:])
        digests = {}
        for model in arguments.models.split(","):
            # A daemon of its own: a backend keeps the scratch of the largest run so far.
            with Daemon(bin_dir) as fresh:
                result = measure_model(bin_dir, gpu, fresh.endpoint, model, arguments.steps)
                digests[model] = result and digest(result)
        check_refusal(bin_dir, gpu, daemon.endpoint, "gpt2", 1024 * MIB)
    check_lost_device(bin_dir, gpu)
    model = arguments.models.split(",")[0]
    result, said = bench(bin_dir, "--in-process", "--backend", "auto", "--model", model,
                         "--steps", arguments.steps)
    if check_result(f"{model}, in-process", result, said):
        report(digest(result) == digests[model], f"{model}, in-process and through a socket",
               "the same digest" if digest(result) == digests[model] else "DIFFERENT digests")
    with Daemon(bin_dir, environment={"CUDA_VISIBLE_DEVICES": ""}) as hidden:
        choice = hidden.line_with("no CUDA here")
        report("cpu" in hidden.text() and choice, "auto without a device", choice.strip()[-160:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--models", default="gpt2,llama1b,7b8")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--libraries")
    arguments = parser.parse_args()
    if arguments.libraries:
        ENVIRONMENT["LD_LIBRARY_PATH"] = arguments.libraries
    print("== the service")
    check_one_gpu(arguments)
    print(f"{len(FAILURES)} wrong" if FAILURES else "all ok")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
