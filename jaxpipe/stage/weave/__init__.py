"""Jaxprs cut at their tensor-parallel collectives, and woven so that each collective has compute under it."""
