"""The equality prover behind `shoal verify` and behind the tests."""

from shoal.verify.prove import Verdict, prove
from shoal.verify.show import print_verdict

__all__ = ["Verdict", "print_verdict", "prove"]
