"""Tests of dynadapt."""
