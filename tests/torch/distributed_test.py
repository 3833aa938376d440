"""DDP, FSDP2, HSDP and tensor parallelism under torchrun with gloo: every way of cutting a model
over ranks trains it as one process does."""

import itertools
import math
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest

from harness import LONG, TorchTest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from muond.torch import layout
from muond.torch.binding import Binding

PROGRAM = pathlib.Path(__file__).with_name("distributed_program.py")


def run(way, ranks, *arguments, at_step=None, at_death=None):
    """What rank 0 of a training ends with. `at_step`: called with each step that it prints,
    `at_death`: likewise, when it has killed the daemon."""
    with tempfile.TemporaryDirectory(prefix="muond-torch-") as folder:
        out = pathlib.Path(folder) / "out.pt"
        launcher = [] if ranks == 0 else [
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        with open(pathlib.Path(folder) / "log", "w+", encoding="utf-8") as log, subprocess.Popen(
                [sys.executable, "-B", *launcher, str(PROGRAM), way, str(out),
                 *map(str, arguments)], stdout=subprocess.PIPE, stderr=log, text=True) as process:
            watchdog = threading.Timer(300, process.kill)
            watchdog.start()
            for line in process.stdout:
                if at_step and line.startswith("step "):
                    at_step(int(line.split()[1]))
                if line.startswith("killed "):
                    at_death(int(line.split()[1]))
            code = process.wait()
            watchdog.cancel()
            log.seek(0)
            assert code == 0, f"{way} on {ranks}:\n{log.read()[-6000:]}"
        return torch.load(out)


class Distributed(TorchTest):
    @classmethod
    def setUpClass(cls):
        cls.alone = run("alone", 0)

    def check(self, way, ranks, words=(), endpoint=None, alone=None, calls=4):
        result, alone = run(way, ranks, *([endpoint] if endpoint else [])), alone or self.alone
        self.assertEqual(result["applied"], alone["applied"])
        self.assertEqual(result["calls"], calls)
        # Both algorithms are blind to a gradient's scale; the norm is not.
        self.assertAlmostEqual(result["norm"] / alone["norm"], 1, delta=1e-3, msg=way)
        for name, value in alone["parameters"].items():
            # Gradients are means of means: the last bits differ, and steps carry them on.
            torch.testing.assert_close(result["parameters"][name], value, rtol=0, atol=2e-4,
                                       msg=lambda m: f"{way} on {ranks}: {name}: {m}")
        for word in words:
            self.assertIn(word, result["describe"])
        return result

    def test_ddp(self):
        self.check("ddp", 2, ["rank 0 of 2", "all"])

    def test_fsdp_uneven_on_3_ranks_through_a_daemon(self):
        daemon = self.daemon()
        self.check("fsdp", 3, ["[4, 8]", "[1, 8]", "[6, 8]"], endpoint=daemon.unix)

    def test_parameters_that_are_added_later(self):
        alone = run("alone_grow", 0)
        self.assertNotEqual(alone["digest"], self.alone["digest"])
        words = ["late.weight", "[3, 5]"]
        self.check("fsdp_grow", 2, words, self.daemon().unix, alone, calls=5)
        if LONG:
            self.check("ddp_grow", 3, ["late.weight"], self.daemon().unix, alone, calls=5)
            self.check("fsdp_grow", 3, ["late.weight", "[2, 5]"], None, alone, calls=5)

    def go_through_a_death(self, way, ranks):
        """A daemon is killed between two steps, and comes back with an older state: all ranks go
        back to it."""
        steps, pause = 9, 0.3
        with tempfile.TemporaryDirectory(prefix="muond-torch-", dir="/tmp") as folder:
            flags = ["--checkpoint-dir", folder, "--checkpoint-every-steps", "3"]
            daemon = self.daemon(*flags)
            seen = []

            def at_step(step):
                seen.append(step)
                if len(seen) == 8:  # the newest checkpoint is a step behind
                    daemon.kill()
                    daemon.socket.unlink()
                    self.daemon(*flags, directory=daemon.directory)
            result = run(way, ranks, daemon.unix, steps, pause, at_step=at_step)
        undisturbed = run(way, ranks, self.daemon().unix, steps, 0)
        self.assertGreater(len(seen), steps, "the death went unnoticed")
        self.assertEqual(result["digest"], undisturbed["digest"])
        self.assertEqual(result["applied"], steps)

    def test_ranks_go_back_together_when_a_daemon_died(self):
        self.go_through_a_death("ddp", 2)

    def die_between_pulls(self, way, ranks, deaths):
        """A daemon is killed when a step is taken and some ranks have its parameters and some have
        not. With the checkpoint of before step 3 all of them take step 3 again, with the gradients
        that they have, or go back to it from the later ones."""
        steps = 7
        with tempfile.TemporaryDirectory(prefix="muond-torch-", dir="/tmp") as folder:
            flags = ["--checkpoint-dir", folder]
            pid_file = pathlib.Path(folder) / "pid"
            killed, seen = [], []

            def start(**options):
                daemon = self.daemon(*flags, **options)
                pid_file.write_text(str(daemon.process.pid))
                return daemon
            daemon = start()

            def at_death(step):
                killed.append(step)
                daemon.socket.unlink()
                start(directory=daemon.directory)
            result = run(way, ranks, daemon.unix, steps, 0.01, 3, deaths, pid_file,
                         at_step=seen.append, at_death=at_death)
        self.assertEqual(killed, [3, 5])
        self.assertEqual(seen, [0, 1, 2, 3, 4, 5, 3, 4, 5, 6])
        self.assertEqual(result["applied"], steps)
        undisturbed = run(way, ranks, self.daemon().unix, steps, 0)
        self.assertEqual(result["digest"], undisturbed["digest"])
        for name, value in undisturbed["parameters"].items():
            self.assertTrue(torch.equal(result["parameters"][name], value), name)

    def test_a_daemon_that_dies_between_the_pulls_of_2_ranks(self):
        self.die_between_pulls("ddp", 2, "3:0,5:1")

    def test_a_daemon_that_dies_between_the_pulls_of_3_shards(self):
        self.die_between_pulls("fsdp", 3, "3:12,5:0")

    @unittest.skipUnless(LONG, "the long form has all ways: tests/run --full")
    def test_others_go_back_together_too(self):
        for way, ranks in (("fsdp", 3), ("hsdp", 4), ("fsdp_early", 2), ("fsdp_amp", 2)):
            with self.subTest(way=way, ranks=ranks):
                self.go_through_a_death(way, ranks)

    @unittest.skipUnless(LONG, "the long form has all ways: tests/run --full")
    def test_all_other_ways(self):
        self.check("tp", 2, ["[6, 8]", "[8, 6]"])
        for way, ranks in (("ddp", 3), ("fsdp", 2), ("hsdp", 2), ("hsdp", 4), ("tp", 3),
                           ("local", 2), ("local", 3), ("ddp_early", 2), ("fsdp_early", 2),
                           ("fsdp_early", 3), ("fsdp_amp", 2), ("fsdp_tp", 4)):
            with self.subTest(way=way, ranks=ranks):
                self.check(way, ranks)


class Boxes(unittest.TestCase):
    """shard_box without processes: every layout's boxes tile the tensor, as torch itself says."""

    def tile(self, shape, placements, mesh_shape):
        count = torch.zeros(shape, dtype=torch.int32)
        for coordinate in itertools.product(*map(range, mesh_shape)):
            if any(p.is_replicate() and coordinate[d] for d, p in enumerate(placements)):
                continue
            offset, size = layout.shard_box(shape, placements, mesh_shape, coordinate)
            count[tuple(slice(o, o + s) for o, s in zip(offset, size))] += 1
        self.assertEqual(int(count.sum()), math.prod(shape), (shape, placements, mesh_shape))
        self.assertTrue(bool((count == 1).all()))

    def test_boxes_tile(self):
        for rows in (1, 2, 5, 6, 7, 12):
            self.tile((rows, 4), (Shard(0),), (3,))
            self.tile((rows, 6), (Replicate(), Shard(0)), (2, 3))
            self.tile((rows, 6), (Shard(0), Shard(1)), (2, 2))
            self.tile((rows, 6), (_StridedShard(0, split_factor=2), Shard(0)), (3, 2))

    def test_chunks_as_torch_cuts_them(self):
        for length in range(12):
            for parts in range(1, 6):
                pieces = torch.arange(length).chunk(parts) if length else ()
                for index in range(parts):
                    first, size = layout.chunk(0, length, parts, index)
                    wanted = pieces[index].tolist() if index < len(pieces) else []
                    self.assertEqual(list(range(first, first + size)), wanted)

    def test_which_replica_sends_is_the_same_for_groups_added_and_groups_that_are_there(self):
        def boxes(counts, at_once):
            binding = object.__new__(Binding)
            binding.groups, binding.fixed, binding.entries = [], [], []
            binding.by_id, binding._reduced = {}, True
            groups = [{"params": [torch.nn.Parameter(distribute_tensor(
                torch.ones(4, 4), mesh, (Replicate(), Shard(0)))) for _ in range(count)],
                "algorithm": "adamw"} for count in counts]
            names = [[f"{i}.{place}" for place in range(count)] for i, count in enumerate(counts)]
            for last in [len(groups)] if at_once else range(1, len(groups) + 1):
                binding.groups = groups[:last]
                binding._take_in(binding._collect(names, names))
            return [(entry.name, entry.layout.box) for entry in binding.entries]
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        for counts in ((3, 2), (1, 1, 1), (2, 3)):
            added = boxes(counts, at_once=False)
            self.assertEqual(added, boxes(counts, at_once=True))
            self.assertEqual([box is None for _, box in added],
                             [bool(index % 2) for index in range(sum(counts))])


if __name__ == "__main__":
    unittest.main()
