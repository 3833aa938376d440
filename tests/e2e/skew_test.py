#!/usr/bin/env python3
"""A client of the version before this one and a daemon of this one. tests/golden/protocol/VERSION
has the protocol as that version spoke it: its .proto files, and a transcript of a small training.
The files must be a subset of today's, and today's daemon must answer the transcript's requests,
encoded by the old files, with what the old files read as the same replies. So must a daemon that
shares a run with one of that version. Those of versions further away are refused, on both sides.

    skew_test.py --record    plays the transcript's requests anew and writes down today's replies
"""

import concurrent.futures
import json
import subprocess
import sys
import tempfile
import unittest

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

from daemon_cluster import own_address
from muond_process import ROOT, Daemon, ProcessTest
from muond_stubs import optimizer, optimizer_grpc, peer, peer_grpc

GOLDEN = ROOT / "tests/golden/protocol"
FILES = tuple(f"muond/v1/{name}.proto"
              for name in ("types", "optimizer", "peer", "checkpoint", "admin"))
# Of replies: what is another one each time, on each machine or in each version.
VOLATILE = {"generation", "daemons", "owner", "transport", "transportReason", "planHash",
            "maxChunkBytes", "controlDigest", "tensorDigest"}


def file_set(folder):
    """The FileDescriptorSet of the protocol in `folder`."""
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(["protoc", f"-I{folder}", "--include_imports",
                        f"--descriptor_set_out={out.name}", *FILES], check=True)
        return descriptor_pb2.FileDescriptorSet.FromString(out.read())


def described(files):
    """{place: what must not change} of a FileDescriptorSet: fields by number, values, methods."""
    things = {}

    def enum(prefix, value):
        for entry in value.value:
            things[f"{prefix}{value.name} value {entry.number}"] = entry.name

    def message(prefix, value):
        name = f"{prefix}{value.name}"
        for field in value.field:
            oneof = value.oneof_decl[field.oneof_index].name if field.HasField(
                "oneof_index") else ""
            things[f"{name} field {field.number}"] = (
                field.name, field.type, field.label, field.type_name, oneof)
        for nested in value.nested_type:
            message(f"{name}.", nested)
        for nested in value.enum_type:
            enum(f"{name}.", nested)

    for file in files.file:
        if not file.package.startswith("muond."):
            continue
        for value in file.message_type:
            message(f"{file.package}.", value)
        for value in file.enum_type:
            enum(f"{file.package}.", value)
        for service in file.service:
            for method in service.method:
                things[f"{file.package}.{service.name} method {method.name}"] = (
                    method.input_type, method.output_type, method.client_streaming,
                    method.server_streaming)
    return things


def changes(old, new):
    """What a program of `old` would misread of `new`: what is gone, or means something else. New
    fields, values and methods are none."""
    old, new = described(old), described(new)
    return [f"{place}: {was} became {new.get(place, 'nothing')}" for place, was in old.items()
            if new.get(place) != was]


def without(thing, names):
    if isinstance(thing, dict):
        return {key: without(value, names) for key, value in thing.items() if key not in names}
    if isinstance(thing, list):
        return [without(value, names) for value in thing]
    return thing


class OldClient:
    """Speaks the protocol of `folder`, to whatever daemon."""

    def __init__(self, folder, address, service="Optimizer"):
        pool = descriptor_pool.DescriptorPool()
        files = file_set(folder)
        for file in files.file:
            pool.Add(file)
        self.factory = message_factory.MessageFactory(pool)
        self.service = f"muond.v1.{service}"
        self.methods = pool.FindServiceByName(self.service).methods_by_name
        self.streams = {m.name: (m.client_streaming, m.server_streaming)
                        for f in files.file for s in f.service if s.name == service
                        for m in s.method}
        self.pool = pool
        self.channel = grpc.insecure_channel(address)
        self.generation = 0

    def encode(self, kind, fields):
        message = json_format.ParseDict(fields, self.factory.GetPrototype(kind)(),
                                        descriptor_pool=self.pool)
        if "id" in fields:
            message.id.generation = self.generation
        return message.SerializeToString()

    def call(self, name, requests):
        """Replies as dictionaries; {"code": NAME} for a refusal."""
        method = self.methods[name]
        reply_type = self.factory.GetPrototype(method.output_type)
        encoded = [self.encode(method.input_type, fields) for fields in requests]
        streams_in, streams_out = self.streams[name]
        kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
        stub = getattr(self.channel, kind)(f"/{self.service}/{name}")
        try:
            got = stub(iter(encoded) if streams_in else encoded[0], timeout=60)
            replies = [reply_type.FromString(data) for data in (got if streams_out else [got])]
        except grpc.RpcError as error:
            return [{"code": error.code().name}]
        for reply in replies:
            if name == "Register":
                self.generation = reply.position.generation
        return [json_format.MessageToDict(reply, descriptor_pool=self.pool) for reply in replies]


class SkewTest(ProcessTest):

    def folders(self):
        found = sorted(GOLDEN.iterdir())
        self.assertTrue(found, "no version's protocol is kept")
        return found

    def play(self, folder):
        """The transcript, and today's replies to it."""
        daemon = self.start_daemon("--backend", "reference")
        client = OldClient(folder, daemon.unix)
        transcript = json.loads((folder / "transcript.json").read_text())
        self.addCleanup(client.channel.close)
        return transcript, [without(client.call(entry["call"], entry["requests"]), VOLATILE)
                            for entry in transcript]

    def test_nothing_of_a_kept_version_is_gone(self):
        today = file_set(ROOT / "proto")
        for folder in self.folders():
            self.assertEqual(changes(file_set(folder), today), [],
                             f"clients of {folder.name} would misread this daemon")

    def test_changes_are_found(self):
        old = file_set(ROOT / "proto")
        for change, words in (
                (lambda f: f.message_type[0].field[0].__setattr__("number", 99), "nothing"),
                (lambda f: f.message_type[0].field[0].__setattr__("name", "other"), "other"),
                (lambda f: f.message_type[0].field[0].__setattr__("type", 5), "became"),
                (lambda f: f.service[0].method[0].__setattr__("client_streaming", True), "method"),
                (lambda f: f.service[0].method.pop(), "became nothing")):
            new = descriptor_pb2.FileDescriptorSet.FromString(old.SerializeToString())
            change(next(f for f in new.file if f.service))
            self.assertIn(words, " ".join(changes(old, new)))
        added = descriptor_pb2.FileDescriptorSet.FromString(old.SerializeToString())
        added.file[-1].message_type[0].field.add(name="new", number=999, type=5, label=1)
        self.assertEqual(changes(old, added), [])

    def test_todays_daemon_answers_old_clients(self):
        for folder in self.folders():
            transcript, replies = self.play(folder)
            for entry, got in zip(transcript, replies):
                with self.subTest(f"{folder.name}: {entry['call']}"):
                    self.assertEqual(got, entry["replies"])

    # -- Versions too far apart

    def refused(self, call, *words):
        with self.assertRaises(grpc.RpcError) as caught:
            call()
        self.assertEqual(caught.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
        for word in words:
            self.assertIn(word, caught.exception.details())

    def registration(self, **fields):
        """The transcript's, of the newest version."""
        folder = self.folders()[-1]
        entry = json.loads((folder / "transcript.json").read_text())[0]
        request = json_format.ParseDict(entry["requests"][0], optimizer.RegisterRequest())
        request.MergeFrom(optimizer.RegisterRequest(**fields))
        return request

    def test_clients_too_far_away_are_refused_and_others_not(self):
        daemon = self.start_daemon("--backend", "reference")
        with grpc.insecure_channel(daemon.unix) as channel:
            stub = optimizer_grpc.OptimizerStub(channel)
            own = stub.Status(optimizer.StatusRequest()).version
            major, minor = map(int, own.split(".")[:2])
            for far in (f"{major}.{minor + 2}.0", f"{major + 1}.{minor}.0"):
                self.refused(lambda far=far: stub.Register(
                    self.registration(version=far, client="somebody")),
                    f'client "somebody" has version {far}, here it is {own}', "upgrade this one")
            self.refused_as_no_version(stub)
            self.assertIn('client "somebody" has version', daemon.log())
            self.assertEqual(list(stub.Status(optimizer.StatusRequest()).runs), [])
            for near in (f"{major}.{minor + 1}.7", own, ""):
                reply = stub.Register(self.registration(version=near))
                self.assertEqual(reply.version, own, "the client judges, too")

    def refused_as_no_version(self, stub):
        with self.assertRaises(grpc.RpcError) as caught:
            stub.Register(self.registration(version="newest"))
        self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)

    def two_daemons(self):
        """One, and the address of the other, which the test plays."""
        listen = [own_address(), own_address()]
        daemon = Daemon("--backend", "reference", "--peers", ",".join(listen), "--advertise",
                        listen[0], directory=self.directory, listen=[listen[0]], metrics="none")
        self.daemons.append(daemon)
        self.addCleanup(daemon.stop)
        channel = grpc.insecure_channel(listen[0])
        self.addCleanup(channel.close)
        return daemon, channel, listen

    def test_daemons_too_far_away_are_refused_by_this_one(self):
        daemon, channel, listen = self.two_daemons()
        registered = optimizer_grpc.OptimizerStub(channel).Register(self.registration())
        own = registered.version
        stub = peer_grpc.PeerStub(channel)
        agreement = f"{registered.plan_hash} of 1 devices a daemon over {','.join(listen)}"
        introduction = lambda version: peer.PeerRun(run="skew", daemon=1, agreement=agreement,
                                                    version=version)
        for call in (lambda: stub.Hello(peer.HelloRequest(peer=introduction("0.9.0"))),
                     lambda: stub.Vote(peer.VoteRequest(peer=introduction("0.9.0"))),
                     lambda: stub.Prepare(peer.PrepareRequest(peer=introduction("0.9.0"))),
                     lambda: stub.Raise(peer.RaiseRequest(peer=introduction("0.9.0")))):
            self.refused(call, f'daemon 1 of its list has version 0.9.0, here it is {own}')
        # One apart, and one that speaks as the version before did.
        reply = stub.Hello(peer.HelloRequest(peer=introduction("0.2.0")))
        self.assertEqual(reply.version, own)
        for folder in self.folders():
            old = OldClient(folder, listen[0], "Peer")
            self.addCleanup(old.channel.close)
            said = old.call("Hello", [{"peer": {"run": "skew", "daemon": "1",
                                                "agreement": agreement}}])
            self.assertEqual(said[0]["position"]["state"], "RUN_STATE_OPENING", said)
            said = old.call("Vote", [{"peer": {"run": "skew", "daemon": "1",
                                               "agreement": agreement}}])
            self.assertIn(said[0].get("code", "OK"), ("OK", "UNAVAILABLE"), said)
        del daemon

    def test_this_daemon_refuses_one_too_far_away(self):
        """Its own word, and what the other one says of it, reach the trainer."""
        answers = {}

        class Other(peer_grpc.PeerServicer):

            def Hello(self, request, context):  # pylint: disable=invalid-name
                self.heard = request.peer.version
                if answers["refuse"]:
                    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "you have version 0.1.0")
                return peer.HelloReply(version=answers["version"])

        daemon, channel, listen = self.two_daemons()
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        other = Other()
        peer_grpc.add_PeerServicer_to_server(other, server)
        self.assertTrue(server.add_insecure_port(listen[1]))
        server.start()
        self.addCleanup(lambda: server.stop(0).wait())
        stub = optimizer_grpc.OptimizerStub(channel)
        answers.update(refuse=False, version="0.9.0")

        def register():
            """Until the other one was heard: a busy machine may let its second pass."""
            for _ in range(20):
                reply = stub.Register(self.registration())
                stub.Close(optimizer.CloseRequest(id=optimizer.RunId(
                    run="skew", generation=reply.position.generation)))

        self.refused(register, f'run "skew": daemon "{listen[1]}" has version 0.9.0')
        self.assertIn("has version 0.9.0", daemon.log())
        answers.update(refuse=True)
        self.refused(register, "you have version 0.1.0")
        answers.update(refuse=False, version="0.2.0")
        own = stub.Register(self.registration()).version
        self.assertEqual(other.heard, own, "it tells its own")

    def record(self):
        """Not a test: writes today's replies down."""
        for folder in self.folders():
            transcript, replies = self.play(folder)
            for entry, got in zip(transcript, replies):
                entry["replies"] = got
            lines = [json.dumps(entry, separators=(", ", ": ")) for entry in transcript]
            (folder / "transcript.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        sys.exit(not unittest.TextTestRunner().run(SkewTest("record")).wasSuccessful())
    unittest.main()
