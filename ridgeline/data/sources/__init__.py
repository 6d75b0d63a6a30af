"""The sources that ship with Ridgeline, one file each; `SOURCES` of `data/build.py` names them."""
