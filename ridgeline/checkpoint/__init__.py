"""Checkpoints: what every rank holds, written so that any layout can read it back.

`boxes.py` says which box of which tensor a rank has, `held.py` finds it in a run, `save.py` and `load.py`
move it, `files.py` and `manifest.py` are the format on disk (safetensors and JSON, never pickle),
`retain.py` decides what is kept, `damage.py` finds what is not as it was written. For the commands:
`find.py`, `describe.py` and `text.py`, which need no torch, `compare.py` and `export.py`.
"""
