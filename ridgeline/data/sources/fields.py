"""Next-step forecast of 2-D advection and diffusion on a periodic grid, solved exactly.

Stands in for weather and other gridded data of any size, with no file to read: a sample is a random
smooth state and the state `dt` later. Each channel has its own velocity and diffusivity, fixed by
the seed, so that there is something to learn, and because the solution is exact in Fourier space a
forecast error is the model's own. Built by `data/build.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.data.arguments import number, whole
from ridgeline.data.keyed import fold_key, keyed_uniform
from ridgeline.data.source import SourceInfo

# Legend: C channels, Y and X wavenumbers, H and W grid points, T times.
_MAX_WAVENUMBER = 12
_SPECTRAL_SLOPE = 2.0  # amplitude ~ (1 + |k|^2)^(-slope / 2)
_MAX_VELOCITY = 2 * np.pi * 0.05  # the domain is 2 pi wide: at most a twentieth of it a unit time
_DIFFUSIVITY = (0.002, 0.02)
# Keys of the two uses of the seed.
_PHYSICS, _STATES = 1, 2


class Fields:
    """u_t + v . grad u = nu lap u for each channel, on [0, 2 pi)^2.

    States are sums of the modes |kx|, |ky| <= 12 with random coefficients, scaled so that over the
    data set the input of each channel has mean 0 and variance 1.
    """

    def __init__(
        self,
        seed: int,
        split: int,
        num_samples: int,
        shape: tuple[int, int, int],
        dt: float,
    ) -> None:
        channels, height, width = shape
        self._num_samples = num_samples
        self._shape = shape
        self._dt = dt
        self._key = (fold_key((seed,)), _STATES, split)
        self.velocity, self.diffusivity = _physics(seed, channels)
        # Below the Nyquist wavenumber in both directions: above it the grid cannot hold a mode.
        limit = min(_MAX_WAVENUMBER, (min(height, width) - 1) // 2)
        self._ky = np.arange(-limit, limit + 1)
        self._kx = np.arange(limit + 1)
        self._amplitude_YX = _amplitude(self._ky, self._kx)
        self.info = SourceInfo(
            input_shape=shape,
            input_dtype=torch.float32,
            target_shape=shape,
            target_dtype=torch.float32,
            num_classes=None,
            task="forecast",
        )

    def __len__(self) -> int:
        return self._num_samples

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        inputs = np.empty((len(indices), *self._shape), dtype=np.float32)
        targets = np.empty_like(inputs)
        growth_TCYX = self._propagator((0.0, self._dt))
        # One sample at a time, its channels and times together: a transform over the whole batch
        # would not promise the same bits for a sample in another batch, and gains nothing.
        for row, coefficients_CYX in enumerate(self._coefficients(indices)):
            inputs[row], targets[row] = self._to_grid(growth_TCYX * coefficients_CYX)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def states(self, index: int, times: tuple[float, ...]) -> np.ndarray:
        """Sample `index` at any times, in float64, shape (times, C, H, W): for long rollouts."""
        coefficients_CYX = self._coefficients(np.array([index]))[0]
        return self._to_grid(self._propagator(times) * coefficients_CYX)

    def _coefficients(self, indices: np.ndarray) -> np.ndarray:
        channels = self._shape[0]
        shape = (len(indices), channels, len(self._ky), len(self._kx), 2)
        draws = keyed_uniform(self._key, indices, int(np.prod(shape[1:]))).reshape(shape)
        # Uniform in a square is as good as Gaussian once dozens of modes are summed, and needs no
        # logarithm, whose last bit differs between machines.
        unit = 2.0 * draws - 1.0
        scaled: np.ndarray = (unit[..., 0] + 1j * unit[..., 1]) * self._amplitude_YX
        return scaled

    def _propagator(self, times: tuple[float, ...]) -> np.ndarray:
        ky, kx = self._ky[:, None], self._kx[None, :]
        vy, vx = self.velocity[:, 0, None, None], self.velocity[:, 1, None, None]
        rate_CYX = -self.diffusivity[:, None, None] * (kx**2 + ky**2) - 1j * (ky * vy + kx * vx)
        growth_TCYX: np.ndarray = np.exp(np.asarray(times)[:, None, None, None] * rate_CYX)
        return growth_TCYX

    def _to_grid(self, coefficients_TCYX: np.ndarray) -> np.ndarray:
        _, height, width = self._shape
        columns = np.zeros(
            (*coefficients_TCYX.shape[:2], height, len(self._kx)), dtype=np.complex128
        )
        columns[:, :, self._ky % height] = coefficients_TCYX
        # Only the columns that hold modes are transformed along y; irfft pads the others with 0
        # (and takes the real part of kx = 0, as `_amplitude` allows for).
        rows = np.fft.ifft(columns, axis=-2, norm="forward")
        return np.fft.irfft(rows, n=width, axis=-1, norm="forward")


def _physics(seed: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Velocity (C, 2) as (vy, vx) and diffusivity (C,) in domain units a unit time."""
    draws = keyed_uniform((fold_key((seed,)), _PHYSICS), np.arange(channels), 3)
    velocity = (2.0 * draws[:, :2] - 1.0) * _MAX_VELOCITY
    low, high = _DIFFUSIVITY
    return velocity, low + (high - low) * draws[:, 2]


def _amplitude(ky: np.ndarray, kx: np.ndarray) -> np.ndarray:
    """The power law, scaled so that the state has unit variance at every point.

    A coefficient a*z with z uniform in the square [-1, 1]^2 adds Re(2 a z e^(i kx x)) for kx > 0,
    variance 4/3 a^2, and Re(a z e^(i ky y)) for kx = 0, variance 1/3 a^2.
    """
    amplitude = (1.0 + ky[:, None] ** 2 + kx[None, :] ** 2) ** (-_SPECTRAL_SLOPE / 2)
    weight = np.where(kx > 0, 4 / 3, 1 / 3)[None, :]
    scaled: np.ndarray = amplitude / np.sqrt((weight * amplitude**2).sum())
    return scaled


def build_fields(
    seed: int,
    *,
    channels: Any = 4,
    height: Any = 32,
    width: Any = 64,
    samples: Any = 2048,
    eval_samples: Any = None,
    dt: Any = 1.0,
) -> tuple[Fields, Fields]:
    """`eval_samples`: an eighth of `samples` unless given. `dt`: time between input and target."""
    samples = whole("fields", "samples", samples)
    if eval_samples is None:
        eval_samples = max(1, samples // 8)
    eval_samples = whole("fields", "eval_samples", eval_samples)
    shape = (
        whole("fields", "channels", channels),
        whole("fields", "height", height, minimum=4),
        whole("fields", "width", width, minimum=4),
    )
    dt = number("fields", "dt", dt, 0.0, 1e6)
    return Fields(seed, 0, samples, shape, dt), Fields(seed, 1, eval_samples, shape, dt)
