"""The processes of a run: which rank this one is, how ranks meet, and what happens when one hangs or drifts."""
