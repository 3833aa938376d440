"""muond under DeepSpeed: `bind_deepspeed(engine)` tells the optimizer which part of which layer
each flat tensor of the engine is, so that matrices reach the service as matrices."""

from muond.deepspeed.engine import bind_deepspeed

__all__ = ["bind_deepspeed"]
