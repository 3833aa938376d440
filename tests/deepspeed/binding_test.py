"""What bind_deepspeed refuses, and why, without any engine running."""

import pathlib
import sys
import types
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client" / "python"))

import torch  # noqa: E402

import muond.deepspeed  # noqa: E402
import muond.torch  # noqa: E402
from muond import errors  # noqa: E402
from muond.deepspeed import wrappers  # noqa: E402


def muon(*named, **options):
    return muond.torch.Muon(list(named), lr=0.1, local=True, threads=1, **options)


def engine_with(optimizer, **more):
    wrapper = types.SimpleNamespace(**more.pop("wrapper", {}))
    return types.SimpleNamespace(basic_optimizer=optimizer, optimizer=wrapper, **more)


class Refused(unittest.TestCase):
    def setUp(self):
        self.matrix = torch.nn.Parameter(torch.eye(4))

    def test_DeepSpeed8438_placeholder_without_ds_shape_says_why(self):
        placeholder = torch.nn.Parameter(torch.empty(0))
        with self.assertRaises(errors.ShapeMismatch) as caught:
            muon(("w", placeholder))
        for word in ('"w"', "(0,)", "placeholder of a partitioned parameter", "silently inactive"):
            self.assertIn(word, str(caught.exception))
        placeholder.ds_shape = torch.Size([8, 4])
        optimizer = muon(("w", placeholder))
        self.assertEqual(optimizer.param_groups[0]["algorithm"], "muon")

    def test_a_partitioned_vector_is_not_promoted(self):
        vector = torch.nn.Parameter(torch.empty(0))
        vector.ds_shape = torch.Size([32])
        optimizer = muon(("w", self.matrix), ("norm", vector))
        self.assertEqual([group["algorithm"] for group in optimizer.param_groups],
                         ["muon", "adamw"])

    def test_DeepSpeed8442_flat_tensor_in_place_of_a_matrix(self):
        optimizer = muon(("w", self.matrix))
        flat = torch.zeros(16)
        flat.grad = torch.ones(16)
        optimizer.param_groups[0]["params"] = [flat]
        with self.assertRaisesRegex(errors.RegistrationError, r"flat tensor \[16\] for a matrix"):
            optimizer.step()

    def test_one_flat_tensor_for_many_parameters(self):
        other = torch.nn.Parameter(torch.eye(4))
        optimizer = muon(("v", torch.nn.Parameter(torch.ones(3))), ("w", self.matrix),
                         ("x", other))
        flat = torch.zeros(16, 2)  # even where it looks like a matrix
        flat.grad = torch.ones(16, 2)
        optimizer.param_groups[0]["params"] = [flat]
        with self.assertRaisesRegex(errors.RegistrationError, "1 tensors are left of 2"):
            optimizer.step()

    def test_a_group_alone(self):
        vector = torch.nn.Parameter(torch.ones(3))
        optimizer = muon(("w", self.matrix), ("v", vector))
        vector.grad = torch.ones(3)
        optimizer.param_groups = optimizer.param_groups[1:]
        with self.assertRaisesRegex(errors.RegistrationError, "1 parameter groups are left of 2"):
            optimizer.step()

    def test_other_optimizers(self):
        other = torch.optim.SGD([self.matrix], lr=0.1)
        with self.assertRaisesRegex(errors.RegistrationError, "the engine's optimizer is SGD"):
            muond.deepspeed.bind_deepspeed(engine_with(other))

    def test_layouts_that_are_not_known(self):
        optimizer = muon(("w", self.matrix))
        for word, more in (
                ("experts", {"has_moe_layers": True}), ("pipeline", {"pipeline_parallelism": True}),
                ("ZenFlow", {"wrapper": {"zenflow": True}}),
                ("NVMe", {"wrapper": {"swap_optimizer": True}}),
                ("GradScaler", {"wrapper": {"torch_autocast_gradscaler": object()}}),
                ("the wrapper SimpleNamespace", {})):
            with self.subTest(word), self.assertRaises(errors.RegistrationError) as caught:
                muond.deepspeed.bind_deepspeed(engine_with(optimizer, **more))
            self.assertIn(word, str(caught.exception))

    def test_steps_of_an_engines_initialization_are_none(self):
        optimizer = muon(("w", self.matrix))
        before = self.matrix.detach().clone()

        def initialize_optimizer_states():
            self.matrix.grad = torch.zeros(4, 4)
            optimizer.step()

        initialize_optimizer_states()
        self.assertIsNone(optimizer._binding)
        optimizer.step()  # the same by anybody else: decay applies
        self.addCleanup(optimizer.close)
        self.assertFalse(torch.equal(self.matrix, before))


class ZeroThreeParts(unittest.TestCase):
    """The cut of ZeRO 3 over any number of ranks, by its own numbers."""

    @staticmethod
    def parts(shapes, ranks, rank):
        from unittest import mock
        parameters = []
        for shape in shapes:
            parameter = torch.nn.Parameter(torch.empty(0))
            count = torch.Size(shape).numel()
            parameter.ds_shape, parameter.ds_numel = torch.Size(shape), count
            parameter.ds_process_group = None
            size = -(-count // ranks)
            parameter.ds_tensor = torch.full((size,), float("nan"))
            parameter.ds_tensor.ds_numel = size
            parameters.append(parameter)
        wrapper = types.SimpleNamespace(fp16_groups=[parameters], sub_group_to_group_id={0: 0})
        with mock.patch("torch.distributed.get_rank", lambda group=None: rank), \
                mock.patch("torch.distributed.get_world_size", lambda group=None: ranks), \
                mock.patch.object(wrappers.layouts, "world", lambda: (rank, ranks)):
            return list(wrappers._Zero3(wrapper).parts())

    def test_parts_tile_every_shape_and_leave_padding_out(self):
        shapes = [(5, 3), (1,), (7,), (2, 2), (64, 33)]
        for ranks in range(1, 9):
            found = [self.parts(shapes, ranks, rank) for rank in range(ranks)]
            for index, shape in enumerate(shapes):
                covered = []
                for rank in range(ranks):
                    part = found[rank][index]
                    self.assertEqual(part.shape, shape)
                    self.assertLessEqual(part.start + part.count, sum(
                        -(-torch.Size(s).numel() // ranks) for s in shapes))
                    covered += range(part.offset, part.offset + part.count)
                self.assertEqual(covered, list(range(torch.Size(shape).numel())),
                                 f"{shape} on {ranks}")


if __name__ == "__main__":
    unittest.main()
