#!/usr/bin/env python3
"""A foreign client, generated stubs and nothing else, trains through a real daemon."""

import threading
import unittest

import grpc
import numpy as np

from foreign_trainer import Trainer, parameter, position_of
from muond_process import ProcessTest
from muond_stubs import health, health_grpc, reflection, reflection_grpc, types

INF = np.float32("inf")
MUON = types.Hyperparameters(lr=0.1, weight_decay=0.1, momentum=0.95)
ADAMW = types.Hyperparameters(lr=0.1, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8)


def matrix(*rows):
    return np.array(rows, dtype=np.float32)


def golden_run(name, **fields):
    """The matrix and the number whose trajectories docs/semantics.md gives."""
    return types.Run(
        name=name, world_size=fields.pop("world_size", 1),
        parameters=[parameter("blk.0.wq", [2, 2]),
                    parameter("blk.0.norm", [1], role=types.ROLE_NORM)],
        groups=[types.Group(name="weights", muon=MUON, adamw=ADAMW)], **fields)


class ForeignClientTest(ProcessTest):

    def expect_refusal(self, code, call, *words):
        with self.assertRaises(grpc.RpcError) as caught:
            call()
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        for word in words:
            self.assertIn(word, caught.exception.details())
        return caught.exception

    def train_golden(self, trainer, scale=65536.0):
        """Overflow, diag(3,4), a skip of the trainer's, the unit matrix. Returns every digest."""
        one = np.ones(1, np.float32)
        digests = [trainer.digest(per_parameter=True)]
        gradients = [{"blk.0.wq": matrix([INF, 0], [0, 1]), "blk.0.norm": 2 * one},
                     {"blk.0.wq": matrix([3, 0], [0, 4]), "blk.0.norm": 2 * one},
                     None,
                     {"blk.0.wq": matrix([1, 0], [0, 1]), "blk.0.norm": 2 * one}]
        outcomes = []
        for step, gradient in enumerate(gradients):
            if gradient is None:
                outcomes.append(trainer.skip(step))
            else:
                scaled = {name: g * np.float32(scale) for name, g in gradient.items()}
                outcomes.append(trainer.step(step, scaled, loss_scale=scale))
                scale = outcomes[-1].next_loss_scale
            digests.append(trainer.digest(per_parameter=True))
        self.check_outcomes(outcomes)
        return digests

    def check_outcomes(self, outcomes):
        self.assertEqual([o.applied for o in outcomes], [False, True, False, True])
        self.assertEqual([o.cause for o in outcomes],
                         [types.SKIP_CAUSE_OVERFLOW, types.SKIP_CAUSE_NONE,
                          types.SKIP_CAUSE_TRAINER, types.SKIP_CAUSE_NONE])
        self.assertEqual([o.newton_schulz_calls for o in outcomes], [0, 1, 0, 1])
        self.assertEqual([o.version for o in outcomes], [1, 2, 3, 4])
        self.assertEqual([o.next_loss_scale for o in outcomes], [32768] * 4)
        self.assertEqual(outcomes[0].nonfinite_elements, 1)
        self.assertEqual(list(outcomes[0].offenders), ["blk.0.wq"])
        self.assertAlmostEqual(outcomes[1].grad_norm, np.sqrt(9 + 16 + 4), delta=1e-5)
        self.assertAlmostEqual(outcomes[3].grad_norm, np.sqrt(1 + 1 + 4), delta=1e-5)

    def check_digests(self, digests):
        tensor = [d.tensor_digest for d in digests]
        self.assertEqual(len(set(tensor)), 3, "initial, and one for each applied step")
        self.assertEqual(tensor[0], tensor[1], "an overflow changes no byte")
        self.assertEqual(tensor[2], tensor[3], "a skip changes no byte")
        self.assertEqual(dict(digests[0].parameters), dict(digests[1].parameters))
        self.assertEqual(len({d.control_digest for d in digests}), 5, "every step moves on")

    def check_views(self, trainer):
        status = trainer.status()
        self.assertEqual((status.steps_applied, status.newton_schulz_calls), (2, 2))
        self.assertEqual((status.muon_parameters, status.adamw_parameters), (1, 1))
        self.assertEqual({c: n for c, n in status.steps_skipped.items() if n},
                         {"overflow": 1, "trainer": 1})
        self.assertEqual((status.momentum_nonfinite, status.step_in_flight), (0, False))
        self.assertAlmostEqual(status.momentum_norm, np.hypot(.1925, .24), delta=1e-6)
        states = trainer.describe()
        self.assertEqual({name: state.t for name, state in states.items()},
                         {"blk.0.wq": 2, "blk.0.norm": 2})
        wq = states["blk.0.wq"]
        self.assertEqual(wq.routed.algorithm, types.ALGORITHM_MUON)
        self.assertEqual([(m.rows, m.cols, m.count) for m in wq.routed.matrices], [(2, 2, 1)])
        self.assertAlmostEqual(wq.momentum_norm, np.hypot(.1925, .24), delta=1e-6)
        self.assertAlmostEqual(wq.weight_norm, np.hypot(.8088734, .7635475), delta=1e-6)
        self.assertEqual(wq.hyperparameters.lr, 0.1)
        self.assertEqual(list(trainer.describe("blk.0.norm")), ["blk.0.norm"])

    def whole_run(self, address):
        """From Register to Close; the digests and the final parameters."""
        run = golden_run("golden", loss_scale=types.LossScale(mode=types.LossScale.MODE_DYNAMIC))
        trainer = Trainer(address, run, chunk_bytes=8)
        reply = trainer.register()
        self.assertEqual((reply.transport, reply.loss_scale), ("grpc", 65536))
        self.assertEqual((reply.position.next_step, reply.routing.muon_matrices), (0, 1))
        self.assertEqual([p.algorithm for p in reply.routing.parameters],
                         [types.ALGORITHM_MUON, types.ALGORITHM_ADAMW])
        initial = trainer.initialize({"blk.0.wq": matrix([1, 0], [0, 1]),
                                      "blk.0.norm": np.ones(1, np.float32)})
        self.assertTrue(initial.complete)
        self.assertEqual(initial.slices_accepted, 2)
        digests = self.train_golden(trainer)
        self.check_digests(digests)
        self.check_views(trainer)
        final = trainer.pull(4, master=True, chunk_bytes=8)
        np.testing.assert_allclose(final["blk.0.wq"], np.diag([.8088734, .7635475]), atol=2e-6)
        np.testing.assert_allclose(final["blk.0.norm"], [.798101001], atol=2e-7)
        self.expect_refusal(grpc.StatusCode.FAILED_PRECONDITION, lambda: trainer.pull(2),
                            '"golden"', "version 2", "version 4")
        self.assertTrue(trainer.close().closed)
        trainer.channel.close()
        return [d.tensor_digest for d in digests], final["blk.0.wq"].tobytes()

    def test_whole_run_over_tcp_and_unix_socket(self):
        daemon = self.start_daemon()
        over_tcp = self.whole_run(daemon.tcp)
        over_unix = self.whole_run(daemon.unix)
        self.assertEqual(over_tcp, over_unix)

    def test_one_applied_step_is_the_first_row(self):
        daemon = self.start_daemon()
        trainer = Trainer(daemon.unix, golden_run("first"))
        trainer.register()
        trainer.initialize({"blk.0.wq": np.eye(2, dtype=np.float32),
                            "blk.0.norm": np.ones(1, np.float32)})
        outcome = trainer.step(0, {"blk.0.wq": matrix([3, 0], [0, 4]),
                                   "blk.0.norm": np.full(1, 2, np.float32)})
        self.assertTrue(outcome.applied)
        final = trainer.pull(1)
        np.testing.assert_allclose(final["blk.0.wq"], np.diag([.9177124, .8780796]), atol=2e-6)
        np.testing.assert_allclose(final["blk.0.norm"], [.8990000005], atol=2e-7)
        trainer.close()

    def test_two_ranks_with_a_row_each_make_one_matrix(self):
        """Newton-Schulz needs the whole matrix: rows apart would give 1.10811 each."""
        daemon = self.start_daemon()
        run = types.Run(
            name="rows", world_size=2, parameters=[parameter("w", [2, 3])],
            groups=[types.Group(name="weights", muon=types.Hyperparameters(lr=1, momentum=0.0))])
        gradient = matrix([1, 2, 3], [4, 5, 6])
        expected = -np.array([[-.5682901, .0577419, .6837740], [.5633547, .4056128, .2478710]])
        trainers = [Trainer(address, run, rank=rank, chunk_bytes=4, slices={
            "w": [types.Box(offset=[rank, 0], size=[1, 3])]})
            for rank, address in enumerate([daemon.unix, daemon.tcp])]
        self.assertEqual(list(trainers[0].register().missing_ranks), [1])
        self.assertEqual(list(trainers[1].register().missing_ranks), [])
        results = {}

        def train(trainer):
            trainer.initialize({"w": np.zeros((2, 3), np.float32)})
            opened.wait(30)  # a Begin is refused before the other rank's values are there
            outcome = trainer.step(0, {"w": gradient})
            results[trainer.rank] = (outcome, trainer.pull(outcome.version)["w"])

        opened = threading.Barrier(2)
        threads = [threading.Thread(target=train, args=(t,)) for t in trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual(sorted(results), [0, 1], "both ranks came to an end")
        self.assertEqual(results[0][0], results[1][0], "every rank gets the identical outcome")
        self.assertEqual(results[0][0].newton_schulz_calls, 1)
        pulled = np.where(np.isnan(results[0][1]), results[1][1], results[0][1])
        np.testing.assert_allclose(pulled, expected, atol=5e-6)
        self.assertEqual([t.close().closed for t in trainers], [False, True])

    def test_refusals_say_where_the_run_stands(self):
        daemon = self.start_daemon()
        trainer = Trainer(daemon.unix, golden_run("refusals"))
        trainer.register()
        values = {"blk.0.wq": np.eye(2, dtype=np.float32), "blk.0.norm": np.ones(1, np.float32)}
        self.expect_refusal(grpc.StatusCode.FAILED_PRECONDITION, lambda: trainer.begin(0),
                            '"blk.0.wq"', '"blk.0.norm"')
        trainer.initialize(values)
        error = self.expect_refusal(grpc.StatusCode.FAILED_PRECONDITION, lambda: trainer.begin(7),
                                    "step 7", "expected step 0")
        position = position_of(error)
        self.assertEqual((position.next_step, position.generation), (0, trainer.generation))
        trainer.begin(0)
        bad = list(trainer.push_requests(0, values))
        bad[0].chunk.crc32c ^= 1
        self.expect_refusal(grpc.StatusCode.DATA_LOSS,
                            lambda: trainer.stub.Push(iter(bad), timeout=30), '"blk.0.wq"')
        self.assertEqual(trainer.push(0, values).slices_accepted, 2)
        self.assertEqual(trainer.push(0, values).slices_duplicate, 2)
        self.assertTrue(trainer.finish(0).applied)
        again = trainer.finish(0)
        self.assertTrue(again.applied, "a repeated Finish gets the cached outcome")
        self.assertEqual(trainer.status().steps_applied, 1)
        trainer.close()


class GrpcServicesTest(ProcessTest):

    def test_health(self):
        daemon = self.start_daemon()
        for address in (daemon.tcp, daemon.unix):
            with grpc.insecure_channel(address) as channel:
                stub = health_grpc.HealthStub(channel)
                for service in ("", "readiness", "liveness", "muond.v1.Optimizer"):
                    reply = stub.Check(health.HealthCheckRequest(service=service), timeout=10)
                    self.assertEqual(reply.status, health.HealthCheckResponse.SERVING, service)
                with self.assertRaises(grpc.RpcError) as caught:
                    stub.Check(health.HealthCheckRequest(service="unheard-of"), timeout=10)
                self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)

    def test_reflection_lists_the_services(self):
        daemon = self.start_daemon("--reflection")
        with grpc.insecure_channel(daemon.tcp) as channel:
            stub = reflection_grpc.ServerReflectionStub(channel)
            asked = [reflection.ServerReflectionRequest(list_services=""),
                     reflection.ServerReflectionRequest(
                         file_containing_symbol="muond.v1.Optimizer")]
            services, file = list(stub.ServerReflectionInfo(iter(asked), timeout=10))
        names = {service.name for service in services.list_services_response.service}
        self.assertLessEqual({"muond.v1.Optimizer", "grpc.health.v1.Health"}, names)
        described = b"".join(file.file_descriptor_response.file_descriptor_proto)
        self.assertIn(b"muond/v1/optimizer.proto", described)


if __name__ == "__main__":
    unittest.main()
