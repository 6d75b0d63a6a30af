"""DeepSpeed's optimizers by the modules they are imported from: torch's own, in one kernel."""
