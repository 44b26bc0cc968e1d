"""What a run is told: typed settings, the sections they stand in, and the rules that hold between them."""
