"""What lies on disk: one checkpoint's files, the directory of them, and what several processes do with both."""
