"""Instructions of one's own: ops that run functions of their own beside F, B and W."""
