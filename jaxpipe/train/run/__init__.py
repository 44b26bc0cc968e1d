"""What goes on around the steps of a run: its directory, progress, saving, resuming, ending."""
