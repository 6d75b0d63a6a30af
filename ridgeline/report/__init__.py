"""Pages about runs, made from run directories alone.

`build.py` puts a page together, `summary.py` computes its figures, `svg.py` draws and `page.py` is
the HTML around it. Called by `ridgeline report` and at the end of training; needs no torch, no
template engine and no plotting library, so a report can be made and opened on any machine.
"""
