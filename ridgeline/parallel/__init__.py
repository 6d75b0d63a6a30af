"""One file a technique, and `apply.py` which puts them on a model in order."""
