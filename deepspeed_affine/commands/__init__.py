"""The user's verbs: each reads metadata, makes a plan, executes it and checks the result."""
