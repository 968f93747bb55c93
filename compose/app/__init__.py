"""Monthly on-time reports over real flights, made by Dramatiq workers that lose no message.

``demo.py`` runs it all; ``actors.py`` is the part to read first, the rest is an ordinary program.
"""
