"""Optimizers, learning-rate schedules and the rules that tie the rate to the batch."""
