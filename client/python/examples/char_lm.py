#!/usr/bin/env python3
"""A character-level language model in one file: nanoGPT in small, trained by muond.

    python char_lm.py                                     # the service inside this process
    python char_lm.py --endpoint unix:///run/muond/muond.sock
    python char_lm.py --optimizer torch                   # torch.optim.Muon and AdamW instead

The text is that of --text, or Python's own licence and credits. Prints the routing table, the loss,
and a sample.
"""

import argparse
import pathlib
import site
import time

import torch
from torch import nn

import muond.torch


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class CharLM(nn.Module):
    def __init__(self, symbols, width=96, layers=3, heads=4, context=64):
        super().__init__()
        self.context = context
        self.wte, self.wpe = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        return self.lm_head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def sample(self, start, count):
        tokens = start[None]
        for _ in range(count):
            odds = self(tokens[:, -self.context:])[0, -1].softmax(-1)
            tokens = torch.cat([tokens, odds.multinomial(1)[None]], 1)
        return tokens[0]


def read_text(path):
    """The text as symbols: (tokens, alphabet)."""
    text = pathlib.Path(path).read_text(errors="replace") if path else (
        pathlib.Path(site.__file__).read_text())
    alphabet = sorted(set(text))
    places = {symbol: place for place, symbol in enumerate(alphabet)}
    return torch.tensor([places[symbol] for symbol in text]), alphabet


def batches(tokens, context, size, seed, rank=0, ranks=1):
    """Endless (inputs, targets); the ranks share each batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(tokens) - context - 1, (size,), generator=generator)
        rows = torch.stack([tokens[at:at + context + 1] for at in starts.tolist()[rank::ranks]])
        yield rows[:, :-1], rows[:, 1:]


def make_optimizers(model, arguments):
    """Ours, or torch's two."""
    adamw = {"lr": 3e-3, "betas": (0.9, 0.95)}
    if arguments.optimizer == "torch":
        hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
        chosen = set(map(id, hidden))
        return [torch.optim.Muon(hidden, lr=0.02, weight_decay=0.01),
                torch.optim.AdamW([p for p in model.parameters() if id(p) not in chosen], **adamw)]
    return [muond.torch.Muon(model, lr=0.02, weight_decay=0.01, adamw=adamw,
                             endpoint=arguments.endpoint, local=arguments.endpoint is None,
                             async_push=arguments.async_push)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--text", help="a file to learn")
    parser.add_argument("--endpoint", help="of a daemon; without: the service in this process")
    parser.add_argument("--optimizer", choices=("muond", "torch"), default="muond")
    parser.add_argument("--async-push", action="store_true", help="push during backward")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    tokens, alphabet = read_text(arguments.text)
    model = CharLM(len(alphabet))
    optimizers = make_optimizers(model, arguments)
    warmdown = [torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 2 * (1 - step / arguments.steps)))
        for optimizer in optimizers]
    start = time.perf_counter()
    for step, (inputs, targets) in zip(range(arguments.steps), batches(
            tokens, model.context, arguments.batch, arguments.seed)):
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for one in optimizers + warmdown:
            one.step()
        if step % 20 == 0 or step == arguments.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}  "
                  f"{time.perf_counter() - start:6.1f} s", flush=True)
    if arguments.optimizer == "muond":
        print(f"\n{optimizers[0].describe()}\ndigest of the state: {optimizers[0].digest()}\n")
    print("".join(alphabet[i] for i in model.sample(tokens[:1], 200)))


if __name__ == "__main__":
    main()
