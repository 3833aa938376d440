#!/usr/bin/env python3
"""A client of the version before this one and a daemon of this one. tests/golden/protocol/VERSION
has the protocol as that version spoke it: its .proto files, and a transcript of a small training.
The files must be a subset of today's, and today's daemon must answer the transcript's requests,
encoded by the old files, with what the old files read as the same replies.

    skew_test.py --record    plays the transcript's requests anew and writes down today's replies
"""

import json
import subprocess
import sys
import tempfile
import unittest

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

from muond_process import ROOT, ProcessTest

GOLDEN = ROOT / "tests/golden/protocol"
FILES = ("muond/v1/types.proto", "muond/v1/optimizer.proto")
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

    def __init__(self, folder, address):
        pool = descriptor_pool.DescriptorPool()
        files = file_set(folder)
        for file in files.file:
            pool.Add(file)
        self.factory = message_factory.MessageFactory(pool)
        self.methods = pool.FindServiceByName("muond.v1.Optimizer").methods_by_name
        self.streams = {m.name: (m.client_streaming, m.server_streaming)
                        for f in files.file for s in f.service for m in s.method}
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
        stub = getattr(self.channel, kind)(f"/muond.v1.Optimizer/{name}")
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
