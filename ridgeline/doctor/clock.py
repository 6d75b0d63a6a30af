"""What holds a GPU's clock down while a training runs, in words. Called by `verdict.py`; without torch."""

from __future__ import annotations

from ridgeline.doctor.measured import MATRIX, Measured
from ridgeline.machine.picture import amount

CAPPED, HOT = 0.5, 0.25
"""Shares of the time in which the clock is held down, by the power limit and by the temperature, from which
it is said: the first is what a well-used device does, the second one that is not cooled."""


def clock_evidence(m: Measured) -> list[str]:
    """What holds the device's clock down."""
    power = m.power
    if power is None or (power.capped <= CAPPED and power.hot <= HOT):
        return []
    lines = [
        f"the device draws {power.watts:.0f} of {power.limit_watts:.0f} W and runs at "
        f"{power.clock_mhz:,.0f} of {power.max_clock_mhz:,.0f} MHz; {power.watts * m.step_s:.3g} J a step"
    ]
    if power.capped > CAPPED:
        lines.append(
            f"its power limit holds the clock down for {power.capped:.0%} of the time: what needs less "
            "energy is faster (fewer bytes, a narrower precision), what only fills gaps is not"
        )
    if power.hot > HOT:
        lines.append(f"its temperature holds the clock down for {power.hot:.0%} of the time")
    sustained = m.roofline.sustained if m.roofline is not None else {}
    for row in m.classes:
        best = sustained.get(row.precision)
        if best is not None and row.flops and row.seconds and row.name == MATRIX:
            lines.append(
                f"{row.precision} products that go on for seconds reach "
                f"{amount(best.flops_per_s, 'FLOP/s')} at {best.watts:.0f} W; these reach "
                f"{amount(row.flops / row.seconds, 'FLOP/s')}"
            )
    return lines
