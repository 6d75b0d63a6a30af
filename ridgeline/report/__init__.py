"""Pages about runs, made from run directories alone, and runs watched while they go on.

`build.py` puts a page together, `summary.py` computes its figures, `svg.py` draws and `page.py` is
the HTML around it; `live.py` follows runs, `terminal.py` and `served.py` show them. Called by `ridgeline
report`, `ridgeline watch` and at the end of training; needs no torch, no template engine and no plotting
library, so that it works on any machine.
"""
