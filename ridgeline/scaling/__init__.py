"""What a job would do on more devices than are here: one rank of it for real, and curves."""
