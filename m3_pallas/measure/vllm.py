"""vLLM's MiniMax-M3 indexer kernels as peers, loaded from its sources without importing vLLM.

The folder is a checkout or a site-packages that holds `vllm/models/minimax_m3/{amd,common}/ops/*.py`, of vLLM 0.32.0
or like it. What those files import from the rest of vLLM is stubbed. The variants are the ways vLLM would run them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from m3_pallas.measure import environment
from m3_pallas.measure.profiling import DeviceTime

VARIANTS = ("amd", "amd gfx950", "common")  # "common" is vLLM's own path for NVIDIA
PDL_CAPABILITY = (9, 0)  # from which vLLM's decode uses programmatic dependent launch
OPS = pathlib.Path("vllm") / "models" / "minimax_m3"
FILES = ("common.ops.sparse_attn", "amd.ops.sparse_pa", "amd.ops.index_topk", "common.ops.index_topk")


class Peers(Protocol):
    """One way to run vLLM's kernels on JAX arrays."""

    name: str

    def versions(self) -> dict[str, str]:
        """Of vLLM's sources and of what runs them; `pdl`: is programmatic dependent launch used?"""
        ...

    def decode(self, variant: str, queries: Any, arrays: tuple, statics: tuple) -> tuple[DeviceTime, np.ndarray]:
        """Time of a call of a chain of one call for each of `queries`, and the first call's ids."""
        ...

    def prefill(
        self, variant: str, queries: Any, arrays: tuple, statics: tuple, topk: tuple
    ) -> tuple[DeviceTime, DeviceTime, np.ndarray]:
        """Times of a score and of a selection call, and the last call's ids."""
        ...


def find(folder: str) -> pathlib.Path:
    """The folder above `vllm/`; with an empty name, that of the installed vllm.

    Raises:
      FileNotFoundError: if it has no MiniMax-M3 indexer.
    """
    if folder:
        root = pathlib.Path(folder)
    else:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise FileNotFoundError("vllm is not installed; give the path of a checkout: --vllm PATH")
        root = pathlib.Path(spec.origin).parents[1]
    for path in _paths(root):
        if not path.is_file():
            raise FileNotFoundError(
                f"{root} holds no MiniMax-M3 indexer of vLLM: {path} is missing; give the folder above vllm/"
            )
    return root


def _paths(root: pathlib.Path) -> list[pathlib.Path]:
    return [root / OPS / (file.replace(".", "/") + ".py") for file in FILES]


def peers(folder: str) -> tuple[Peers, list[str]]:
    """vLLM's kernels through jax-triton, or through PyTorch where jax-triton cannot, and then why it cannot.

    Raises:
      FileNotFoundError: as `find`.
      ImportError: if neither jax-triton nor PyTorch is there, with both reasons.
    """
    root = find(folder)
    reasons = []
    for module in ("vllm_jax", "vllm_torch"):
        try:
            return importlib.import_module(f"m3_pallas.measure.{module}").make(root), reasons
        except Exception as error:  # whatever an unknown version of either does, the other may do
            reasons.append(f"{module}: {type(error).__name__}: {error}")
    raise ImportError("vLLM's kernels need jax-triton (extra `bench`) or PyTorch: " + "; ".join(reasons))


class Sources:
    """vLLM's modules by variant; `torch` is what they import under that name.

    `capability` is that of the NVIDIA GPU that is here, None on others. `pdl`: can what launches the kernels do so by
    programmatic dependent launch, which vLLM asks for on newer NVIDIA GPUs?
    """

    def __init__(self, root: pathlib.Path, torch: Any, *, capability: tuple[int, int] | None, pdl: bool):
        import triton
        import triton.language as tl

        self.root = root
        self.gfx950 = False
        self.wants_pdl = capability is not None and capability >= PDL_CAPABILITY
        self.pdl = pdl and self.wants_pdl
        rocm = environment.lowering_platform() == "rocm"
        self.platform = types.SimpleNamespace(
            is_rocm=lambda: rocm or self.gfx950,
            is_cuda=lambda: not (rocm or self.gfx950),
            is_arch_support_pdl=lambda: self.pdl and not self.gfx950,
            is_device_capability=lambda asked: asked == capability,
        )
        packages = ("", ".minimax_m3", ".minimax_m3.amd", ".minimax_m3.amd.ops", ".minimax_m3.common")
        self._stubs = {
            "torch": torch,
            "vllm": _module("vllm"),
            "vllm.platforms": _module("vllm.platforms", current_platform=self.platform),
            "vllm.platforms.rocm": _module("vllm.platforms.rocm", on_gfx950=lambda: self.gfx950),
            "vllm.triton_utils": _module("vllm.triton_utils", tl=tl, triton=triton, HAS_TRITON=True),
            "vllm.utils": _module("vllm.utils"),
            "vllm.utils.math_utils": _module(
                "vllm.utils.math_utils", round_up=lambda x, y: -(-x // y) * y, cdiv=lambda x, y: -(-x // y)
            ),
            **{f"vllm.models{name}": _module(f"vllm.models{name}") for name in (*packages, ".minimax_m3.common.ops")},
        }
        loaders = []
        for file, path in zip(FILES, _paths(root), strict=True):
            name = f"vllm.models.minimax_m3.{file}"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            self._stubs[name] = importlib.util.module_from_spec(spec)
            loaders.append((spec.loader, self._stubs[name]))
        with self.stubs():
            for loader, module in loaders:
                loader.exec_module(module)

    def versions(self) -> dict[str, str]:
        """vLLM's version where the folder tells it, a digest of the files that are used, and `pdl`."""
        digest = hashlib.sha256()
        for path in _paths(self.root):
            digest.update(path.read_bytes())
        found = [
            re.search(r"^Version: (\S+)", file.read_text(errors="replace"), re.M)
            for file in [*self.root.glob("PKG-INFO"), *self.root.glob("vllm*.dist-info/METADATA")]
        ]
        version = next((match[1] for match in found if match), "unknown")
        pdl = "yes" if self.pdl else "no, though vLLM uses it on this GPU" if self.wants_pdl else "no"
        return {"vllm": version, "vllm_files": digest.hexdigest()[:16], "pdl": pdl}

    @contextlib.contextmanager
    def stubs(self) -> Iterator[None]:
        """The stubs in `sys.modules`, and what was there before back again."""
        before = {name: sys.modules[name] for name in self._stubs if name in sys.modules}
        sys.modules.update(self._stubs)
        try:
            yield
        finally:
            for name in self._stubs:
                sys.modules.pop(name, None)
            sys.modules.update(before)

    def module(self, variant: str) -> Any:
        """The module with the calls of `variant`, which it then follows."""
        self.gfx950 = variant == "amd gfx950"
        return self._stubs[f"vllm.models.minimax_m3.{variant.split()[0]}.ops.index_topk"]

    def wrap_kernels(self, wrap: Callable[[Any], Any]) -> None:
        """Replace the kernels that Python launches by `wrap` of them."""
        for module in {id(module): module for module in map(self.module, VARIANTS)}.values():
            for name, value in list(vars(module).items()):
                if name.endswith("_kernel") and hasattr(value, "__getitem__"):
                    setattr(module, name, wrap(value))


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(members)
    return module
