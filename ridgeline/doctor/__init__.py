"""What holds a training back: measured (`measure.py`), judged (`verdict.py`), remedied (`remedies/`)."""
