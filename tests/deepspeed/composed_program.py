"""Two ranks, a two-layer Llama, every stage, plain construction and zero.Init."""

import math

from ranks import BF16, FP32, build, config, gathered_loss, llama, main, take, language_loss, tokens

ROWS = {
    "stage3_init": (3, True, BF16), "stage3": (3, False, BF16), "stage2": (2, False, BF16),
    "stage1": (1, False, BF16), "stage0": (0, False, BF16), "stage0_fp32": (0, False, FP32),
    "stage3_fp32": (3, False, FP32),
    "bf16_optimizer": (1, False, BF16),
}


def loss_for(rank, device):
    return lambda engine, step, micro: language_loss(engine, tokens(step, rank, device=device))


def train(name, rank, device, steps, decay=0.1):
    stage, zero_init, dtype = ROWS[name]
    more = {"data_types": {"grad_accum_dtype": "fp32"}} if name == "bf16_optimizer" else {}
    engine, optimizer = build(llama, config(stage, dtype, **more), zero_init=zero_init,
                              weight_decay=decay)
    losses, outcomes = take(engine, optimizer, loss_for(rank, device), steps)
    losses = [gathered_loss(loss) for loss in losses]
    rows = optimizer.describe()
    result = {
        "wrapper": type(engine.optimizer).__name__, "losses": losses,
        "finite": all(map(math.isfinite, losses)),
        "calls": sum(outcome.newton_schulz_calls for outcome in outcomes),
        "applied": sum(outcome.applied for outcome in outcomes),
        "muon": sum(" muon " in row for row in rows.splitlines()),
        "decays": sorted({group["weight_decay"] for group in optimizer.param_groups}),
        "promoted": [row.split()[0] for row in rows.splitlines()
                     if " muon " in row and ("norm" in row.split()[0])],
        "digest": optimizer.digest(), "skipped": engine.skipped_steps, "describe": rows}
    optimizer.close()
    engine.destroy()
    return result


SCENARIOS = {name: (lambda rank, device, name=name: train(name, rank, device, 4)) for name in ROWS}
SCENARIOS["first_plain"] = lambda rank, device: train("stage3", rank, device, 6)
SCENARIOS["first_init"] = lambda rank, device: train("stage3_init", rank, device, 6)

if __name__ == "__main__":
    main(SCENARIOS)
