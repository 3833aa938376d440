#!/usr/bin/env python3
"""Hugging Face's Trainer on a tiny Llama made here; with --deepspeed under ZeRO 2.

    python3 client/python/examples/hf_trainer.py
    torchrun --nproc-per-node 2 client/python/examples/hf_trainer.py --deepspeed
"""

import argparse
import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import muond.hf

ZERO = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2},
}


class Counting(torch.utils.data.Dataset):
    """Sequences in which each number follows from the one before."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        words = (index + 7 * torch.arange(16)) % 64
        return {"input_ids": words, "labels": words}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    if options.deepspeed and not torch.cuda.is_available():
        import deepspeed  # the Trainer does this for devices only
        deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=options.steps, per_device_train_batch_size=8,
            logging_steps=options.steps // 2, save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=not options.deepspeed and not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(), deepspeed=ZERO if options.deepspeed else None)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False))
        trainer = Trainer(
            model=model, args=arguments, train_dataset=Counting(),
            optimizer_cls_and_kwargs=(muond.hf.MuonFactory, {
                "lr": 0.02, "adamw": {"lr": 3e-3}, "local": "MUOND_ENDPOINT" not in os.environ}))
        trainer.add_callback(muond.hf.MuonCallback(trainer))
        trainer.train()
        if trainer.is_world_process_zero():
            for entry in trainer.state.log_history:
                if "loss" in entry:
                    print(f"step {entry['step']}: loss {float(entry['loss']):.3f}, "
                          f"{entry['muond/newton_schulz_calls']} matrices orthogonalized, "
                          f"{entry['muond/applied_steps']} steps applied", flush=True)


if __name__ == "__main__":
    main()
