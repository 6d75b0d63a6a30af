"""Remedies, one file each, all of the form of `contract.py`; `table.py` lists them."""
