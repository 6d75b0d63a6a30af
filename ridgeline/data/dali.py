"""NVIDIA DALI as a decoder, for those who ask for it: `decoder: dali` of the source `packed`.

Its decoders run on the host in threads of their own, outside Python. Its resizing is not Pillow's, so
that pixels differ a little from those of `decoder: pillow`. Random crops are `data.augment`'s. Pipelines
belong to a thread and are built when it first decodes. Called by `sources/packed.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeline.errors import UsageError


def require_dali() -> None:
    try:
        import nvidia.dali  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "decoder='dali' in data.args needs NVIDIA DALI, which is not installed here: "
            "pip install nvidia-dali-cuda120 (or the package of your CUDA), or leave it out"
        ) from error


class DaliDecoder:
    """Encoded images to (num, size, size, 3) bytes: the centre, `crop` of the shorter side."""

    def __init__(self, size: int, crop: float) -> None:
        self._size, self._crop = size, crop
        self._mine = threading.local()

    def __getstate__(self) -> tuple[int, float]:
        return self._size, self._crop

    def __setstate__(self, state: tuple[int, float]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(self, images: Sequence[bytes]) -> np.ndarray:
        """Raises ValueError for a batch with something in it that is no image."""
        pipeline = self._pipeline(len(images))
        try:
            pipeline.feed_input("images", [np.frombuffer(data, dtype=np.uint8) for data in images])
            (decoded,) = pipeline.run()
            pixels: np.ndarray = decoded.as_array()
        except RuntimeError as error:
            self._mine.pipeline = None  # one that failed cannot be used again
            raise ValueError(str(error).strip().splitlines()[0]) from error
        return pixels

    def _pipeline(self, num: int) -> Any:
        known = getattr(self._mine, "pipeline", None)
        if known is None or known.max_batch_size < num:
            known = self._mine.pipeline = self._build(num)
        return known

    def _build(self, num: int) -> Any:
        from nvidia.dali import fn, pipeline_def, types

        size, shorter = self._size, self._size / self._crop

        @pipeline_def(  # type: ignore[untyped-decorator, unused-ignore]
            batch_size=num, num_threads=1, device_id=None, prefetch_queue_depth=1
        )
        def pipe() -> Any:
            encoded = fn.external_source(name="images")
            whole = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
            resized = fn.resize(whole, resize_shorter=shorter, interp_type=types.INTERP_LINEAR)
            return fn.crop(resized, crop=(size, size), crop_pos_x=0.5, crop_pos_y=0.5)

        pipeline = pipe()
        pipeline.build()
        return pipeline
