#!/usr/bin/env python3
"""The systemd unit: what systemd's own tools say of it, and that the daemon does its part of it, to
a socket that stands in for systemd."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import unittest

from muond_process import ROOT, ProcessTest, program, run_program, wait_until

UNITS = ROOT / "deploy/systemd"
EXPOSURE_MAX = 2.0


class Notified:
    """Receives what a daemon tells systemd."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.environment = {"NOTIFY_SOCKET": str(path)}

    def next(self, seconds):
        """The next message, or None."""
        self.socket.settimeout(seconds)
        try:
            return self.socket.recv(4096).decode()
        except TimeoutError:
            return None


class DaemonTest(ProcessTest):

    def start_notifying(self, watchdog_ms):
        notified = Notified(self.directory / "notify")
        self.addCleanup(notified.socket.close)
        environment = {**notified.environment, "WATCHDOG_USEC": str(watchdog_ms * 1000)}
        daemon = self.start_daemon("--backend", "reference", environment=environment)
        self.assertIn("READY=1", notified.next(30))
        return daemon, notified

    def test_it_says_ready_alive_and_stopping(self):
        daemon, notified = self.start_notifying(watchdog_ms=600)
        for _ in range(3):
            self.assertEqual(notified.next(20), "WATCHDOG=1")
        daemon.terminate()
        messages = []
        while message := notified.next(5):
            messages.append(message)
            if "STOPPING" in message:
                break
        self.assertIn("STOPPING=1", messages[-1])

    def test_a_daemon_that_hangs_falls_silent(self):
        daemon, notified = self.start_notifying(watchdog_ms=300)
        self.assertEqual(notified.next(20), "WATCHDOG=1")
        daemon.process.send_signal(signal.SIGSTOP)
        while notified.next(0.5):
            pass
        self.assertIsNone(notified.next(1))
        daemon.process.send_signal(signal.SIGCONT)
        self.assertEqual(notified.next(20), "WATCHDOG=1")


class FilesTest(ProcessTest):
    """The unit and its neighbours, by systemd's own judgement."""

    def tree(self):
        """A root directory with the files at their places."""
        root = self.directory / "root"
        for source, place in (("muond@.service", "usr/lib/systemd/system/muond@.service"),
                              ("start-instance", "usr/lib/muond/start-instance"),
                              ("sysusers.conf", "usr/lib/sysusers.d/muond.conf"),
                              ("tmpfiles.conf", "usr/lib/tmpfiles.d/muond.conf")):
            target = root / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(UNITS / source, target)
        for name in ("sysinit", "basic", "shutdown", "network-online", "multi-user"):
            (root / f"usr/lib/systemd/system/{name}.target").write_text("[Unit]\n")
        return root

    def check(self, *command):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_the_unit_is_valid(self):
        root = self.tree()
        said = self.check("systemd-analyze", "verify", "--man=no", f"--root={root}",
                          "muond@0.service")
        self.assertEqual(said, "")

    def test_the_unit_is_hardened(self):
        root = self.tree()
        unit = self.directory / "muond@0.service"
        shutil.copy(root / "usr/lib/systemd/system/muond@.service", unit)
        said = self.check("systemd-analyze", "security", "--offline=true",
                          f"--threshold={EXPOSURE_MAX * 10:.0f}", unit)
        self.assertRegex(said, r"exposure level for muond@0.service: [01]\.\d OK")

    def test_what_cuda_needs_is_left_open(self):
        text = (UNITS / "muond@.service").read_text()
        for setting in ("PrivateDevices", "PrivateIPC", "PrivateUsers", "MemoryDenyWriteExecute",
                        "ProtectProc"):
            self.assertNotRegex(text, rf"(?m)^{setting}=")
        self.assertRegex(text, r"(?m)^RestrictAddressFamilies=.*AF_NETLINK")
        self.assertRegex(text, r"(?m)^DeviceAllow=char-nvidia-uvm rw")

    def test_the_time_to_stop_covers_draining(self):
        text = (UNITS / "muond@.service").read_text()
        stop = int(re.search(r"TimeoutStopSec=(\d+)s", text)[1])
        grace = int(re.search(r'drain-grace = "(\d+)s"',
                              (ROOT / "deploy/muond.conf").read_text())[1])
        self.assertGreaterEqual(stop, 2 * grace)

    def test_user_and_folders(self):
        root = self.tree()
        (root / "etc").mkdir()
        self.check("systemd-sysusers", f"--root={root}")
        self.assertRegex((root / "etc/passwd").read_text(), r"(?m)^muond:.*:/var/lib/muond:")
        if os.geteuid() != 0:
            self.skipTest("SKIPPED: folders with owners can be made by root only")
        self.check("systemd-tmpfiles", "--create", f"--root={root}", "muond.conf")
        self.assertEqual((root / "etc/muond").stat().st_mode & 0o777, 0o750)

    def test_an_instance_finds_its_configuration(self):
        """The script with the paths of a root below this test's folder."""
        root = self.directory
        (root / "etc/muond").mkdir(parents=True)
        shutil.copy(ROOT / "deploy/muond.conf", root / "etc/muond/muond.conf")
        (root / "etc/muond/b.conf").write_text('listen = ["127.0.0.1:4444"]\n')
        script = (UNITS / "start-instance").read_text()
        script = script.replace("/etc/muond", f"{root}/etc/muond").replace(
            "exec /usr/bin/muond", f"exec {program('muond')} --print-config")
        instance = root / "start-instance"
        instance.write_text(script)

        def listen(name, **environment):
            return re.search(r"listen = (.*?)  #", self.check(
                "env", *[f"{k}={v}" for k, v in environment.items()], "sh", instance, name))[1]

        self.assertEqual(listen("a"), '["unix:///run/muond-a/muond.sock"]')
        self.assertEqual(listen("a", MUOND_LISTEN="127.0.0.1:5"), '["127.0.0.1:5"]')
        self.assertEqual(listen("b"), '["127.0.0.1:4444"]')


class ConfigFileTest(ProcessTest):

    def test_every_setting_stands_in_the_shipped_file_with_a_comment(self):
        printed = run_program("muond", "--print-config").stdout
        names = set(re.findall(r"(?m)^([a-z-]+) = ", printed)) - {"fault-points"}
        commented = set()
        comment = False  # one stands above, or above the settings between
        for line in (ROOT / "deploy/muond.conf").read_text().splitlines():
            if not line.strip():
                comment = False
            elif line.startswith("#"):
                comment = True
            elif comment or "  #" in line:
                commented.add(line.split(" = ")[0])
        self.assertEqual(names - commented, set())


if __name__ == "__main__":
    if not shutil.which("systemd-analyze"):
        print("SKIPPED: systemd-analyze is not installed", file=sys.stderr)
        sys.exit(77)
    unittest.main()
