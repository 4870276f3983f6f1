"""How fast a run is, how fast it could be, and what holds it back."""
