"""A second reader of checkpoints, written from docs/checkpoint_format.md: no code of ours."""

import json
import pathlib
import struct

import numpy as np

from foreign_trainer import crc32c

DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def read_manifest(directory):
    data = (pathlib.Path(directory) / "manifest.json").read_bytes()
    first, rest = data.split(b"\n", 1)
    manifest = json.loads(data)
    assert first == b'{"crc32c":"%08x",' % crc32c(rest), "manifest: wrong checksum"
    assert manifest["format"] == "muond-checkpoint" and manifest["schema"] == 1
    return manifest


def read_file(path):
    """{key: array} of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    tensors = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[key] = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(
            entry["shape"])
    return tensors


def read_checkpoint(directory):
    """The manifest, and {"<parameter>.<tensor>": whole array}."""
    directory = pathlib.Path(directory)
    manifest = read_manifest(directory)
    files = {}
    for record in manifest["files"]:
        path = directory / record["name"]
        data = path.read_bytes()
        assert len(data) == record["bytes"] and "%08x" % crc32c(data) == record["crc32c"], path
        files[record["name"]] = read_file(path)
    tensors = {}
    for parameter in manifest["parameters"]:
        for name, tensor in parameter["tensors"].items():
            flat = np.concatenate([files[piece["file"]][piece["key"]].reshape(-1)
                                   for piece in tensor["pieces"]] or
                                  [np.zeros(0, DTYPES[tensor["dtype"]])])
            tensors[f"{parameter['name']}.{name}"] = flat.reshape(parameter["shape"])
    return manifest, tensors
