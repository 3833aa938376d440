#!/usr/bin/env python3
"""Draws loss.csv of muond-example-char-lm: validation loss against steps, both optimizers.

usage: plot_loss.py [loss.csv [loss.png]]
"""

import csv
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt  # noqa: E402

LABELS = {"muon": "Muon with AdamW", "adamw": "AdamW alone"}


def read_curves(path):
    """Returns {optimizer: ([step, ...], [validation loss, ...])}."""
    curves = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            steps, losses = curves.setdefault(row["optimizer"], ([], []))
            steps.append(int(row["step"]))
            losses.append(float(row["validation_loss"]))
    if not curves:
        sys.exit(f"{path}: no points in it")
    return curves


def main():
    source = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "loss.csv")
    target = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".png")
    figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    top, bottom = 0.0, float("inf")
    for optimizer, (steps, losses) in read_curves(source).items():
        axes.plot(steps, losses, marker=".", label=f"{LABELS[optimizer]} ({losses[-1]:.3f})")
        # The first fall is the same for everyone; what follows is what differs.
        late = [loss for step, loss in zip(steps, losses) if step >= 0.05 * steps[-1]]
        top = max(top, max(late))
        bottom = min(bottom, min(late))
    margin = 0.05 * (top - bottom)
    axes.set_ylim(bottom - margin, top + margin)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss (nats per character)")
    axes.set_title("Held-out books of the King James Bible")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)
    print(f"{target} written")


if __name__ == "__main__":
    main()
