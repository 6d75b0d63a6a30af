"""The fields are what they claim: solutions of advection and diffusion, with unit variance."""

import numpy as np
import pytest

from ridgeline.data.build import build_sources
from ridgeline.errors import UsageError


@pytest.fixture(scope="module")
def fields():
    return build_sources("fields", {"samples": 300, "height": 32, "width": 48}, 7)[0]


def test_satisfies_the_equation_by_finite_differences(fields):
    eps = 1e-4
    before, now, after = fields.states(3, (0.5 - eps, 0.5, 0.5 + eps))
    slope = (after - before) / (2 * eps)
    height, width = now.shape[1:]
    # Fourth-order differences on a periodic grid: the highest mode has 4 points a wavelength in y,
    # so compare with spectral derivatives, made here from the full transform.
    ky = np.fft.fftfreq(height, 1 / height)[:, None]
    kx = np.fft.fftfreq(width, 1 / width)[None, :]
    spectrum = np.fft.fft2(now)
    dy = np.fft.ifft2(1j * ky * spectrum).real
    dx = np.fft.ifft2(1j * kx * spectrum).real
    laplacian = np.fft.ifft2(-(kx**2 + ky**2) * spectrum).real
    vy, vx = fields.velocity.T[:, :, None, None]
    expected = -vy * dy - vx * dx + fields.diffusivity[:, None, None] * laplacian
    assert np.abs(slope - expected).max() < 1e-6
    assert np.abs(expected).max() > 0.1


def test_agrees_with_a_finite_difference_solver():
    # Few modes on a fine grid, where second-order differences and small steps are accurate.
    source = build_sources("fields", {"channels": 2, "height": 5, "width": 5, "samples": 1}, 1)[0]
    source._shape = (2, 128, 128)
    state, expected = source.states(0, (0.0, 0.25))
    step = 2 * np.pi / 128
    vy, vx = source.velocity.T[:, :, None, None]
    nu = source.diffusivity[:, None, None]

    def slope(u):
        north, south = np.roll(u, -1, 1), np.roll(u, 1, 1)
        east, west = np.roll(u, -1, 2), np.roll(u, 1, 2)
        laplacian = (north + south + east + west - 4 * u) / step**2
        return -vy * (north - south) / (2 * step) - vx * (east - west) / (2 * step) + nu * laplacian

    dt = 0.25 / 100
    for _ in range(100):
        state = state + dt * slope(state + dt / 2 * slope(state))
    assert np.abs(state - expected).max() < 1e-3


def test_one_mode_decays_and_moves_as_it_should(fields):
    ky, kx, time = 2, 3, 1.7
    start, later = np.fft.fft2(fields.states(0, (0.0, time)))[:, :, ky, kx]
    vy, vx = fields.velocity.T
    factor = np.exp(-fields.diffusivity * (ky**2 + kx**2) * time - 1j * (ky * vy + kx * vx) * time)
    assert np.allclose(later, start * factor, rtol=1e-10)


def test_mass_is_conserved_and_variance_falls(fields):
    states = fields.states(1, (0.0, 1.0, 10.0))
    mass = states.mean(axis=(-2, -1))
    assert np.abs(mass - mass[0]).max() < 1e-12
    assert np.abs(mass).max() > 1e-3
    variance = states.var(axis=(-2, -1))
    assert (np.diff(variance, axis=0) < 0).all()


def test_two_steps_are_one_step_of_twice_the_length(fields):
    args = {"samples": 3, "height": 32, "width": 48}
    double = build_sources("fields", {**args, "dt": 2.0}, 7)[0].fetch(np.arange(3), 0)[1]
    assert np.allclose(double[2].numpy(), fields.states(2, (2.0,))[0], atol=1e-6)


def test_standardised(fields):
    inputs, targets = fields.fetch(np.arange(300), 0)
    assert (inputs.mean((0, 2, 3)).abs() < 0.1).all()
    assert ((inputs.std((0, 2, 3)) - 1).abs() < 0.05).all()
    # There is something to forecast: the step is neither nothing nor everything.
    change = (targets - inputs).pow(2).mean().sqrt()
    assert 0.05 < change < 1.0


def test_halves_differ_but_share_their_physics():
    train, held_out = build_sources("fields", {"samples": 16, "eval_samples": 5}, 0)
    assert (len(train), len(held_out)) == (16, 5)
    assert np.array_equal(train.velocity, held_out.velocity)
    assert not np.array_equal(train.fetch(np.arange(1), 0)[0], held_out.fetch(np.arange(1), 0)[0])


def test_large_grid():
    args = {"channels": 20, "height": 360, "width": 720, "samples": 4}
    inputs, targets = build_sources("fields", args, 0)[0].fetch(np.array([1]), 0)
    assert inputs.shape == targets.shape == (1, 20, 360, 720)
    assert inputs.isfinite().all()
    assert abs(float(inputs.std()) - 1) < 0.3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"height": 2}, "height=2 .* at least 4"),
        ({"dt": 0}, "dt=0 .* above 0"),
        ({"samples": "many"}, "samples='many'"),
        ({"hight": 32}, "no argument 'hight'.*did you mean 'height'"),
    ],
)
def test_errors(args, message):
    with pytest.raises(UsageError, match=message):
        build_sources("fields", args, 0)
