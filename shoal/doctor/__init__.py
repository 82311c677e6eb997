"""Examines a machine and its network before a run uses them, and says what will break, what will be slow, and the fix.

`diagnosis.py` has the list of checks and puts the outcome together, `findings.py` what a check returns. `machine.py`
reads the facts about a machine once; `known_bad.py` is a table of combinations that upstream projects know to fail.
`hardware.py`, `limits.py`, `disk.py` and `addresses.py` have checks of one machine; `network.py` is what several ranks
measure together, and `forecast.py` what it means for the gradients of a config.
"""
