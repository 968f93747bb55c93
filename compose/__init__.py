"""The demonstration: servers for people who use containers, and the application in ``app/``."""
