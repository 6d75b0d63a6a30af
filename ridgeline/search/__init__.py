"""Search for settings: many runs of one recipe, the better ones trained further, from checkpoints."""
