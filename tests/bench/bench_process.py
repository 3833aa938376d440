"""muond-bench and muond as the measuring scripts run them, and what they say of the machine."""

import contextlib
import json
import os
import pathlib
import platform
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEFAULT_BIN = ROOT / "build" / "release" / "bin"


def machine():
    """One line: processor, its cores, and how busy it is with other things."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"


def run_bench(bin_dir, *arguments):
    """One run of muond-bench to its end; its JSON. A failed check of its own raises."""
    done = subprocess.run([str(bin_dir / "muond-bench"), *map(str, arguments), "--json", "-"],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"muond-bench {' '.join(map(str, arguments))}: exit code "
                           f"{done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


@contextlib.contextmanager
def daemon(bin_dir):
    """A muond on a unix socket of its own; yields its address."""
    with tempfile.TemporaryDirectory(prefix="muond-bench-", dir="/tmp") as folder:
        socket = pathlib.Path(folder) / "muond.sock"
        with subprocess.Popen([str(bin_dir / "muond"), "--listen", f"unix://{socket}",
                               "--metrics-address", "127.0.0.1:0", "--log-level", "warning"],
                              stdin=subprocess.DEVNULL) as process:
            try:
                deadline = time.monotonic() + 30
                while not socket.exists():
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError("muond did not start")
                    time.sleep(0.05)
                yield f"unix://{socket}"
            finally:
                process.terminate()


class PacedBench:
    """A muond-bench that waits for a word before each measured step."""

    def __init__(self, bin_dir, *arguments):
        self.process = subprocess.Popen(
            [str(bin_dir / "muond-bench"), *map(str, arguments), "--paced"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._read()

    def _read(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"muond-bench ended with {self.process.wait()}")
        return json.loads(line)

    def step(self):
        """Lets one step go; its times."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def close(self):
        """The exit code, after the last step."""
        with self.process:
            self.process.stdin.close()
        return self.process.returncode
