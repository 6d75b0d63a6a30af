"""Files that hold samples, one module a format; `FORMATS` of `table.py` names them.

Every format reads and writes whole shards and reaches any sample of one by its number. None of them
knows what the samples are for, how shards make a data set (`data/packed.py`), or torch. A format of
our own is not among them: tar with a table of offsets beside it reads as fast as any file can
(`benchmarks/loader.py`), and every tool there is can open it.
"""
