#!/usr/bin/env python3
"""Whose programs may use the daemon's unix socket: told by the kernel, whatever the folder's
mode."""

import os
import subprocess
import unittest

from muond_process import ProcessTest, clean_environment, program

NOT_ROOT = "" if os.geteuid() == 0 else "it takes root to be another user"
if NOT_ROOT:
    print(f"*** NOT ROOT ({NOT_ROOT}): other users of the unix socket are not tested. ***")

USER, GROUP = 4001, 5001


@unittest.skipIf(NOT_ROOT, NOT_ROOT)
class SocketUsersTest(ProcessTest):

    def ask(self, daemon, user, group):
        """What muonctl status says when that user calls through the socket."""
        identity = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
        return subprocess.run(
            [*identity, program("muonctl"), "--endpoint", daemon.unix, "--timeout", "10s",
             "status"],
            env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=60, check=False)

    def open_wide(self, daemon):
        """Takes the folder's guard away, and the file's."""
        os.chmod(self.directory, 0o755)
        os.chmod(daemon.socket, 0o777)

    def test_another_user_is_told_that_he_may_not(self):
        daemon = self.start_daemon()
        self.open_wide(daemon)
        answer = self.ask(daemon, USER, GROUP)
        self.assertNotEqual(answer.returncode, 0)
        self.assertIn("--socket-users", answer.stderr + answer.stdout)
        self.assertIn(f"user {USER} may not use the daemon of user 0", daemon.log())
        self.assertEqual(self.ask(daemon, 0, 0).returncode, 0)

    def test_who_is_named_or_of_a_named_group_gets_in(self):
        daemon = self.start_daemon("--socket-users", f"4444,@{GROUP}")
        self.open_wide(daemon)
        self.assertEqual(self.ask(daemon, 4444, 4444).returncode, 0)
        self.assertEqual(self.ask(daemon, USER, GROUP).returncode, 0)
        self.assertNotEqual(self.ask(daemon, USER, 5002).returncode, 0)


if __name__ == "__main__":
    unittest.main()
