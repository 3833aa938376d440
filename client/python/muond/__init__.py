"""Client of muond, a distributed optimizer service for Muon and AdamW.

`muond.torch.Muon` is the optimizer for PyTorch. `muond.session` is the same without PyTorch: runs,
slices, steps. `muond.errors` has one exception class for each kind of trouble.
"""

from muond.errors import MuondError

__all__ = ["MuondError", "__version__"]
__version__ = "0.1.0"
