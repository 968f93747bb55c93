"""A small shop, as its authors have written it for Dramatiq."""
