"""Worlds of seats, and the one sequence of phases in which a state changes its layout."""
