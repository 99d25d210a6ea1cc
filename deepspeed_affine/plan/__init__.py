"""Plans: pure data computed from maps and metadata, printed before anything is executed."""
