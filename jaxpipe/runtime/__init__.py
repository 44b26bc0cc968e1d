"""Runs programs: dispatches stage functions, moves arrays between ranks and memories, and records what happened when."""
