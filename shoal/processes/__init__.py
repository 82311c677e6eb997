"""The processes of a run: who this one is, how they find each other, and what happens when one hangs or drifts."""
