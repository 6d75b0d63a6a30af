"""`deepspeed.accelerator`: the device of this rank, in DeepSpeed's words."""

from __future__ import annotations

from typing import Any

import torch


class _Accelerator:
    """CUDA where it is there, else the CPU; what is not here is looked up in torch.cuda."""

    @property
    def _is_cuda(self) -> bool:
        return torch.cuda.is_available()

    def device_name(self, device_index: int | None = None) -> str:
        if not self._is_cuda:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(torch.cuda.current_device()) if self._is_cuda else "cpu"

    def communication_backend_name(self) -> str:
        return "nccl" if self._is_cuda else "gloo"

    def set_device(self, device_index: int) -> None:
        if self._is_cuda:
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._is_cuda else True

    def is_fp16_supported(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if self._is_cuda:
            torch.cuda.empty_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


_THE_ONE = _Accelerator()


def get_accelerator() -> _Accelerator:
    return _THE_ONE
