"""Checkpoints: what every rank holds, written so that any layout can read it back.

`boxes.py` says which box of which tensor a rank has, `held.py` finds it in a run, `save.py` and `load.py`
move it, `files.py` and `manifest.py` are the format on disk (safetensors and JSON, never pickle),
`retain.py` decides what is kept, `inspect.py`, `export.py` and `compare.py` are the commands.
"""
