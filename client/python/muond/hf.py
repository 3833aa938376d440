"""muond in the Trainer of Hugging Face's transformers, with or without DeepSpeed.

    trainer = Trainer(model=model, args=args, train_dataset=data,
                      optimizer_cls_and_kwargs=(muond.hf.MuonFactory, {"lr": 0.02}))
    trainer.add_callback(muond.hf.MuonCallback(trainer))

The Trainer refuses `optimizers=(...)` under DeepSpeed and FSDP; it takes a factory.
"""

from transformers import TrainerCallback

from muond import deepspeed
from muond.torch import Muon, amp


class MuonFactory:
    """What the Trainer instantiates and then calls with the model and the keywords given."""

    def __call__(self, model, **options):
        """The optimizer of all the model's parameters, by their names."""
        return Muon(model.named_parameters(), **options)


class MuonCallback(TrainerCallback):
    """Binds DeepSpeed's engine before the first step, and puts what the service counts into the
    Trainer's logs: "muond/applied_steps", "muond/skipped_steps", "muond/newton_schulz_calls"."""

    def __init__(self, trainer):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **_):
        engine = getattr(self._trainer, "deepspeed", None)
        if engine is not None:
            deepspeed.bind_deepspeed(engine)

    def on_log(self, args, state, control, logs=None, **_):
        outcome = getattr(amp.unwrapped(self._trainer.optimizer), "last_outcome", None)
        if outcome is None:
            return
        counts = {f"muond/{name}": getattr(outcome, name) for name in (
            "applied_steps", "skipped_steps", "newton_schulz_calls")}
        for entry in (logs, *state.log_history[-1:]):  # the same values, the second for its step
            if entry is not None:
                entry.update(counts)
