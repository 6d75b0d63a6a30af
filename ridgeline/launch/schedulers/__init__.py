"""One file a scheduler, each filling in the same form; `table.py` lists them."""
