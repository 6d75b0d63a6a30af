"""The planner: memory and time of any layout on any machine, before anything runs. Needs no torch."""
