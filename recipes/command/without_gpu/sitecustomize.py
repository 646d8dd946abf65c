"""Redirect CUDA and NCCL calls of a script to CPU and Gloo."""

import os
import sys
from functools import wraps
from types import ModuleType
from typing import Any


class TorchImportHook:
    """A finder that delegates to the others and adapts torch when it is loaded.

    Libraries also look for torch without importing it, and more than once.
    """

    def __init__(self) -> None:
        self.is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self.is_asking:
            return None
        from importlib.util import find_spec

        self.is_asking = True
        try:
            spec = find_spec(name)
        finally:
            self.is_asking = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_adapt(module: ModuleType) -> None:
                load(module)
                if module.cuda.device_count() == 0:
                    redirect_to_cpu(module)

            spec.loader.exec_module = load_and_adapt  # type: ignore[method-assign]
        return spec


def redirect_to_cpu(torch: Any) -> None:
    """Make torch use the CPU where a script names a GPU."""
    torch.cuda.set_device = lambda device: None
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.to = to_cpu(torch, torch.Tensor.to)
    torch.nn.Module.to = to_cpu(torch, torch.nn.Module.to)
    if torch.distributed.is_available():
        from torch.distributed import distributed_c10d

        start = use_gloo(distributed_c10d.init_process_group)
        torch.distributed.init_process_group = distributed_c10d.init_process_group = start
        parallel = torch.nn.parallel.DistributedDataParallel
        parallel.__init__ = drop_device_ids(parallel.__init__)


def to_cpu(torch: Any, to: Any) -> Any:
    def meant(value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        is_named = isinstance(value, str | torch.device) and str(value).startswith("cuda")
        return "cpu" if is_number or is_named else value

    @wraps(to)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = meant(kwargs["device"])
        return to(self, *(meant(value) for value in args[:1]), *args[1:], **kwargs)

    return called


def use_gloo(start: Any) -> Any:
    @wraps(start)
    def called(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return start("gloo" if "nccl" in str(backend) else backend, *args, **kwargs)

    return called


def drop_device_ids(init: Any) -> Any:
    @wraps(init)
    def called(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any) -> None:
        init(self, module, None, None, *args, **kwargs)

    return called


def load_shadowed_sitecustomize() -> None:
    """Load the environment's own `sitecustomize`, which this module hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib would be imported by every script
    spec = PathFinder.find_spec(__name__, [place for place in sys.path if os.path.abspath(place) != here])  # noqa: PTH100
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, TorchImportHook())  # type: ignore[arg-type]
    load_shadowed_sitecustomize()
