"""A data set brought to the disk of each node, once, and taken away when nobody uses it any more.

`plan.py` lists what there is and who copies what, `where.py` finds the disk, `copy.py` reads the shared
path and writes blocks, `held.py` is the folder on the node with its lock, users and record, `meet.py`
lets the ranks of a node work together, `share.py` sends blocks between nodes, `run.py` puts these
together, `command.py` is the command line. Only `share.py` needs torch.
"""
