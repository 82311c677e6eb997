"""Proves that layouts compute the same training (`shoal verify`) and that killed runs end the same (`shoal chaos`)."""

from shoal.verify.prove import Verdict, exit_code, prove
from shoal.verify.verdicts import Table, print_verdict

__all__ = ["Table", "Verdict", "exit_code", "print_verdict", "prove"]
