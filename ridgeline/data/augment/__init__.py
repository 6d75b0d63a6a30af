"""Decoding and augmentation of whole batches, on whatever device they are.

`apply.py` is what others call; `geometry.py` crops and flips, `colour.py` changes colours, `mix.py`
mixes pairs of samples. Every random number is drawn on the host as a function of the seed, the epoch and
the sample's index; the device gets small tables of parameters and does float32 operations that are each
rounded once, the same on every device.
"""

from ridgeline.data.augment.apply import Augment, build_augment

__all__ = ["Augment", "build_augment"]
