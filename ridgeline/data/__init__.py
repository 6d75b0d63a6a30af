"""Data for training: sources of samples, the order they come in, and the loader that feeds a rank.

`source.py` says what a source is, `sources/` holds the ones that ship, `build.py` finds one by
name, `order.py` decides which rank gets which sample, `loader.py` puts the three together. Called
by `train/setup.py` and by scripts that keep their own loop.
"""
