"""Several muond processes that share their runs, on addresses of 127.0.0.0/8 that are this test
process's own, each behind a proxy where a test wants to disturb its connections."""

import itertools
import os
import pathlib
import signal

import grpc

from muond_process import Daemon, wait_until
from muond_stubs import optimizer, optimizer_grpc
from tcp_proxy import Proxy
from trainer_ranks import Trainer

_numbers = itertools.count()


def own_address():
    """An address that no other process of this machine's tests listens on."""
    pid, number = os.getpid(), next(_numbers)
    return f"127.{1 + pid // 250 % 250}.{1 + pid % 250}.{1 + number % 250}:{7070 + number // 250}"


def process_state(pid):
    """The letter of /proc: "T" is stopped."""
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return text.rsplit(")", 1)[1].split()[0]


class DaemonCluster:
    """Daemons that know each other, and the trainer ranks of their runs. `test` is a ProcessTest.

    `flags_of`: {daemon: further flags}. With `proxies` all that reaches a daemon, from trainers and
    from other daemons, goes through `proxy[daemon]`."""

    def __init__(self, test, daemons=3, *, flags=(), flags_of=None, proxies=False,
                 peers=None, addresses=None, listen="{}", prefixes=None, wait=True,
                 grace_seconds=1, environments=None):
        self.test = test
        self.pids = {}
        self.flags = tuple(flags)
        self.grace_seconds = grace_seconds  # of SIGTERM
        self.flags_of = flags_of or {}
        self.listen_as = listen  # "{}" is the address
        self.listen = addresses or [own_address() for _ in range(daemons)]
        self.prefixes = prefixes or [()] * daemons
        self.environments = environments or [None] * daemons
        self.names = [own_address() for _ in range(daemons)] if proxies else self.listen
        self.peers = ",".join(self.names) if peers is None else peers
        self.proxy = []
        if proxies:
            self.proxy = [Proxy(name, target, self.pids)
                          for name, target in zip(self.names, self.listen)]
            for proxy in self.proxy:
                test.addCleanup(proxy.close)
        self.daemons = [None] * daemons
        self.trainers = []
        for index in range(daemons):
            self._launch(index)
        if wait:
            self.wait_for_addresses()

    def wait_for_addresses(self):
        for daemon in self.daemons:
            daemon.wait_for_addresses()

    def _launch(self, index):
        flags = [*self.flags, *self.flags_of.get(index, ())]
        if self.peers:
            flags += ["--peers", self.peers]
            if self.listen_as == "{}":
                flags += ["--advertise", self.names[index]]
        daemon = Daemon(*flags, directory=self.test.directory,
                        listen=[self.listen_as.format(self.listen[index])],
                        prefix=self.prefixes[index], metrics="none", wait=False,
                        environment=self.environments[index],
                        grace_seconds=self.grace_seconds)
        self.test.daemons.append(daemon)
        self.test.addCleanup(self._end, daemon)
        self.daemons[index] = daemon
        self.pids[f"daemon-{index}"] = daemon.process.pid

    @staticmethod
    def _end(daemon):
        if daemon.process.poll() is None:
            daemon.process.send_signal(signal.SIGCONT)
        daemon.stop()

    def kill(self, index):
        """kill -9."""
        self.daemons[index].kill()

    def restart(self, index, flags=()):
        """One that knows nothing, at the old place."""
        self.flags_of[index] = tuple(flags)
        self._launch(index)
        self.daemons[index].wait_for_addresses()

    def stop(self, index):
        """SIGSTOP."""
        self.daemons[index].process.send_signal(signal.SIGSTOP)

    def resume(self, index):
        """SIGCONT."""
        self.daemons[index].process.send_signal(signal.SIGCONT)

    def stopped(self, index):
        """Whether it stands still: at a fault point that stops it, or by `stop`."""
        return process_state(self.daemons[index].process.pid) == "T"

    def wait_stopped(self, index):
        wait_until(lambda: self.stopped(index), f"daemon {index} to stop itself", 60)

    def start_ranks(self, count=4, run="run", home=0, prefixes=None, **options):
        """Trainer processes of one run; `options` are the program's, as `step_timeout=5`."""
        arguments = ["--endpoint", self.names[home], "--world", str(count), "--run", run]
        for name, value in options.items():
            flag = "--" + name.replace("_", "-")
            arguments += [flag] if value is True else [flag, str(value)]
        ranks = [self.start_rank(rank, run, arguments, prefixes[rank] if prefixes else ())
                 for rank in range(count)]
        self.trainers += ranks
        return ranks

    def start_rank(self, rank, run, arguments, prefix=()):
        """One of them, with the program's arguments as they are."""
        trainer = Trainer(rank, run, self.test.directory, arguments, self.pids, prefix)
        self.test.addCleanup(trainer.close)
        return trainer

    def ask(self, index, method, request, seconds=30):
        """One call of the optimizer service of a daemon, past its proxy."""
        with grpc.insecure_channel(self.listen[index],
                                   [("grpc.use_local_subchannel_pool", 1)]) as channel:
            return getattr(optimizer_grpc.OptimizerStub(channel), method)(request, timeout=seconds)

    def status(self, run="run", index=0, seconds=30):
        return self.ask(index, "Status", optimizer.StatusRequest(run=run), seconds).runs[0]

    def digest(self, run="run", index=0):
        return self.ask(index, "Digest", optimizer.DigestRequest(run=run)).tensor_digest
