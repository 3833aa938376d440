#!/usr/bin/env python3
"""Lightning on one process, or with --ranks 2 under its DDP.

    python3 client/python/examples/lightning_module.py --ranks 2
"""

import argparse
import logging
import os
import warnings

import lightning
import torch
from torch import nn

import muond.torch

WIDTH = 32


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(),
                                    nn.Linear(2 * WIDTH, WIDTH))

    def configure_optimizers(self):
        optimizer = muond.torch.Muon(self.named_parameters(), lr=0.02, adamw={"lr": 3e-3},
                                     local="MUOND_ENDPOINT" not in os.environ)
        return {"optimizer": optimizer,
                "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)}

    def training_step(self, batch, index):
        values = batch[0]
        loss = nn.functional.mse_loss(self.layers(values), values.flip(1))
        outcome = self.optimizers().optimizer.last_outcome
        if self.global_rank == 0:
            calls = outcome.newton_schulz_calls if outcome else 0
            print(f"step {index}: loss {loss.item():.3f}, {calls} matrices orthogonalized",
                  flush=True)
        return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(16 * options.steps * options.ranks, WIDTH))
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=options.ranks,
        strategy="ddp" if options.ranks > 1 else "auto", max_steps=options.steps, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False)
    trainer.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=16))


if __name__ == "__main__":
    main()
