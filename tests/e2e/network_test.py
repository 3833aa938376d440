#!/usr/bin/env python3
"""Daemons and trainers in network namespaces: packets are lost, a host is cut off, and a DNS name
or a file says who the daemons are."""

import unittest

from daemon_cluster import DaemonCluster
from fault_story import undisturbed_digest
from muond_process import ProcessTest, wait_until
from network import NameServer, Network, missing

WHY_NOT = missing()
if WHY_NOT:
    print(f"*** NO NETWORK NAMESPACES HERE ({WHY_NOT}): tests of a lossy network are skipped. ***")

DAEMONS, RANKS = 3, 4
NAME = "muond-headless.test"


@unittest.skipIf(WHY_NOT, WHY_NOT)
class NamespaceTest(ProcessTest):

    def start(self, steps, peers=None, listen="{}", **options):
        """Each daemon and each rank on a host of its own."""
        self.network = Network(self, DAEMONS + RANKS)
        addresses = [f"{self.network.addresses[host]}:7070" for host in range(DAEMONS)]
        self.digest = undisturbed_digest(self, seed=5, steps=steps, skip_every=3)
        self.cluster = DaemonCluster(
            self, DAEMONS, addresses=addresses, peers=peers,
            flags=["--insecure", "--peer-patience", "1s"],
            prefixes=[self.network.prefix(host) for host in range(DAEMONS)], listen=listen)
        self.ranks = self.start_ranks(steps, **options)

    def start_ranks(self, steps, **options):
        return self.cluster.start_ranks(
            RANKS, steps=steps, seed=5, skip_every=3,
            prefixes=[self.network.prefix(DAEMONS + rank) for rank in range(RANKS)], **options)

    def finish(self):
        for trainer in self.ranks:
            trainer.wait_done()
            trainer.check_deadlines()
        for daemon in range(DAEMONS):
            self.assertEqual(self.cluster.digest(index=daemon), self.digest)

    def test_lost_packets_cost_time_only(self):
        self.start(6)
        for host in range(DAEMONS + RANKS):
            self.network.lose(host, 30)
        self.finish()
        for trainer in self.ranks:
            self.assertEqual(trainer.failures(), [])
        self.assertGreater(sum(map(self.network.lost, range(DAEMONS + RANKS))), 0)
        for host in range(DAEMONS + RANKS):
            self.network.lose(host, 0)

    def test_a_daemon_that_is_cut_off_is_named_and_the_run_goes_on_when_it_is_back(self):
        self.start(4, call_timeout=4, step_timeout=5, bulk_timeout=5)
        # Two ranks before Begin, two before Finish: all kinds of calls.
        for trainer, phase in zip(self.ranks, ("finish",) * 3 + ("push",)):
            trainer.hold(phase, 1)
            trainer.hold("failed")
        for trainer, phase in zip(self.ranks, ("finish",) * 3 + ("push",)):
            trainer.wait_held(phase, 1)
        self.network.lose(1, 1000)
        for trainer in self.ranks:
            trainer.say()
        for trainer in self.ranks:
            trainer.wait_held("failed")
            failure = trainer.failures()[-1]
            self.assertIn(failure["code"], ("UNAVAILABLE", "DEADLINE_EXCEEDED"), failure)
            self.assertIn(self.network.addresses[1], failure["message"])
            trainer.check_deadlines()
        self.network.lose(1, 0)
        for trainer in self.ranks:
            trainer.unhold()
            trainer.say("again")
        self.finish()

    def test_a_headless_service_names_the_daemons(self):
        """Its list is not complete when they start, and comes in another order each time."""
        network = self.network = Network(self, DAEMONS + RANKS)
        server = NameServer(self, network.gateway, NAME, network.addresses[:DAEMONS - 1])
        for host in range(DAEMONS):
            network.name_server(host)
        self.digest = undisturbed_digest(self, seed=5, steps=3, skip_every=3)
        self.cluster = DaemonCluster(
            self, DAEMONS, addresses=[f"{network.addresses[host]}:7070" for host in range(DAEMONS)],
            listen="0.0.0.0:7070", peers=f"dns:///{NAME}:7070",
            flags=["--insecure", "--peers-expected", DAEMONS],
            prefixes=[network.prefix(host) for host in range(DAEMONS)], wait=False)
        wait_until(lambda: server.asked >= DAEMONS, "all daemons to ask")
        for daemon in self.cluster.daemons:
            self.assertNotIn("listening", daemon.log())
        server.addresses = network.addresses[:DAEMONS]
        self.cluster.wait_for_addresses()
        self.ranks = self.start_ranks(3)
        self.finish()
        self.assertEqual(list(self.cluster.status().daemons), self.cluster.listen)


class PeersFileTest(ProcessTest):

    def test_a_file_names_the_daemons(self):
        self.digest = undisturbed_digest(self, seed=5, steps=3, skip_every=3)
        file = self.directory / "peers"
        cluster = DaemonCluster(self, DAEMONS, peers=f"@{file}", wait=False)
        # They ended at once: there was no file.
        for index, daemon in enumerate(cluster.daemons):
            self.assertNotEqual(daemon.wait(), 0)
            self.assertIn("cannot be read", daemon.log())
        file.write_text("# the daemons\n" + "\n".join(cluster.listen) + "\n\n")
        for index in range(DAEMONS):
            cluster.restart(index)
        ranks = cluster.start_ranks(RANKS, steps=3, seed=5, skip_every=3)
        for trainer in ranks:
            trainer.wait_done()
        self.assertEqual(cluster.digest(index=1), self.digest)
        self.assertEqual(list(cluster.status().daemons), cluster.listen)


if __name__ == "__main__":
    unittest.main()
