"""Device memory of the step loop: the arena, the pages of each kind of state, and the prefix tree."""
