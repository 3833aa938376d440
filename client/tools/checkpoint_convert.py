#!/usr/bin/env python3
"""Checkpoints of muond to and from torch and DeepSpeed. docs/checkpoints.md, "Import and export".

usage: checkpoint_convert.py to-torch CHECKPOINT OUT.pt [--state-dtype f32|bf16|f16]
       checkpoint_convert.py from-torch IN.pt OUT --run NAME [--step N] [--momentum-form ema|sum]
                             [--momentum-dtype f32|bf16] [--widen]
       checkpoint_convert.py to-deepspeed CHECKPOINT OUT

CHECKPOINT is a directory with a manifest.json. OUT of from-torch is the daemons' checkpoint
directory: OUT/NAME/ckpt-N is made. A .pt file holds a dict:

    "model": {name: parameter}
    "optimizers": [{"class": "Muon" or "AdamW", "names": [name, ...], "state_dict": ...}, ...]

where `names` are the parameters in the order of the optimizer's param_groups, as in
    [name for group in optimizer.param_groups for name in names_of(group["params"])].

Needs torch. Values are copied bit for bit; torch's Muon keeps the `ema` form of momentum, a `sum`
one is converted by 1 / (1 - beta), and rounded where it is bf16. A run keeps moments in fp32, and
momentum too unless its group says bf16: --momentum-dtype bf16 then. What torch kept in another
dtype is refused, unless --widen says that it may become fp32, with the same values. to-torch hands
out what there is; --state-dtype bf16 rounds to nearest even: what was widened and has not changed
since is what it was.
"""

import argparse
import datetime
import json
import math
import pathlib
import struct
import sys

import torch

MUON, ADAMW = "muon", "adamw"
STATE_OF = {MUON: {"momentum": "momentum_buffer"},
            ADAMW: {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


TABLE = _table()


def crc32c(data):
    """RFC 3720's checksum; by a library where there is one, since models are large."""
    try:
        import google_crc32c  # pylint: disable=import-outside-toplevel
        return google_crc32c.value(bytes(data))
    except ImportError:
        crc = 0xFFFFFFFF
        for byte in bytes(data):
            crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
        return crc ^ 0xFFFFFFFF


# ---- A checkpoint in memory: its manifest, and {"<parameter>.<tensor>": torch tensor} ------------


def read_checkpoint(directory):
    directory = pathlib.Path(directory)
    data = (directory / "manifest.json").read_bytes()
    first, rest = data.split(b"\n", 1)
    if first != b'{"crc32c":"%08x",' % crc32c(rest):
        sys.exit(f"{directory}/manifest.json: its checksum is wrong")
    manifest = json.loads(data)
    files = {}
    for record in manifest["files"]:
        content = (directory / record["name"]).read_bytes()
        if "%08x" % crc32c(content) != record["crc32c"]:
            sys.exit(f"{directory}/{record['name']}: its checksum is wrong")
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8:8 + length])
        files[record["name"]] = (header, memoryview(bytearray(content))[8 + length:])
    tensors = {}
    for parameter in manifest["parameters"]:
        for name, tensor in parameter["tensors"].items():
            pieces = []
            for piece in tensor["pieces"]:
                header, body = files[piece["file"]]
                begin, end = header[piece["key"]]["data_offsets"]
                pieces.append(torch.frombuffer(body[begin:end], dtype=DTYPES[tensor["dtype"]])
                              if end > begin else torch.zeros(0, dtype=DTYPES[tensor["dtype"]]))
            tensors[f"{parameter['name']}.{name}"] = torch.cat(pieces).reshape(parameter["shape"])
    return manifest, tensors


def write_safetensors(path, tensors):
    header, at = {"__metadata__": {"format": "muond-checkpoint"}}, 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[key] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape),
                       "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    for tensor in tensors.values())
    content = struct.pack("<Q", len(text)) + text + body
    path.write_bytes(content)
    return {"name": path.name, "bytes": len(content), "crc32c": "%08x" % crc32c(content)}


# ---- torch -> muond -----------------------------------------------------------------------------


def kept(name, title, value, dtype, widen):
    """The value in the dtype that the run keeps it in."""
    said = [str(each).removeprefix("torch.") for each in (value.dtype, dtype)]
    if value.dtype != dtype and dtype != torch.float32:
        sys.exit(f"{name}: {title} is {said[0]}, --momentum-dtype says {said[1]}: nothing is "
                 f"narrowed on its way in")
    if value.dtype != dtype and not widen:
        sys.exit(f"{name}: {title} is {said[0]}, muond keeps it in {said[1]}: --widen says that it "
                 f"may become that")
    return value.detach().to(dtype)


def parameters_of(state, momentum_dtype, widen):
    """(name, algorithm, t, {tensor: value}, hyperparameters) of every parameter."""
    seen = set()
    for optimizer in state["optimizers"]:
        algorithm = MUON if optimizer["class"].lower().endswith("muon") else ADAMW
        groups = optimizer["state_dict"]["param_groups"]
        ids = [identity for group in groups for identity in group["params"]]
        group_of = {identity: group for group in groups for identity in group["params"]}
        if len(ids) != len(optimizer["names"]):
            sys.exit(f"{optimizer['class']}: {len(ids)} parameters, names of "
                     f"{len(optimizer['names'])}")
        for name, identity in zip(optimizer["names"], ids):
            entry = optimizer["state_dict"]["state"].get(identity, {})
            master = state["model"][name].detach().to(torch.float32)
            tensors = {"master": master}
            for ours, theirs in STATE_OF[algorithm].items():
                # torch makes state at the first step: before, it is zero.
                value = entry.get(theirs)
                dtype = momentum_dtype if ours == "momentum" else torch.float32
                tensors[ours] = (torch.zeros_like(master, dtype=dtype) if value is None
                                 else kept(name, theirs, value, dtype, widen))
            t = int(entry.get("step", state.get("step", 0) if entry else 0))
            seen.add(name)
            yield name, algorithm, t, tensors, group_of[identity]
    for name in state["model"]:
        if name not in seen:
            sys.exit(f"{name}: is in no optimizer")


def matrices_text(shape):
    if len(shape) != 2:
        sys.exit(f"shape {shape}: only matrices can be imported for Muon")
    return f"{shape[0]}x{shape[1]} @ 0+{shape[0]}"


def manifest_of(options, entries, record):
    parameters = []
    for name, algorithm, t, tensors, _ in sorted(entries, key=lambda entry: entry[0]):
        shape = list(tensors["master"].shape)
        elements = math.prod(shape)
        parameters.append({
            "name": name, "shape": shape, "algorithm": algorithm, "t": t, "tied": [],
            "momentum_form": options.momentum_form if algorithm == MUON else "",
            "matrices": matrices_text(shape) if algorithm == MUON else "",
            "tensors": {tensor: {"dtype": NAMES[value.dtype], "pieces": [
                {"file": record["name"], "key": f"{name}.{tensor}", "first": 0,
                 "elements": elements}]} for tensor, value in tensors.items()}})
    return {"format": "muond-checkpoint", "schema": 1, "run": options.run, "sequence": 1,
            "generation": 1, "step": options.step, "fingerprint": "", "daemons": 1,
            "saved_at": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "writer": "checkpoint_convert.py",
            "loss_scaler": {"scale": options.loss_scale, "good_steps": 0, "hysteresis_left": 1,
                            "overflows_at_minimum": 0},
            "counters": {"applied_steps": options.step, "skipped_steps": 0,
                         "consecutive_skips": 0},
            "hyperparameters": {"muon": {}, "adamw": {}}, "parameters": parameters,
            "files": [record]}


def from_torch(options):
    state = torch.load(options.source, map_location="cpu", weights_only=True)
    entries = list(parameters_of(state, DTYPES[options.momentum_dtype.upper()], options.widen))
    if options.momentum_form == "sum":
        for _, algorithm, _, tensors, group in entries:
            if algorithm == MUON:
                momentum = tensors["momentum"]
                tensors["momentum"] = (momentum.double() / (1 - group["momentum"])).to(
                    momentum.dtype)
    folder = pathlib.Path(options.target) / options.run / f"ckpt-{options.step}"
    folder.mkdir(parents=True)
    record = write_safetensors(folder / "part-0-0.safetensors", {
        f"{name}.{tensor}": value for name, _, _, tensors, _ in entries
        for tensor, value in tensors.items()})
    rest = (json.dumps(manifest_of(options, entries, record), indent=1)[1:] + "\n").encode()
    rest = rest.lstrip(b"\n")
    (folder / "manifest.json").write_bytes(b'{"crc32c":"%08x",\n' % crc32c(rest) + rest)
    print(f"{folder}: {len(entries)} parameters")


# ---- muond -> torch, DeepSpeed ------------------------------------------------------------------


def to_torch(options):
    manifest, tensors = read_checkpoint(options.source)
    model, optimizers = {}, []
    for algorithm, title in ((MUON, "Muon"), (ADAMW, "AdamW")):
        names, state = [], {}
        for parameter in manifest["parameters"]:
            name = parameter["name"]
            model[name] = tensors[f"{name}.master"].clone()
            if parameter["algorithm"] != algorithm:
                continue
            if parameter["momentum_form"] == "sum":
                sys.exit(f"{name}: momentum in the sum form, torch's Muon has the ema form")
            state[len(names)] = {
                theirs: tensors[f"{name}.{ours}"].to(
                    DTYPES[options.state_dtype.upper()] if options.state_dtype
                    else tensors[f"{name}.{ours}"].dtype, copy=True)
                for ours, theirs in STATE_OF[algorithm].items()}
            if algorithm == ADAMW:
                state[len(names)]["step"] = torch.tensor(float(parameter["t"]))
            names.append(name)
        optimizers.append({"class": title, "names": names, "state_dict": {
            "state": state, "param_groups": [{"params": list(range(len(names)))}]}})
    torch.save({"model": model, "optimizers": optimizers, "step": manifest["step"]},
               options.target)
    print(f"{options.target}: {len(model)} parameters of step {manifest['step']}")


# DeepSpeed pairs its own param_groups with the saved ones, and takes no parameter of a group beyond
# them: there are enough, and none says anything, so that its configuration's hyperparameters stay.
DEEPSPEED_GROUPS = 1024
# Of the layout: what DeepSpeed demands of a version is that it is at least 0.3.17.
DEEPSPEED_VERSION = "0.16.0"


def check_steps(manifest):
    """DeepSpeed has one step for all AdamW parameters of a group."""
    steps = {parameter["t"]: parameter["name"] for parameter in manifest["parameters"]
             if parameter["algorithm"] == ADAMW}
    if len(steps) > 1:
        told = ", ".join(f"{name} {t}" for t, name in sorted(steps.items()))
        sys.exit(f"applied steps differ ({told}): DeepSpeed keeps one number for a group of "
                 f"AdamW parameters")


def to_deepspeed(options):
    """The universal layout: zero/<parameter>/{fp32,exp_avg,exp_avg_sq,momentum_buffer,step}.pt and
    zero/optimizer_state.pt. OUT is what DeepSpeed calls the tag's folder."""
    manifest, tensors = read_checkpoint(options.source)
    check_steps(manifest)
    zero = pathlib.Path(options.target) / "zero"
    for parameter in manifest["parameters"]:
        name = parameter["name"]
        if parameter["momentum_form"] == "sum":
            sys.exit(f"{name}: momentum in the sum form, DeepSpeed's Muon has the ema form")
        folder = zero / name
        if zero.resolve() not in folder.resolve().parents:
            sys.exit(f"{name}: is no name for a folder")
        folder.mkdir(parents=True)
        files = {"fp32": tensors[f"{name}.master"]}
        for ours, theirs in STATE_OF[parameter["algorithm"]].items():
            files[theirs] = tensors[f"{name}.{ours}"]
        for title, tensor in files.items():
            torch.save({"param": tensor.clone()}, folder / f"{title}.pt")
        if parameter["algorithm"] == ADAMW:  # DeepSpeed's Muon counts no steps
            torch.save(parameter["t"], folder / "step.pt")
    torch.save({"ds_version": DEEPSPEED_VERSION,
                "param_groups": [{"params": []} for _ in range(DEEPSPEED_GROUPS)]},
               zero / "optimizer_state.pt")
    print(f"{zero}: {len(manifest['parameters'])} parameters")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, call in (("to-torch", to_torch), ("from-torch", from_torch),
                       ("to-deepspeed", to_deepspeed)):
        command = commands.add_parser(name)
        command.add_argument("source")
        command.add_argument("target")
        command.set_defaults(call=call)
        if call is to_torch:
            command.add_argument("--state-dtype", choices=("f32", "bf16", "f16"))
        if call is from_torch:
            command.add_argument("--widen", action="store_true")
            command.add_argument("--momentum-dtype", choices=("f32", "bf16"), default="f32")
            command.add_argument("--run", required=True)
            command.add_argument("--step", type=int, default=0)
            command.add_argument("--loss-scale", type=float, default=1.0)
            command.add_argument("--momentum-form", choices=("ema", "sum"), default="ema")
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
