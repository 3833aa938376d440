"""What the programs that run on every rank share: models, engines, a training loop, and what a
rank tells the test of it."""

import json
import os
import pathlib
import sys
import time

os.environ.setdefault("DS_BUILD_OPS", "0")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROOT = pathlib.Path(__file__).resolve().parents[2]
if (ROOT / "client" / "python").is_dir():
    sys.path.insert(0, str(ROOT / "client" / "python"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import deepspeed  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM  # noqa: E402
import muond.deepspeed  # noqa: E402
import muond.torch  # noqa: E402

BF16, FP16, FP32 = "bf16", "fp16", "fp32"
_count = iter(range(10 ** 6))


def start():
    """Joins the other ranks; (rank, device)."""
    torch.set_num_threads(1)
    rank, devices = int(os.environ["RANK"]), torch.cuda.device_count()
    if devices:  # NCCL wants a device for each rank; gloo takes what there is
        os.environ["LOCAL_RANK"] = str(rank % devices)
        torch.cuda.set_device(rank % devices)
    enough = devices >= int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed("nccl" if enough else "gloo", verbose=False)
    deepspeed.utils.logger.setLevel("ERROR")
    return rank, torch.device("cuda", rank % devices) if devices else torch.device("cpu")


def llama(layers=2, hidden=32):
    """14 matrices in two layers, embedding, head and 5 norms."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=hidden * 3 // 2 + 1,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=False)
    return LlamaForCausalLM(config)


def tokens(step, rank=0, count=4, device="cpu"):
    """The same next-token task for everybody; each rank its own rows."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(0, 64, (count, 1), generator=generator)
    return ((starts + 7 * torch.arange(16)) % 64).to(device)


def language_loss(module, batch):
    return module(input_ids=batch, labels=batch).loss


def config(stage, dtype=BF16, micro=4, accumulate=1, **more):
    result = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulate,
              "steps_per_print": 10 ** 9, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": stage, **more.pop("zero", {})}, **more}
    if dtype == BF16:
        result["bf16"] = {"enabled": True, **more.get("bf16", {})}
    if dtype == FP16:
        result["fp16"] = {"enabled": True, **more.get("fp16", {})}
    if dtype == FP32:
        result.pop("bf16", None)
    return result


def muon(params, run=None, **options):
    """The optimizer, its service in rank 0's process."""
    options = {"lr": 0.02, "weight_decay": 0.1, "local": True, "threads": 1,
               "adamw": {"lr": 3e-3, "weight_decay": 0.0},
               "run": run or f"run-{next(_count)}", **options}
    return muond.torch.Muon(params, **options)


def engine_of(model, settings, bind=True, named=True, **options):
    """(engine, its optimizer)."""
    params = model.named_parameters() if named else model.parameters()
    optimizer = muon(params, **options)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    if bind:
        muond.deepspeed.bind_deepspeed(engine)
    return engine, optimizer


def build(make, settings, seed=0, zero_init=False, **options):
    torch.manual_seed(seed)
    if zero_init:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = make()
    else:
        model = make()
    return engine_of(model, settings, **options)


def take(engine, optimizer, loss_of, steps, accumulate=1, first=0):
    """Trains; losses of this rank, and the outcome of each step as the service tells it."""
    losses, outcomes = [], []
    for step in range(first, first + steps):
        for micro in range(accumulate):
            loss = loss_of(engine, step, micro)
            engine.backward(loss)
            engine.step()
        losses.append(float(loss.detach()))
        outcomes.append(optimizer.last_outcome)
    return losses, outcomes


def full(engine):
    """The model's parameters as float32, gathered, by name."""
    module = engine.module
    if not any(hasattr(p, "ds_id") for p in module.parameters()):
        return {n: p.detach().float().cpu().clone() for n, p in module.named_parameters()}
    result = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            result[name] = parameter.detach().float().cpu().clone()
    return result


def gathered_loss(value):
    """The mean of a rank's number over the ranks."""
    box = torch.tensor([value], dtype=torch.float64)
    if torch.cuda.is_available():
        box = box.cuda()
    dist.all_reduce(box)
    return float(box) / dist.get_world_size()


def raised(call):
    """[class, message] of the error that a call ends with."""
    try:
        call()
    except Exception as error:  # the test compares it
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def main(scenarios):
    """Runs the scenarios named on the command line, or all; the report goes to $MUOND_REPORT."""
    rank, device = start()
    wanted = sys.argv[1:] or list(scenarios)
    report = {}
    for name in wanted:
        begun = time.monotonic()
        report[name] = scenarios[name](rank, device)
        report[name]["seconds"] = round(time.monotonic() - begun, 2)
        if rank == 0:  # what a failure after it leaves to see
            print("done", name, json.dumps({key: value for key, value in report[name].items()
                                            if key != "describe"}), flush=True)
    path = os.environ.get("MUOND_REPORT")
    if path:
        with open(f"{path}.{rank}", "w", encoding="utf-8") as out:
            json.dump(report, out, indent=1)
    dist.barrier()
    dist.destroy_process_group()
