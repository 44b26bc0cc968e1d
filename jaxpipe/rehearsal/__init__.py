"""One rank's real program alone on its device: does it fit, and how long does each action take? See README.md."""
