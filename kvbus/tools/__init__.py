"""Command line tools that look at a live bus. They listen, and at most ask engines for a heartbeat (``Who``)."""
