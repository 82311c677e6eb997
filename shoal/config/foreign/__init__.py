"""Configs in the words of other programs, and what shoal calls the same things.

`rules.py` has the mechanism: a table of rules is data, and one pure function turns a foreign tree into ours.
"""
