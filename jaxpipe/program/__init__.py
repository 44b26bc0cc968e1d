"""Where *when* and *what* meet: schedules and stage functions become one instruction list per rank."""
