"""muond for PyTorch: `Muon`, a torch.optim.Optimizer whose steps the service takes."""

from muond.torch.optimizer import Muon
from muond.torch.routing import Route

__all__ = ["Muon", "Route"]
