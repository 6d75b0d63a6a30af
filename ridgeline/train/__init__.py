"""Training: `setup.py` builds once, `step.py` does one step, `loop.py` yields a result per step."""
