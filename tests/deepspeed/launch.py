"""Runs a program on several ranks of this machine and collects what they report."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent


def free_port():
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(program, *arguments, ranks=2, timeout=600, environment=None, check=True):
    """[report of rank 0, report of rank 1, ...]; the texts of the failed ranks where it failed."""
    with tempfile.TemporaryDirectory(prefix="muond-deepspeed-") as folder:
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                  "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                  "LOCAL_SIZE": str(ranks),
                  "MUOND_REPORT": f"{folder}/report", "OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0",
                  "MUOND_SCRATCH": folder, **(environment or {})}
        texts = [open(f"{folder}/{rank}.txt", "w+", encoding="utf-8") for rank in range(ranks)]
        processes = [subprocess.Popen(
            [sys.executable, "-B", str(HERE / program), *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=texts[rank], stderr=subprocess.STDOUT) for rank in range(ranks)]
        failed = []
        try:
            end = time.monotonic() + timeout
            while not failed and any(process.poll() is None for process in processes):
                time.sleep(0.1)
                failed = [process.poll() for process in processes if process.poll()]
                if time.monotonic() > end:
                    failed = ["timeout"]
            failed = failed or [process.poll() for process in processes if process.poll()]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = []
        for rank, text in enumerate(texts):
            text.seek(0)
            said.append(f"--- rank {rank} ---\n{text.read()[-6000:]}")
            text.close()
        if failed:
            assert not check, "\n".join(said)
            return said
        return [json.loads(pathlib.Path(f"{folder}/report.{rank}").read_text(encoding="utf-8"))
                for rank in range(ranks)]
