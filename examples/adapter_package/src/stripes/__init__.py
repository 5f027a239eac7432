"""A small trainer with a sharding of its own, and its dynadapt adapter."""
