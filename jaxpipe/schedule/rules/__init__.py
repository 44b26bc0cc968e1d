"""Schedules by rules: what a free rank runs next, as a value that prints and parses."""

from jaxpipe.schedule.rules.traversal import Actions, Check, Kind, Traversal, View, traverse

__all__ = ["Actions", "Check", "Kind", "Traversal", "View", "traverse"]
