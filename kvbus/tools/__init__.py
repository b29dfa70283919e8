"""Tools that look at a bus, or at what it left behind. None of them is needed for it to work."""
