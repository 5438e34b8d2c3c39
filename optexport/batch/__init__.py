"""Many configs at once: each in a process of its own, and one account of them all."""
