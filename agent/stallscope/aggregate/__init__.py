"""State made of frames. Never reads a clock: replaying a recording gives the same state."""
