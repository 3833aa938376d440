#!/usr/bin/env python3
"""The shipped Slurm scripts under a real Slurm of one node: munged, slurmctld and slurmd of this
test's own, in its scratch directory and on free ports. No systemd; the prolog's systemd-run is a
stand-in that starts the same command as the same user."""

import ctypes
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import unittest

from muond_process import ROOT, ProcessTest, program, wait_until

SCRIPTS = ROOT / "deploy/slurm"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
SBIN = "/usr/sbin:/sbin"
JOB_SECONDS = 60

CONFIG = """
ClusterName=muond
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
PropagateResourceLimits=NONE
Prolog={directory}/prolog
Epilog={directory}/epilog
TaskProlog={scripts}/task-prolog
PrologFlags=Alloc
NodeName={host} NodeAddr=127.0.0.1 CPUs=8
PartitionName=plain Nodes={host} Default=YES MaxTime=5 OverSubscribe=YES State=UP
PartitionName=served Nodes={host} MaxTime=5 OverSubscribe=YES State=UP
"""

# What systemd-run would do: the folder, the user, READY=1 awaited (by the socket, here).
SYSTEMD_RUN = """#!/bin/bash
set -eu
for word; do case $word in --unit=*) unit=${{word#*=}};; --uid=*) uid=${{word#*=}};; esac; done
while [[ $1 == --* ]]; do shift; done
install -d -m 700 -o "$uid" "/run/$unit"
echo "$@" > {directory}/$unit.command
setsid setpriv --reuid "$uid" --clear-groups "$@" </dev/null >{directory}/$unit.log 2>&1 &
echo $! > {directory}/$unit.pid
for ((i = 0; i < 200; ++i)); do [[ -S /run/$unit/muond.sock ]] && exit 0; sleep 0.1; done
exit 1
"""
SYSTEMCTL = """#!/bin/bash
set -eu
unit=${{*: -1}} unit=${{unit%.service}}
pid=$(cat {directory}/$unit.pid 2>/dev/null) || exit 3
[[ $* != *is-active* ]] || exec kill -0 "$pid"
kill -TERM "$pid"
for ((i = 0; i < 200; ++i)); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
rm -rf "/run/$unit"
"""


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def end_with_parent():
    """A test that is killed leaves no Slurm behind: SIGTERM when the parent has died."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def why_not():
    """Why this machine can't run it; None if it can."""
    path = f"{os.environ['PATH']}:{SBIN}"
    missing = [name for name in NEEDED if not shutil.which(name, path=path)]
    if missing:
        return f"not installed: {' '.join(missing)} (deploy/install-packages --test)"
    return None if os.geteuid() == 0 else "slurmd must be started by root"


class SlurmTest(ProcessTest):

    def setUp(self):
        self.directory.chmod(0o755)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("MUOND_", "SLURM_"))},
            "PATH": f"{pathlib.Path(program('muond')).parent}:{os.environ['PATH']}:{SBIN}",
            "SLURM_CONF": str(self.directory / "slurm.conf")}
        self.write("slurm.conf", CONFIG.format(
            host=socket.gethostname().split(".")[0], directory=self.directory, scripts=SCRIPTS,
            controller_port=free_port(), node_port=free_port()))
        self.write("slurm.env", 'MUOND_PARTITIONS="other,served"\nMUOND_FLAGS="--backend cpu"\n')
        for name in ("state", "spool", "bin"):
            (self.directory / name).mkdir()
        self.write("bin/systemd-run", SYSTEMD_RUN.format(directory=self.directory), 0o755)
        self.write("bin/systemctl", SYSTEMCTL.format(directory=self.directory), 0o755)
        path = f"{self.directory}/bin:{pathlib.Path(program('muond')).parent}:/usr/bin:/bin"
        for name in ("prolog", "epilog"):
            self.write(name, f"#!/bin/sh\nMUOND_SLURM_PATH={path} "
                       f"MUOND_SLURM_ENV={self.directory}/slurm.env exec {SCRIPTS}/{name}\n", 0o755)
        self.addCleanup(self.end_jobs)
        self.start_munge()
        self.start("slurmctld", "-D")
        self.start("slurmd", "-D")
        wait_until(lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%t"),
                   "slurmd's registration")

    def end_jobs(self):
        """Daemons that a failed epilog left behind."""
        for path in self.directory.glob("muond-job-*.pid"):
            subprocess.run([f"{self.directory}/bin/systemctl", "stop", path.stem], check=False,
                           stderr=subprocess.DEVNULL)

    def write(self, name, text, mode=0o644):
        path = self.directory / name
        path.write_text(text)
        path.chmod(mode)
        return path

    def start_munge(self):
        # munged trusts no key that others may read and no socket below a folder that others write.
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{what}={self.directory}/munge.{ending}" for what, ending in (
            ("key-file", "key"), ("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"),
            ("seed-file", "seed"))]
        self.start("munged", "--foreground", "--force", "--num-threads=2", *files)
        wait_until(lambda: (self.directory / "munge.sock").exists(), "munged's socket")

    def start(self, name, *arguments):
        with open(self.directory / f"{name}.out", "wb") as log:
            process = subprocess.Popen(  # pylint: disable=consider-using-with
                [shutil.which(name, path=self.environment["PATH"]), *arguments],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=end_with_parent)
        self.addCleanup(self.end, process)

    @staticmethod
    def end(process):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def ask(self, *command, timeout=20):
        return subprocess.run(command, env=self.environment, capture_output=True, text=True,
                              timeout=timeout, check=False).stdout

    def submit(self, *command, partition="plain", tasks=2, **environment):
        """Waits for the job; its exit code and what it printed."""
        output = self.directory / f"job-{time.monotonic_ns()}.out"
        done = subprocess.run(
            ["sbatch", "--parsable", "--nodes=1", f"--ntasks-per-node={tasks}",
             f"--partition={partition}", f"--output={output}", *map(str, command)],
            env={**self.environment, **environment}, capture_output=True, text=True,
            timeout=20, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

        # Not sbatch --wait, which looks every ten seconds or so.
        def ended():
            shown = self.ask("scontrol", "show", "job", done.stdout.strip())
            return re.search(r"JobState=(?:COMPLETED|FAILED|TIMEOUT|CANCELLED|NODE_FAIL)"
                             r"(?s:.*?)ExitCode=(\d+):", shown)

        try:
            code = int(wait_until(ended, "the job's end", JOB_SECONDS)[1])
        except AssertionError:
            print((self.directory / "slurmd.log").read_text(), file=sys.stderr)
            raise
        return code, output.read_text() if output.exists() else ""

    def bench(self):
        return ["bash", "-c", "exec muond-bench --model custom:16x8 --steps 3 --warmup 1 "
                "--no-ceilings --run rank-$SLURM_PROCID"]

    def left_behind(self):
        """Daemons of jobs that still run."""
        found = subprocess.run(["pgrep", "-af", "muond --listen unix:///(tmp|run)/muond-"],
                               capture_output=True, text=True, check=False).stdout
        return [line for line in found.splitlines() if "pgrep" not in line]

    def test_daemons_beside_trainers(self):
        code, text = self.submit(SCRIPTS / "train.sbatch", *self.bench(),
                                 MUOND_FLAGS="--backend cpu --threads 1")
        self.assertEqual(code, 0, text)
        self.assertEqual(text.count("unix:///tmp/muond-1/muond.sock"), 3,
                         "the daemon's line and one of each trainer: " + text)
        self.assertIn("SIGTERM: draining", text)
        self.assertIn("stopped", text)
        self.assertFalse(pathlib.Path("/tmp/muond-1").exists(), text)
        self.assertEqual(self.left_behind(), [])
        # Trainers that fail take no daemon with them, and their code is the job's.
        code, text = self.submit(SCRIPTS / "train.sbatch", "bash", "-c", "exit 7", tasks=1,
                                 MUOND_FLAGS="--backend cpu")
        self.assertEqual(code, 7, text)
        self.assertIn("stopped", text)
        self.assertEqual(self.left_behind(), [])
        code, text = self.submit(SCRIPTS / "train.sbatch", "true", tasks=1,
                                 MUOND_FLAGS="--backend nothing")
        self.assertEqual(code, 1, text)
        self.assertIn("a daemon ended at once", text)
        self.assertFalse(pathlib.Path("/tmp/muond-3").exists(), text)
        self.assertIn("backend", text)

    def test_prolog_and_epilog_of_a_partition(self):
        job = self.write("job", "#!/bin/bash\necho endpoint=$MUOND_ENDPOINT\n"
                         "srun bash -c 'echo task=$MUOND_ENDPOINT; " + self.bench()[2] + "'\n",
                         0o755)
        code, text = self.submit(job, partition="served", tasks=1)
        self.assertEqual(code, 0, text)
        self.assertIn("task=unix:///run/muond-job-1/muond.sock", text)
        wait_until(lambda: not pathlib.Path("/run/muond-job-1").exists(), "the epilog")
        self.assertIn("stopped", (self.directory / "muond-job-1.log").read_text())
        # Another partition: no daemon.
        job = self.write("job", "#!/bin/bash\nsrun bash -c 'echo task=$MUOND_ENDPOINT'\n", 0o755)
        code, text = self.submit(job, tasks=1)
        self.assertEqual((code, text.splitlines()[-1]), (0, "task="), text)
        self.assertEqual(sorted(path.name for path in self.directory.glob("*.command")),
                         ["muond-job-1.command"])


if __name__ == "__main__":
    if why_not():
        print(f"SKIPPED: {why_not()}", file=sys.stderr)
        sys.exit(77)
    unittest.main()
