"""The Virtual Parameter Space: who holds which logical elements of which tensor. Pure data."""
