#!/usr/bin/env python3
"""Writes the corpora that the fuzzers start from: what honest programs send and write."""

import json
import pathlib
import subprocess
import sys
import tempfile

from google.protobuf import json_format

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GOLDEN = ROOT / "tests/golden"


def write(name, seed, data):
    folder = HERE / "corpus" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / seed).write_bytes(data)


def messages():
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={out}",
                        "muond/v1/types.proto", "muond/v1/optimizer.proto"], check=True)
        sys.path.insert(0, out)
        from muond.v1 import optimizer_pb2 as optimizer, types_pb2 as types
    calls = json.loads((GOLDEN / "protocol/0.1/transcript.json").read_text())
    first = lambda call: next(c["requests"][0] for c in calls if c["call"] == call)
    push = json_format.ParseDict(first("Push"), optimizer.PushRequest()).SerializeToString()
    write("chunk_message", "push", b"\x00\xff" + push)
    write("chunk_message", "push_in_pieces", b"\x00\x04" + push)
    reply = optimizer.PullReply(version=3)
    reply.chunk.parameter = "w"
    reply.chunk.data = b"12345678"
    reply.more.add(parameter="b", data=b"1234")
    write("chunk_message", "pull_reply", b"\x01\x07" + reply.SerializeToString())
    pull = json_format.ParseDict(first("Pull"), optimizer.PullRequest())
    write("chunk_message", "pull", b"\x02\x20" + pull.SerializeToString())
    register = json_format.ParseDict(first("Register"), optimizer.RegisterRequest())
    write("registration", "plain", b"\x00\x00" + register.SerializeToString())
    register.run.world_size = 2
    register.run.rules.add(pattern="w.*", algorithm=types.ALGORITHM_ADAMW)
    register.run.parameters.add(name="tied", shape=types.Shape(dims=[2, 2]), group="g", tie="w")
    register.run.parameters.add(name="deep", shape=types.Shape(dims=[4, 3, 2, 2]), group="g")
    register.run.parameters.add(name="one", shape=types.Shape(dims=[64]), group="g",
                                replicated=True)
    register.version = "0.2.0"
    write("registration", "rules_ties_ranks", b"\x01\x01" + register.SerializeToString())


def files():
    manifest = GOLDEN / "checkpoint_v1/r/ckpt-7/manifest.json"
    text = manifest.read_bytes()
    write("manifest", "as_it_is", b"\x00" + text)
    write("manifest", "body", b"\x01" + text.split(b"\n", 1)[1])
    part = (manifest.parent / "part-0-0.safetensors").read_bytes()
    length = int.from_bytes(part[:8], "little")
    data = len(part) - 8 - length
    write("safetensors", "part", data.to_bytes(8, "little") + part[8:8 + length])
    write("safetensors", "none", bytes(8) + b"{}")
    write("config", "small", b'# a comment\nthreads = 8\noverlap = true\nstep-deadline = "2m"\n'
          b'listen = ["127.0.0.1:7070",\n  "[::1]:7070"]  # two\nstate-dir = "a\\"b\\\\c"\n')
    shipped = [line for line in (ROOT / "deploy/muond.conf").read_text().splitlines()
               if line and not line.startswith("#")]
    write("config", "shipped", "\n".join(shipped[:40]).encode())


def sequences():
    """Of messages to step machines: message, daemon, and what it says (step_machine_fuzz.cc)."""
    both = lambda *message: b"".join(bytes([message[0], daemon, *message[1:]])
                                     for daemon in (0, 1))
    begin = both(0, 0, 0) + both(0, 1, 0)
    # Message 2: rank in the bits, then the parameter, then the digest.
    push = b"".join(both(2, rank, parameter, 0) for rank in (0, 1) for parameter in range(4))
    finish = both(4, 0, 0) + both(4, 1, 0)
    reduce = both(8, 1) * 4
    votes = both(11, 0) * 2
    commit = both(10, 0)
    step = begin + push + finish + reduce + votes + commit
    write("step_machine", "two_steps", b"\x00\x01" + step * 2)
    write("step_machine", "overflow", b"\x01\x00" + begin + push + finish + both(8, 255) * 4
          + votes + commit + step)
    write("step_machine", "skip", b"\x01\x00" + (both(5, 0, 0, 0) + both(5, 1, 0, 0)) + votes
          + step)
    write("step_machine", "raised", b"\x00\x00" + begin + push + finish + reduce
          + bytes([11, 0, 0, 14, 0, 2]) + commit + step)
    write("step_machine", "hostile", b"\x00\x00" + begin + both(15, 253, 1, 1, 1, 9, 1, 40)
          + push + finish + reduce + votes + both(15, 0) + both(15, 254) + both(15, 255))


if __name__ == "__main__":
    messages()
    files()
    sequences()
