"""A trained model as a package that a C++ program loads, proven to give what the model gives.

`run.py` takes a checkpoint of a run, `package.py` any module; `trace.py` and `build.py` make the package
with torch.export and AOTInductor, `check.py` holds it to the model, `native.py` builds the C++ program
and runs it.
"""
