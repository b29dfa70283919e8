"""Tools that look at a bus, or at what it left behind. None of them is needed for it to work.

Here are the commands that only listen or read: tap, top, pending, trace, why, report. They may look at everything below
and change nothing; what they know is a pure table, what they draw fits any width.
"""
