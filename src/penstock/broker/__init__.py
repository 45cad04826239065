"""Topics, subjects, groups: who gets which message, and what became of it."""
